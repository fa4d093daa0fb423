"""Trains the packaged FirstP on beginnings of whole documents, as long as it reads them.

    python tests/benchmarks/train_firstp.py prepare COLLECTIONS FOLDER
    python tests/benchmarks/train_firstp.py train FOLDER --steps 200
    python tests/benchmarks/train_firstp.py dev FOLDER MODEL [MODEL ...] --sizes 477 250
    python tests/benchmarks/train_firstp.py package FOLDER

COLLECTIONS is that of `train_questions.py`, which also says what is held out.

1. `prepare`: for questions of the training and dev splits, a page whose first 477 tokens have the answer, and others.
   Pages of medquad and the docstrings begin where the documents do. squad, newwiki and fairytaleqa have few documents:
   their pages begin at any passage, so that the answer stands anywhere in what is read, and half of them end earlier.
   Half of the short passages of nq stand among others. Most questions have the same document without the answer as one
   negative; the others are of BM25's best.
2. `train`: from the packaged MaxP, by cross entropy over a question's pages, as a change of rank 16 of each matrix.
3. `dev`: nDCG@10 and RR on the dev questions, for several sizes of the window.
4. `package`: writes the model into the package, as changes of the packaged MaxP's encoder.

Interrupted, a training continues where it was. Needs the extras `demo` and `train`.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pyterrier as pt
from ir_measures import RR, nDCG
from train_docstrings import phrases_of
from train_heads import without_answers
from train_questions import (
    COLLECTIONS,
    Collection,
    HeldOut,
    Question,
    bm25,
    docstring_passages,
    read_examples,
    write_packaged,
)
from transformers import AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder
from pyterrier_longdoc.modelling.backbones.architectures import use_attention

TOKENS, LEAST = 477, 100
"""What is read of a page at most; so much of a passage that answers, or its answer, stands in it."""
SHORT = 0.5
"""Of pages that begin at any passage, and of passages among others, so many are shorter."""
NEGATIVES, DEPTH, BEST = 3, 100, 8
"""The negatives are drawn from the best so many of BM25, one of each document unless there are few."""
COPIED = 0.3
"""A question is left out if a negative has more than this share of the right page's 12-word phrases."""
SAME, TITLED = 0.6, 0.5
"""Shares of questions with the same document as a negative, and with the title as first line."""
QUESTIONS = {"docstrings": 1000, "medquad": 900, "fairytaleqa": 700, "squad": 500, "newwiki": 500, "nq": 400}
DEV, DEV_NEGATIVES = 60, 7
"""Questions of each collection on dev, and their negatives."""
RANK, RATE, QUERIES_PER_STEP = 16, 5e-4, 8


# Pages.


@dataclass(frozen=True)
class Page:
    """A text that begins as a document, and which part of which document it is."""

    docno: str
    title: str
    text: str
    start: int = 0


