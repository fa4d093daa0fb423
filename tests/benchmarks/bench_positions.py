"""How exactly, how safely and how fast are passages located in long documents?

    python tests/benchmarks/bench_positions.py [--pairs 1000] [--words 10000] [--share 0.1] [--collection FOLDER]

Documents are made of one half of the texts of a collection (the documentation of the installed Python packages, or a
folder with docs.jsonl); among them stands one passage of 30 to 100 words of the other half, changed as the row says.
`exact` and `within 5` compare its position with the true one, in words and punctuation marks, over all pairs; seconds
are CPU seconds of one call of `relevant_positions`, the tokenisation of the documents included. Targets: exact in 99 %
of verbatim passages, within 5 tokens in 95 % with 10 % of the words changed, 1,000 pairs of 10,000 words in 30 s.

The second table is for the collections docstrings-early, -uniform and -far, whose gold positions are known.

The third one counts chance matches: passages of so many words of one half of the collection, looked for in
documents of the other half. Passages that both halves share verbatim are counted apart.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import unicodedata
from collections.abc import Callable

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.language import count_tokens, words
from pyterrier_longdoc.data import DocstringsDataset

Change = Callable[[str, random.Random], str]


class Texts:
    """Random texts, passages, words and documents of a collection."""

    def __init__(self, texts: list[str], seed: int) -> None:
        self.texts = [text for text in texts if len(text.split()) >= 30]
        self.sources, self.fillers = self.texts[::2], self.texts[1::2]
        self.rng = random.Random(seed)
        self.vocabulary = [word for text in self.texts[::20] for word in text.split()]

    def passage(self, low: int, high: int) -> str:
        """Consecutive words of a text, with the white space between them."""
        text = self.rng.choice(self.sources)
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        size = min(self.rng.randint(low, high), len(spans))
        first = self.rng.randrange(len(spans) - size + 1)
        return text[spans[first][0] : spans[first + size - 1][1]]

    def filler(self, count: int) -> list[str]:
        """Texts that together have at least `count` words; the last one is cut."""
        texts, size = [], 0
        while size < count:
            own = self.rng.choice(self.fillers).split(" ")[: count - size]
            texts.append(" ".join(own))
            size += len(texts[-1].split()) or 1
        return texts


def edited(texts: Texts, share: float, kinds: tuple[str, ...]) -> Change:
    """Changes a share of the words."""

    def change(passage: str, rng: random.Random) -> str:
        out = []
        for word in re.findall(r"\S+\s*", passage):
            kind = rng.choice(kinds) if rng.random() < share else "kept"
            if kind == "substituted":
                out.append(rng.choice(texts.vocabulary) + " ")
            elif kind == "inserted":
                out += [word, rng.choice(texts.vocabulary) + " "]
            elif kind == "kept":
                out.append(word)
        return "".join(out).strip()

    return change


def respaced(passage: str, rng: random.Random) -> str:
    """Other white space, as text extraction leaves behind."""
    return "".join(rng.choice(["\n", "  ", "\t", "\u00a0"]) if c.isspace() else c for c in passage)


def recoded(passage: str, rng: random.Random) -> str:
    """Other characters for the same words: soft hyphens, accents, curly quotes, wide letters."""
    out = []
    for character in passage:
        if character.isascii() and character.isalpha() and rng.random() < 0.1:
            wide = chr(ord(character) + 0xFEE0)
            character = rng.choice([character + "\u00ad", character.upper(), character + "\u0301", wide])
        out.append({"'": "\u2019", '"': "\u201d"}.get(character, character))
    return unicodedata.normalize("NFD", "".join(out))


def pairs_of(texts: Texts, args: argparse.Namespace, change: Change, near: Change | None, *, absent: bool) -> tuple:
    """Topics, qrels, corpus and passages, and the true positions in tokens (None where there is none)."""
    corpus, passages, truth = [], [], []
    for number in range(args.pairs):
        passage = texts.passage(30, 100)
        filler = texts.filler(args.words)
        place = texts.rng.randrange(len(filler) + 1)
        before, after = filler[:place], filler[place:]
        if near is not None:
            before.insert(texts.rng.randrange(len(before) + 1), near(passage, texts.rng))
        own = [] if absent else [change(passage, texts.rng)]
        head = "".join(text + "\n\n" for text in before)
        truth.append(None if absent else count_tokens(head))
        corpus.append((str(number), head + "\n\n".join([*own, *after])))
        passages.append((str(number), passage))
    topics = pd.DataFrame({"qid": [str(number) for number in range(args.pairs)]})
    qrels = topics.assign(docno=topics["qid"], label=1)
    frames = pd.DataFrame(corpus, columns=["docno", "text"]), pd.DataFrame(passages, columns=["qid", "text"])
    return topics, qrels, *frames, truth


def measure(name: str, args: argparse.Namespace, data: tuple) -> None:
    """One row of the first table."""
    topics, qrels, corpus, passages, truth = data
    start = time.process_time()
    found = ld.relevant_positions(topics, qrels, corpus, passages=passages).frame["first_token"]
    seconds = time.process_time() - start
    pairs = [(at, true) for at, true in zip(found, truth, strict=True) if not pd.isna(at)]
    off = [abs(at - true) for at, true in pairs if true is not None]
    shares = [len(pairs), sum(d == 0 for d in off), sum(d <= 5 for d in off)]
    row = " | ".join(f"{share / len(truth):.1%}" for share in shares)
    print(f"| {name} | {row} | {seconds:.1f} |", flush=True)


def accuracy(texts: Texts, args: argparse.Namespace) -> None:
    """Prints the first table."""
    share, all_kinds = args.share, ("substituted", "deleted", "inserted")
    same: Change = lambda passage, rng: passage  # noqa: E731
    near = edited(texts, 0.2, ("substituted",))
    far = edited(texts, 0.5, ("substituted",))
    cases: dict[str, tuple[Change, Change | None, bool]] = {
        "verbatim": (same, None, False),
        "white space": (respaced, None, False),
        "letters": (recoded, None, False),
        **{f"{share:.0%} {kind}": (edited(texts, share, (kind,)), None, False) for kind in all_kinds},
        f"{share:.0%} of all three": (edited(texts, share, all_kinds), None, False),
        "verbatim, after a copy with 20 % substituted": (same, near, False),
        f"{share:.0%} of all three, after a copy with 50 % substituted": (edited(texts, share, all_kinds), far, False),
        "not in the document": (same, None, True),
        "only a copy with 50 % substituted": (same, far, True),
    }
    print(f"{args.pairs} pairs, documents of {args.words} words\n")
    print("| passage | found | exact | within 5 | seconds |\n| --- | ---: | ---: | ---: | ---: |", flush=True)
    for name, (change, copy, absent) in cases.items():
        measure(name, args, pairs_of(texts, args, change, copy, absent=absent))


def with_gold(args: argparse.Namespace) -> None:
    """Prints the second table."""
    sources = {entry.docno: entry.text for entry in DocstringsDataset().entries}
    texts = Texts(list(sources.values()), 0)
    change = edited(texts, args.share, ("substituted", "deleted", "inserted"))
    print("\n| collection | passage | found | exact | within 5 |\n| --- | --- | ---: | ---: | ---: |")
    for place in ("early", "uniform", "far"):
        made = pt.get_dataset(f"longdoc:docstrings-{place}")
        long_enough = made.gold[[len(words(sources[name])) >= 30 for name in made.gold["passage"]]]
        gold = long_enough.sample(min(args.pairs, len(long_enough)), random_state=0)
        qrels = gold[["qid", "docno"]].assign(label=1)
        for name, how in (("verbatim", lambda text, _: text), (f"{args.share:.0%} changed", change)):
            # Edited here is what is looked for: the documents are as they are.
            passages = gold[["qid"]].assign(text=[how(sources[own], texts.rng) for own in gold["passage"]])
            found = ld.relevant_positions(made.topics, qrels, made.corpus, passages=passages)
            both = found.matched.merge(gold, on=["qid", "docno"], suffixes=("", "_gold"))
            off = (both["first_token"] - both["first_token_gold"]).abs()
            shares = [len(both) / len(gold), (off == 0).sum() / len(gold), (off <= 5).sum() / len(gold)]
            print(f"| {place} | {name} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)


def chance(collection: list[str], args: argparse.Namespace) -> None:
    """Prints the third table."""
    half = len(collection) // 2
    ours, theirs = Texts(collection[:half], 1), Texts(collection[half:], 2)
    documents = ["\n\n".join(theirs.filler(args.words)) for _ in range(20)]
    locator = ld.PassageLocator(min_words=1, min_words_edited=1)
    print("\n| words | looked for | verbatim | substring | subsequence |\n| ---: | ---: | ---: | ---: | ---: |")
    for size in (4, 6, 8, 10, 12, 16, 24, 32):
        passages = [text for text in (ours.passage(size, size) for _ in range(1000)) if len(words(text)) == size][:200]
        found = [match for document in documents for match in locator.locate(passages, document) if match is not None]
        verbatim = sum(match.similarity == 1 for match in found)
        edited_ones = [sum(m.method == way and m.similarity < 1 for m in found) for way in ("substring", "subsequence")]
        looked_for = len(passages) * len(documents)
        print(f"| {size} | {looked_for} | {verbatim} | {edited_ones[0]} | {edited_ones[1]} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--words", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.1, help="share of the words that are changed")
    parser.add_argument("--collection", help="folder with docs.jsonl; default: the docstrings")
    args = parser.parse_args()
    dataset = pt.get_dataset(f"longdoc:folder:{args.collection}" if args.collection else "longdoc:docstrings")
    collection = [document["text"] for document in dataset.get_corpus_iter(verbose=False)]
    accuracy(Texts(collection, 0), args)
    if not args.collection:
        with_gold(args)
    chance(collection, args)


if __name__ == "__main__":
    main()
