"""Trains the cross-encoder of the packaged models on questions with known answers.

    python tests/benchmarks/train_questions.py prepare COLLECTIONS FOLDER
    python tests/benchmarks/train_questions.py train FOLDER --round 1 --start DOCSTRINGS/maxp --steps 1100
    python tests/benchmarks/train_questions.py train FOLDER --steps 1100    # a MaxSim, into FOLDER/maxsim
    python tests/benchmarks/train_questions.py package FOLDER       # this MaxSim, into the package
    python tests/benchmarks/train_questions.py mine FOLDER FOLDER/round1 mined
    python tests/benchmarks/train_questions.py train FOLDER --round 2 --start FOLDER/round1 --steps 400 \
        --examples mined.jsonl.gz

DOCSTRINGS is the folder of `train_docstrings.py`. COLLECTIONS holds a folder each of squad, newwiki, fairytaleqa,
medquad and nq: docs.jsonl, topics.tsv, spans.jsonl, passages.jsonl, splits.tsv and findable.txt; and of time, cranfield
and vaswani, on which nothing is ever trained.

1. `prepare`: for each question of the training splits that BM25 can answer the passage that does, and four others of
   BM25's best 20 among the passages of the training split; of the docstrings' training split the parts of documents
   that BM25 finds. Passages with much text of a dev or test split, or of collections never trained on, are left out,
   and so are questions that are asked there word for word.
2. `train`: cross entropy over the five, all weights but a MaxP's embeddings. Half of the examples have the title of the
   document before the passage, where there are titles, and in some an empty text is one of the negatives. `package`
   keeps of what a MaxSim has learnt the largest singular values of each matrix, and none of its embeddings.
3. `mine`: for questions that the first round has not had, the negatives are those of BM25's best that its model scores
   highest.

Interrupted, a training continues where it was. Needs the extras `demo` and `train`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pyterrier as pt
import torch
from questions import candidates
from train_docstrings import best_passage, phrases_of

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.data import docstrings
from pyterrier_longdoc.data.docstrings import folded
from pyterrier_longdoc.modelling.backbones.architectures import use_attention
from pyterrier_longdoc.modelling.compact import pack
from pyterrier_longdoc.modelling.saved import PLACEHOLDER_NAME

COLLECTIONS = ("squad", "newwiki", "fairytaleqa", "medquad", "nq")
NEVER = ("time", "cranfield", "vaswani")
"""On these nothing is trained, and nothing that stands in them."""

DEPTH, NEGATIVES = 20, 4
HARD, HARD_DEPTH = 2, 6
"""So many of the negatives are of the best six, the others of the rest."""
POOL = 12
"""Of so many of BM25's best a model chooses the negatives of a later round."""
WORDS, STEP = 135, 45
"""Longer passages are cut to the best of their windows of so many words, about 180 tokens."""
SHORT_WORDS = 72
"""Of windows as models read them in long documents, about 100 tokens."""
TITLED, SHORT, EMPTY = 0.5, 0.35, 0.05
"""Shares of the questions: with titles, with short passages where the answer is known, with an empty negative."""
SHARED, SHARED_OWN = 0.1, 0.5
"""A passage with a larger share of its 12-word phrases in held-out text is not trained on; in that of its own
collection, where pages have paragraphs in common that answer nothing, it may be more."""
FIRST_STEPS, QUERIES_PER_STEP = 1100, 16
SHARES = {"docstrings": 2600, "fairytaleqa": 1800, "newwiki": 1200, "squad": 1200, "nq": 700, "medquad": 500}
"""Steps of the first round, and questions of the second: the more, the more the first has left to do on dev."""
ABOVE = 1.0
"""Of what a model scores so much higher than the answer it is assumed that it answers, too."""
SAME = 0.5
"""A passage that has so much of the answering one is no negative."""