class Texts:
    """Documents of which pages are cut by tokens."""

    def __init__(self, texts: dict[str, str]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(encoder_folder(ENCODER))
        self.texts = texts
        names, found = list(texts), []
        for start in range(0, len(names), 256):
            own = [texts[name] for name in names[start : start + 256]]
            found += tokenizer(own, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
        self.starts = {name: [begin for begin, _ in places] for name, places in zip(names, found, strict=True)}
        self.ends = {name: [end for _, end in places] for name, places in zip(names, found, strict=True)}

    def end(self, docno: str, start: int, tokens: int) -> int:
        """Return where so many tokens from a character on end."""
        last = bisect_left(self.starts[docno], start) + tokens - 1
        return self.ends[docno][last] if last < len(self.ends[docno]) else len(self.texts[docno])

    def cut(self, docno: str, start: int, tokens: int) -> str:
        return self.texts[docno][start : self.end(docno, start, tokens)]

    def tokens(self, docno: str) -> int:
        return len(self.starts[docno])


def length(rng: Random) -> int:
    """Draw how many tokens a page has at most."""
    return rng.randint(LEAST, TOKENS) if rng.random() < SHORT else TOKENS


class Source:
    """The questions of a split and the pages for them.

    `kind` is "any" for pages that begin at any passage, "whole" for beginnings of documents, and "among" for short
    documents of which half stand among others.
    """

    def __init__(self, name: str, collections: Path, split: str) -> None:
        self.name = name
        if name == "docstrings":
            passages, questions = docstring_passages(split)
            texts = {passage.docno: passage.text for passage in passages}
            judged = {question.qid: {passages[i].docno for i in question.gold} for question in questions}
        else:
            collection = Collection(collections / name)
            passages = collection.passages(split)
            questions = collection.questions(split, passages)
            texts = {passage.docno: str(collection.documents[passage.docno]["text"]) for passage in passages}
            judged = defaultdict(set)
            for row in collection.rows("spans.jsonl"):
                judged[row["qid"]].add(row["docno"])
        self.kind = {"medquad": "whole", "docstrings": "whole", "nq": "among"}.get(name, "any")
        self.is_small = len(texts) < 2 * BEST
        self.passages, self.questions, self.judged, self.texts = passages, questions, judged, Texts(texts)
        self.titles = {passage.docno: passage.title for passage in passages}
        begins = {(p.docno, p.start if self.kind == "any" else 0) for p in passages}
        self.places = sorted(begins | {(docno, 0) for docno in texts})
        self.starts = defaultdict[str, list[int]](list)
        for docno, start in self.places:
            self.starts[docno].append(start)

    def page(self, docno: str, start: int, rng: Random) -> Page:
        """Return a page of a document, of one of the lengths that occur."""
        text = self.texts.cut(docno, start, length(rng) if self.kind == "any" else TOKENS)
        if self.kind == "among" and rng.random() < SHORT:
            text = self.among(docno, text, rng)
        return Page(docno, self.titles[docno], text, start)

    def among(self, docno: str, text: str, rng: Random) -> str:
        """Return a text among others, of which those before it leave room for it."""
        rest = max(0, length(rng) - self.texts.tokens(docno))
        room = rng.randint(0, rest)
        before, after, rest = list[str](), list[str](), rest - room
        for other, _ in rng.sample(self.places, min(12, len(self.places))):
            tokens = self.texts.tokens(other)
            if tokens <= room:
                before.append(self.texts.texts[other])
                room -= tokens
            elif rest > 0:
                after.append(self.texts.texts[other])
                rest -= tokens
        return "\n".join([*before, text, *after])

    def right(self, question: Question, rng: Random) -> Page | None:
        """Return a page in which the answer stands, if there is one."""
        gold = self.passages[question.answer[0] if question.answer else rng.choice(question.gold)]
        if self.kind == "among" or self.name == "docstrings":  # the gold text is the document
            return self.page(gold.docno, 0, rng)
        tokens = length(rng) if self.kind == "any" else TOKENS
        if question.answer:
            needed = gold.start + question.answer[2]
        else:
            needed = min(gold.start + len(gold.text), self.texts.end(gold.docno, gold.start, LEAST))
        starts = [start for start in self.starts[gold.docno] if start <= gold.start]
        starts = [start for start in starts if self.texts.end(gold.docno, start, tokens) >= needed]
        if not starts:
            return None
        start = rng.choice(starts)
        return Page(gold.docno, gold.title, self.texts.cut(gold.docno, start, tokens), start)

    def same(self, question: Question, docno: str, rng: Random) -> Page | None:
        """Return a page of the same document in which no passage that answers stands, if there is one."""
        answers = [self.passages[i] for i in question.gold if self.passages[i].docno == docno]
        if self.kind == "any":
            places = [(start, self.texts.end(docno, start, TOKENS)) for start in self.starts[docno]]
            starts = [s for s, end in places if all(s >= p.start + len(p.text) or end <= p.start for p in answers)]
            return self.page(docno, rng.choice(starts), rng) if starts else None
        rest = without_answers(self.texts.texts[docno], answers) if self.name == "medquad" else ""
        return Page(docno, self.titles[docno], " ".join(rest.split(" ")[:TOKENS]), -1) if rest else None

    def candidates(self, question: Question, found: Sequence[int], negatives: int, rng: Random) -> list[Page]:
        """Return the right page of a question and its negatives, or nothing."""
        right = self.right(question, rng)
        if right is None:
            return []
        same = self.same(question, right.docno, rng) if rng.random() < SAME else None
        others: dict[object, tuple[str, int]] = {}
        for docno, start in (self.places[i] for i in found):
            if docno not in self.judged[question.qid]:
                others.setdefault((docno, start) if self.is_small else docno, (docno, start))
        best = list(others.values())[: max(BEST, negatives)]
        needed = negatives - (same is not None)
        if len(best) < needed:
            return []
        drawn = [self.page(docno, start, rng) for docno, start in rng.sample(best, needed)]
        own = phrases_of(right.text)
        if any(len(own & phrases_of(page.text)) > COPIED * len(own) for page in drawn):
            return []
        return [right, *([same] if same is not None else []), *drawn]


# Examples.


def examples_of(source: Source, number: int, negatives: int, held: HeldOut | None) -> Iterator[dict[str, object]]:
    """Yield `qid, query, docno, text, label` for the pages of so many questions, the right one first."""
    questions = sorted(source.questions, key=lambda question: question.qid)
    Random(f"firstp:{source.name}").shuffle(questions)
    topics = pd.DataFrame([(q.qid, q.query) for q in questions[: 2 * number]], columns=["qid", "query"])
    runs = bm25([source.texts.cut(docno, start, TOKENS) for docno, start in source.places], topics, DEPTH)
    done = 0
    for question in questions[: 2 * number]:
        if done == number:
            return
        if held is not None and held.asks(source.name, question.query):
            continue
        rng = Random(f"firstp:{question.qid}")
        pages = source.candidates(question, runs.get(question.qid, []), negatives, rng)
        if not pages or (held is not None and any(held.has(source.name, phrases_of(page.text)) for page in pages)):
            continue
        done += 1
        qid, titled = f"{source.name}:{question.qid}", rng.random() < TITLED
        for place, page in enumerate(pages):
            text = f"{page.title}\n{page.text}" if titled and page.title else page.text
            row = (qid, question.query, f"{page.docno}:{page.start}:{place}", text, int(place == 0))
            yield dict(zip(("qid", "query", "docno", "text", "label"), row, strict=True))


def prepare(collections: Path, folder: Path) -> None:
    """Write firstp-train.jsonl.gz and firstp-dev.jsonl.gz."""
    held = HeldOut(collections)
    for split, negatives in {"train": NEGATIVES, "dev": DEV_NEGATIVES}.items():
        parts = []
        for name in (*COLLECTIONS, "docstrings"):
            source, number = Source(name, collections, split), QUESTIONS[name] if split == "train" else DEV
            own = pd.DataFrame(list(examples_of(source, number, negatives, held if split == "train" else None)))
            words = own["text"].str.split().str.len()
            print(f"{split} {name}: {own['qid'].nunique()} questions, {words.mean():.0f} words a page", flush=True)
            parts.append(own)
        pd.concat(parts).to_json(folder / f"firstp-{split}.jsonl.gz", orient="records", lines=True)
    print({key: count for key, count in held.counts.items() if count})


# Training.


def train(folder: Path, steps: int) -> None:
    """Train a FirstP, and save it whole."""
    training = ld.TrainingArgs(
        epochs=4,
        max_steps=steps,
        loss="cross_entropy",
        reduction="mean",
        negatives=NEGATIVES,
        max_negative_rank=None,
        queries_per_step=QUERIES_PER_STEP,
        queries_per_forward=2,
        learning_rates={"": RATE},
        schedule="linear",
        warmup=0.08,
        weight_decay=0.01,
        decay="matrices",
        max_grad_norm=1.0,
        dropout=0.0,
        lora=ld.Lora(rank=RANK),
        checkpoint=folder / "state" / "firstp",
        save_steps=5,
        seed=1,
    )
    model = ld.FirstP(ENCODER, training=training, dtype="float32", verbose=True)
    model.start_from(ld.MaxP.load("longdoc:maxp"))
    use_attention(model.model.encoder.backbone, "eager")  # on a CPU sdpa is slow backwards
    examples = read_examples(folder / "data" / "firstp-train.jsonl.gz")
    begin = time.perf_counter()
    model.fit(examples.drop(columns="label"), examples.loc[examples["label"] > 0, ["qid", "docno", "label"]])
    model.save(folder / "firstp")
    print(f"\nfirstp: {(time.perf_counter() - begin) / 60:.1f} minutes\n{model.history.to_string()}")


def package(folder: Path) -> None:
    """Write the FirstP into the package."""
    model = ld.FirstP.load(folder / "firstp")
    write_packaged(model, "firstp", ld.FirstP(ENCODER).model, encoder_of="longdoc:maxp")


def dev(folder: Path, names: Sequence[str], sizes: Sequence[int], number: int) -> None:
    """Print nDCG@10 and RR on so many dev questions, of each collection and of all."""
    examples = read_examples(folder / "data" / "firstp-dev.jsonl.gz")
    topics = examples[["qid", "query"]].drop_duplicates()
    topics = topics.groupby(topics["qid"].str.partition(":")[0]).head(number // len(QUESTIONS))
    examples = examples[examples["qid"].isin(topics["qid"])]
    qrels = examples.loc[examples["label"] > 0, ["qid", "docno", "label"]]
    kept: dict[str, Any] = {"dtype": "float32", "device": "cpu", "score_cache": folder / "dev.sqlite"}
    systems: dict[str, Any] = {
        f"{Path(name).name} {size}": ld.FirstP.load(name, window_size=size, **kept) for name in names for size in sizes
    }
    run = examples.drop(columns="label").assign(score=0.0, rank=0)
    frames = {name: model(run) for name, model in systems.items()}
    baseline = f"{Path(names[-1]).name} {sizes[0]}"
    values = pt.Experiment(frames, topics, qrels, [nDCG @ 10, RR], perquery=True)
    results = ld.compare(values, baseline=baseline, correction="holm")
    print(results.means.to_string(float_format="{:.3f}".format))
    columns = ["name", "measure", "mean", "difference", "low", "high", "p-value corrected"]
    print(results.comparisons[columns].to_string(index=False, float_format="{:.3f}".format))
    by_collection = {
        name: results.subset([qid for qid in topics["qid"] if qid.startswith(f"{name}:")]).means
        for name in (*COLLECTIONS, "docstrings")
    }
    print(pd.concat(by_collection, axis=1).to_string(float_format="{:.3f}".format))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first, second, third, last = (commands.add_parser(name) for name in ("prepare", "train", "dev", "package"))
    first.add_argument("collections", type=Path)
    for each in (first, second, third, last):
        each.add_argument("folder", type=Path)
    second.add_argument("--steps", type=int, required=True)
    third.add_argument("models", nargs="+")
    third.add_argument("--sizes", nargs="+", type=int, default=[477, 250])
    third.add_argument("--queries", type=int, default=DEV * len(QUESTIONS))
    args = parser.parse_args()
    if args.command == "prepare":
        (args.folder / "data").mkdir(parents=True, exist_ok=True)
        prepare(args.collections, args.folder / "data")
    elif args.command == "train":
        train(args.folder, args.steps)
    elif args.command == "package":
        package(args.folder)
    else:
        dev(args.folder, args.models, args.sizes, args.queries)


if __name__ == "__main__":
    main()