RANK = 16
"""Of the changes in a packaged MaxSim: on dev as good as 32, and a megabyte."""
TOKENS, TITLE_TOKENS = 200, 32
WITH_TITLES: dict[str, Any] = {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": TITLE_TOKENS}
"""How a passage is read with its title."""

_WORD = re.compile(r"\S+")


# Collections.


@dataclass(frozen=True)
class Passage:
    """A part of a document."""

    docno: str
    title: str
    text: str
    start: int = 0
    lead: str = ""  # the heading, which is a line before it in the document

    @cached_property
    def phrases(self) -> set[int]:
        return phrases_of(self.text)


@dataclass(frozen=True)
class Question:
    """A question, the numbers of the passages that answer it, and the characters of the answer in one of these."""

    qid: str
    query: str
    gold: tuple[int, ...]
    answer: tuple[int, int, int] | None = None  # number of the passage, start and end in it


class Collection:
    """A folder of documents and questions, of which a split is read."""

    def __init__(self, folder: Path) -> None:
        dataset = pt.get_dataset(f"longdoc:folder:{folder}")
        self.folder, self.documents = folder, dataset.documents
        self.queries = dict(zip(dataset.topics["qid"], dataset.topics["query"], strict=True))
        self.split_of_query = {qid: split for split, qids in dataset.splits.items() for qid in qids}
        judged = dataset.qrels[["qid", "docno"]].itertuples(index=False)
        self.split_of_document = {docno: self.split_of_query.get(qid) for qid, docno in judged}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a file of JSON lines."""
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def passages(self, split: str) -> list[Passage]:
        """Return the passages of a split's documents."""
        found = []
        for row in self.rows("passages.jsonl"):
            if self.split_of_document[row["docno"]] == split:
                document = self.documents[row["docno"]]
                text = document["text"][row["start"] : row["end"]]
                found.append(
                    Passage(row["docno"], document.get("title", ""), text, row["start"], row.get("title") or "")
                )
        return found

    def questions(self, split: str, passages: Sequence[Passage]) -> list[Question]:
        """Return the questions of a split that BM25 can answer."""
        number = {(passage.docno, passage.start): i for i, passage in enumerate(passages)}
        spans = defaultdict(list)
        for row in self.rows("spans.jsonl"):
            spans[row["qid"]].append(row)
        found = []
        for qid in (self.folder / "findable.txt").read_text(encoding="utf-8").split():
            if self.split_of_query[qid] == split:
                gold = [number[row["docno"], row["start"]] for row in spans[qid]]
                answers = [
                    (i, row["answer_start"] - passages[i].start, row["answer_end"] - passages[i].start)
                    for i, row in zip(gold, spans[qid], strict=True)
                    if "answer_start" in row
                ]
                found.append(Question(qid, self.queries[qid], tuple(gold), answers[0] if answers else None))
        return found


def bm25(texts: Sequence[str], topics: pd.DataFrame, depth: int) -> dict[str, list[int]]:
    """Return the numbers of the best texts for each qid, best first."""
    run = candidates({str(i): text for i, text in enumerate(texts)}, topics, depth)
    found: dict[str, list[int]] = {}
    for qid, docno in zip(run["qid"], run["docno"], strict=True):
        found.setdefault(qid, []).append(int(docno))
    return found


# What is held out.


class HeldOut:
    """Phrases and questions of all dev and test splits, and of the collections that are never trained on."""

    def __init__(self, collections: Path) -> None:
        self.phrases: dict[str, set[int]] = {}
        self.queries: dict[str, set[str]] = {}
        for name in (*COLLECTIONS, *NEVER):
            own, splits = Collection(collections / name), (None,) if name in NEVER else ("dev", "test")
            texts = [row["text"] for docno, row in own.documents.items() if own.split_of_document.get(docno) in splits]
            self.phrases[name] = set().union(*map(phrases_of, texts))
            held = [query for qid, query in own.queries.items() if own.split_of_query.get(qid) in splits]
            self.queries[name] = set(map(folded, held))
        entries = pt.get_dataset("longdoc:docstrings").entries
        held = [entry for entry in entries if docstrings.split_of(entry.docno) != "train"]
        self.phrases["docstrings"] = set().union(*(phrases_of(entry.text) for entry in held))
        self.queries["docstrings"] = {folded(entry.query) for entry in held if entry.query}
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def has(self, name: str, phrases: set[int]) -> bool:
        """Return whether much of a passage of a collection is held out, and count where it stands."""
        there = []
        for other, held in self.phrases.items():
            share = len(phrases & held) / max(1, len(phrases))
            if share > (SHARED_OWN if other == name else SHARED):
                there.append((name, other, "passages"))
        self.counts.update(there)
        return bool(there)

    def asks(self, name: str, query: str) -> bool:
        """Return whether a question of a collection is held out, and count where."""
        asked = [other for other, held in self.queries.items() if folded(query) in held]
        for other in asked:
            self.counts[name, other, "questions"] += 1
        return bool(asked)


# Examples.


def examples_of(
    name: str, passages: Sequence[Passage], questions: Sequence[Question], held: HeldOut, *, pool: bool = False
) -> pd.DataFrame:
    """Return `qid, query, docno, title, text, label`, five rows for each question, the answering passage first.

    A `pool` has all of BM25's best that are no answer, of which a model chooses later.
    """
    out = {i for i, passage in enumerate(passages) if held.has(name, passage.phrases)}
    topics = pd.DataFrame([(q.qid, q.query) for q in questions], columns=["qid", "query"])
    runs = bm25([p.text for p in passages], topics, DEPTH)
    rows: list[tuple[object, ...]] = []
    for question in questions:
        if held.asks(name, question.query):
            continue
        rng = Random(f"questions:{question.qid}")
        gold = question.answer[0] if question.answer else rng.choice(question.gold)
        found = [i for i in runs.get(question.qid, []) if i not in out and _differs(passages, i, question.gold)]
        others = list({folded(passages[i].text): i for i in reversed(found)}.values())[::-1]
        if gold in out or len(others) < HARD_DEPTH + NEGATIVES - HARD:
            held.counts[name, "", "questions left out"] += 1
            continue
        hard = rng.sample(others[:HARD_DEPTH], HARD)
        chosen = [gold, *hard, *rng.sample(others[HARD_DEPTH:], NEGATIVES - HARD)]
        if pool:
            chosen = [gold, *others[:POOL]]
        own = _texts(question, [passages[i] for i in chosen], rng)
        if rng.random() < EMPTY and not pool:
            own[1 + rng.randrange(NEGATIVES)] = ("", "")
        for i, (title, text) in zip(chosen, own, strict=True):
            rows.append((f"{name}:{question.qid}", question.query, f"{name}:{i}", title, text, int(i == gold)))
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "title", "text", "label"])


def _differs(passages: Sequence[Passage], number: int, gold: Sequence[int]) -> bool:
    """Return whether a passage is another text than those that answer."""
    if number in gold:
        return False
    own = passages[number]
    for other in (passages[i] for i in gold):
        least = min(len(own.phrases), len(other.phrases))
        if folded(own.text) == folded(other.text) or (least and len(own.phrases & other.phrases) > SAME * least):
            return False
    return True


def _texts(question: Question, passages: Sequence[Passage], rng: Random) -> list[tuple[str, str]]:
    """Return title and text of a question's passages, in one form: with titles, headings, short, or without."""
    titled, headed = rng.random() < TITLED, rng.random() < 0.5
    short = rng.random() < SHORT and question.answer is not None
    found = []
    for i, passage in enumerate(passages):
        if i == 0 and question.answer is not None:
            text = around(passage.text, question.answer[1:], SHORT_WORDS if short else WORDS, rng)
        else:
            text = best(question.query, passage.text, SHORT_WORDS if short else WORDS)
        text = f"{passage.lead}\n{text}" if headed and passage.lead else text
        found.append((passage.title if titled else "", text))
    return found


def best(query: str, text: str, words: int) -> str:
    """Return the text, or the window of so many words that has most of the query."""
    return text if len(text.split()) <= words else best_passage(query, text, words, max(1, words // 3))


def around(text: str, answer: Sequence[int], words: int, rng: Random) -> str:
    """Return the text, or so many words of it in which the answer stands somewhere."""
    places = [match.span() for match in _WORD.finditer(text)]
    if len(places) <= words:
        return text
    first = next((i for i, (_, end) in enumerate(places) if end > answer[0]), 0)
    last = next((i for i, (_, end) in enumerate(places) if end >= answer[1]), first)
    earliest, latest = max(0, min(last + 1 - words, first)), min(first, len(places) - words)
    start = rng.randint(min(earliest, latest), latest)
    return text[places[start][0] : places[start + words - 1][1]]


def docstring_passages(split: str = "train") -> tuple[list[Passage], list[Question]]:
    """Return the documents of a split of the docstrings, and its topics."""
    entries = [e for e in pt.get_dataset("longdoc:docstrings").entries if docstrings.split_of(e.docno) == split]
    passages = [Passage(entry.docno, "", entry.text) for entry in entries]
    questions = [Question(f"q-{e.docno}", e.query, (i,)) for i, e in enumerate(entries) if e.query]
    return passages, questions


def prepare(collections: Path, folder: Path) -> None:
    """Write train.jsonl.gz, pool.jsonl.gz and what was left out."""
    held, parts, pools = HeldOut(collections), [], []
    for name in (*COLLECTIONS, "docstrings"):
        if name == "docstrings":
            passages, questions = docstring_passages()
        else:
            collection = Collection(collections / name)
            passages = collection.passages("train")
            questions = collection.questions("train", passages)
        counts = held.counts.copy()
        pools.append(examples_of(name, passages, questions, held, pool=True))
        held.counts = counts
        parts.append(examples_of(name, passages, questions, held))
        own = parts[-1]
        words = own["text"].str.split().str.len()
        print(
            f"{name}: {len(passages)} passages, {len(questions)} questions, {own['qid'].nunique()} of them trained on, "
            f"{words.mean():.0f} words a passage, {(own['title'] != '').mean():.0%} with title",
            flush=True,
        )
    pd.concat(parts, ignore_index=True).to_json(folder / "train.jsonl.gz", orient="records", lines=True)
    pd.concat(pools, ignore_index=True).to_json(folder / "pool.jsonl.gz", orient="records", lines=True)
    counts = [(*key, count) for key, count in held.counts.items() if count]
    table = pd.DataFrame(counts, columns=["of", "in", "what", "count"])
    print(table.to_string(index=False))
    table.to_csv(folder / "duplicates.csv", index=False)


# Negatives that a model chooses.


def mine(folder: Path, name: str, into: str) -> None:
    """Write examples of questions that round 1 has not had, against the others that its model scores highest.

    Those that it scores above the answer by more than `ABOVE` are left out: most are answers that nobody marked.
    """
    pool = read_examples(folder / "data" / "pool.jsonl.gz")
    drawn = read_examples(folder / "data" / "train.jsonl.gz")["qid"].drop_duplicates().tolist()
    Random("1:0").shuffle(drawn)  # as the training's first epoch does
    qids = pool.loc[~pool["qid"].isin(drawn[: QUERIES_PER_STEP * FIRST_STEPS]), "qid"].drop_duplicates()
    chosen = []
    for collection, number in SHARES.items():
        unseen = qids[qids.str.startswith(f"{collection}:")]
        chosen += unseen.sample(min(number, len(unseen)), random_state=1).tolist()
    model = ld.CrossEncoder.load(
        name, window_size=TOKENS, stride=TOKENS, max_doc_len=TOKENS, dtype="bfloat16", **WITH_TITLES
    )
    scored = model(pool[pool["qid"].isin(chosen)])
    hardest(scored).to_json(folder / "data" / f"{into}.jsonl.gz", orient="records", lines=True)


def hardest(scored: pd.DataFrame) -> pd.DataFrame:
    """Return for each question the answer and the others with the highest scores, but for those far above it."""
    answer = scored.loc[scored["label"] > 0].set_index("qid")["score"]
    above = scored["score"] - scored["qid"].map(answer)
    usable = scored[(scored["label"] > 0) | (above < ABOVE)].sort_values(
        ["qid", "label", "score"], ascending=[True, False, False], kind="stable"
    )
    usable = usable[usable.groupby("qid").cumcount() <= NEGATIVES]
    whole = usable.groupby("qid")["qid"].transform("size") == 1 + NEGATIVES
    chosen = usable.loc[whole, ["qid", "query", "docno", "title", "text", "label"]].reset_index(drop=True)
    for qid, rows in chosen.groupby("qid").groups.items():
        rng = Random(f"mined:{qid}")
        if rng.random() < EMPTY:
            chosen.loc[rows[1 + rng.randrange(NEGATIVES)], ["title", "text"]] = ""
    return chosen


# Training.


def read_examples(file: Path) -> pd.DataFrame:
    """Return what `prepare` wrote."""
    text = dict.fromkeys(("qid", "query", "docno", "title", "text"), str)
    return pd.read_json(file, orient="records", lines=True, dtype={**text, "label": int}).fillna("")


def train(folder: Path, args: argparse.Namespace) -> None:
    """Train one round of a MaxP, or a MaxSim with a random projection; each reads a passage as one window."""
    title = "maxsim" if args.start is None else f"round{args.round}"
    target = folder / title
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return
    rates = {"encoder.": 5e-5, "": 5e-4} | ({"encoder.representation.": 5e-4} if args.start is None else {})
    training = ld.TrainingArgs(
        epochs=4,
        max_steps=args.steps,
        loss="cross_entropy",
        reduction="mean",
        negatives=NEGATIVES,
        max_negative_rank=None,
        queries_per_step=QUERIES_PER_STEP,
        queries_per_forward=8,
        learning_rates=rates,
        schedule="linear",
        warmup=0.05,
        weight_decay=0.01,
        decay="matrices",
        max_grad_norm=1.0,
        dropout=0.0,
        dtype=args.dtype,
        checkpoint=folder / "state" / title,
        save_steps=25,
        seed=args.round,
    )
    reading: dict[str, Any] = {"window_size": TOKENS, "max_doc_len": TOKENS, "dtype": "float32", **WITH_TITLES}
    if args.start is None:
        model: Any = ld.MaxSim(ENCODER, training=training, verbose=True, **reading)
    else:
        model = ld.MaxP(ENCODER, training=training, verbose=True, **reading)
        model.start_from(ld.CrossEncoder.load(args.start))
        for parameter in model.model.encoder.backbone.embeddings.parameters():
            parameter.requires_grad_(False)
    use_attention(model.model.encoder.backbone, "eager")  # on a CPU sdpa is slow backwards
    examples = read_examples(folder / "data" / args.examples)
    begin = time.perf_counter()
    model.fit(examples.drop(columns="label"), examples.loc[examples["label"] > 0, ["qid", "docno", "label"]])
    model.save(target)
    print(f"\n{title}: {(time.perf_counter() - begin) / 60:.1f} minutes\n{model.history.to_string()}")


def package(folder: Path) -> None:
    """Write the MaxSim into the package, small."""
    arguments: dict[str, Any] = {"text_field": "text", "repeat": None, "max_doc_len": None, "training": None}
    model = ld.MaxSim.load(folder / "maxsim", **arguments)
    untrained = ld.MaxSim(ENCODER, seed=model.seed, device="cpu").model
    before, state = untrained.state_dict(), model.model.state_dict()
    for name, value in state.items():
        if name.startswith("encoder.backbone.") and value.ndim == 2:
            u, s, v = torch.linalg.svd((value - before[name]).double(), full_matrices=False)
            kept = 0 if ".embeddings." in name else RANK
            state[name] = before[name] + ((u[:, :kept] * s[:kept]) @ v[:kept]).float()
    model.model.load_state_dict(state)
    write_packaged(model, "maxsim", untrained)


def write_packaged(model: Any, name: str, untrained: Any, *, encoder_of: str | None = None) -> None:
    """Write a model into the package in its compact format, with the card of all packaged models."""
    target = Path(ld.__file__).parent / "models" / name
    shutil.rmtree(target, ignore_errors=True)
    model.save(target)
    pack(target, untrained, encoder_of=encoder_of)
    card, readme = Path(__file__).with_name("packaged_card.md").read_text(encoding="utf-8"), target / "README.md"
    text = readme.read_text(encoding="utf-8").replace(PLACEHOLDER_NAME, f"longdoc:{name}")
    readme.write_text(text + card, encoding="utf-8")
    print(f"longdoc:{name}: {sum(file.stat().st_size for file in target.iterdir()) / 1e6:.2f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare")
    first.add_argument("collections", type=Path)
    first.add_argument("folder", type=Path)
    second = commands.add_parser("train")
    second.add_argument("folder", type=Path)
    second.add_argument("--round", type=int, default=1)
    second.add_argument("--steps", type=int, required=True)
    second.add_argument("--start", help="a model on the same encoder; without it a fresh MaxSim")
    second.add_argument("--examples", default="train.jsonl.gz")
    second.add_argument("--dtype", default="bfloat16")
    third = commands.add_parser("mine")
    third.add_argument("folder", type=Path)
    third.add_argument("model")
    third.add_argument("into", help="name of the examples")
    commands.add_parser("package").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "prepare":
        data = args.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        prepare(args.collections, data)
    elif args.command == "mine":
        mine(args.folder, args.model, args.into)
    elif args.command == "package":
        package(args.folder)
    else:
        train(args.folder, args)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
