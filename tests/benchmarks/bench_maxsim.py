"""Late interaction beside MaxP and a bi-encoder: what it costs, and with a trained model how good it is.

    python -m tests.benchmarks.bench_maxsim cost [--documents 20] [--tokens 1500] [--queries 3]
    python -m tests.benchmarks.bench_maxsim equality
    python -m tests.benchmarks.bench_maxsim tune MODEL COLLECTION [--task passages] [--queries 100] [--depth 10]
    python -m tests.benchmarks.bench_maxsim quality MODEL COLLECTION [--task passages] [--weights MaxSim=0.25 ...]
    python -m tests.benchmarks.bench_maxsim length MODEL COLLECTION [--queries 25] [--depth 10]

`cost`: seconds for a query over the same documents of `longdoc:docstrings` with at least so many tokens: the first
query, another one with the vectors in memory, and another one with the vectors on disk alone, as a new process has
them; and the bytes of a token on disk. Weights do not matter: MaxSim has the packaged encoder with a random projection.

`equality`: largest differences from the scores of the libraries that wrote the checkpoints of the tests.

`quality`: MODEL is a folder that `MaxSim.save` wrote, COLLECTION one with gold text or judgements (a folder as
`longdoc:folder:PATH` reads it). nDCG@10 over BM25's best documents, or passages, alone and in a sum with BM25, beside
BiEncoder, the packaged models that read all windows, and those over each selector's three best windows; and evidence@1
and @3 of the windows by four selectors. `tune` shows sums by weight on the dev split.

`length`: what unrelated text does to the score of a document, on dev questions, by `aggregation`: the mean scores of
the right passage and of BM25's best wrong one with so many words of docstrings behind them, and how often the wrong
one, so lengthened, is above the right one as it is. Then nDCG@10 over BM25's best whole documents, and the rank
correlation of score and length among the wrong ones.

Needs the extra `demo`. All figures are in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch
from ir_measures import RR, nDCG

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings

from .questions import Questions, candidates, processor

ENCODER = "longdoc:minilm-l6"
FP32: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
WHOLE: dict[str, Any] = {"text_field": "text", "repeat": None, "max_doc_len": None}
"""How documents are read by a model that was trained on passages with titles."""
SELECTED = 3
READ = 5
"""Windows of a document in the sums with BM25."""


# Cost.


def seconds(model: Any, query: str, texts: list[str]) -> float:
    """Processor time, which other programs on the machine change less than wall-clock time."""
    start = time.process_time()
    model.score([query] * len(texts), texts)
    return time.process_time() - start


def cost_of(make: Callable[[], Any], texts: list[str], queries: list[str], disk: Path | None) -> dict[str, Any]:
    """Mean seconds over queries: the first one of a document's life, and later ones."""
    times: dict[str, list[float]] = {"first": [], "again": [], "from disk": []}
    for number, query in enumerate(queries):
        forget_embeddings()
        if disk is not None:
            disk.unlink(missing_ok=True)
        model = make()
        seconds(model, "warm up", ["a text"])
        times["first"].append(seconds(model, query, texts))
        times["again"].append(seconds(model, f"{query} {number}", texts))
        if disk is not None:
            forget_embeddings()
            seconds(model, "warm up", ["a text"])
            times["from disk"].append(seconds(model, f"{query} disk", texts))
    means = {name: sum(values) / len(values) if values else None for name, values in times.items()}
    return {**means, "again/first": means["again"] / means["first"]}


def stored_bytes(disk: Path) -> int:
    """Bytes of the vectors in a file."""
    import sqlite3

    with sqlite3.connect(disk) as connection:
        return int(connection.execute("SELECT sum(size) FROM arrays").fetchone()[0])


def cost(args: argparse.Namespace) -> pd.DataFrame:
    """Return a row for each model."""
    dataset = pt.get_dataset("longdoc:docstrings")
    maxp, best = ld.CrossEncoder.load("longdoc:maxp", **FP32), {"preselect": ld.BM25Windows(READ), **FP32}
    best_maxp = ld.CrossEncoder.load("longdoc:maxp", **best)
    texts, tokens = [], 0
    for row in dataset.get_corpus_iter(verbose=False):
        size = len(maxp.model.reader.tokenize([row["text"]])[0])
        if args.tokens <= size < 2 * args.tokens and len(texts) < args.documents:
            texts, tokens = [*texts, row["text"]], tokens + size
    queries = dataset.get_topics("test")["query"].head(args.queries).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        disk = Path(scratch) / "vectors"
        models: dict[str, tuple[Callable[[], Any], Path | None]] = {
            "MaxP": (lambda: maxp, None),
            f"MaxP, best {READ} windows": (lambda: best_maxp, None),
            "BiEncoder": (lambda: ld.BiEncoder(ENCODER, **FP32), None),
            "MaxSim": (lambda: ld.MaxSim(ENCODER, **FP32), None),
            f"MaxSim, best {READ} windows": (lambda: ld.MaxSim(ENCODER, window_size=100, stride=80, **best), None),
            "MaxSim, windows of 180": (lambda: ld.MaxSim(ENCODER, window_size=180, **FP32), None),
            "MaxSim, on disk": (lambda: ld.MaxSim(ENCODER, vector_cache=disk, **FP32), disk),
            "MaxSim, on disk, pooling 2": (
                lambda: ld.MaxSim(ENCODER, vector_cache=disk, token_pooling=2, **FP32),
                disk,
            ),
            "MaxSim, on disk, pooling 4": (
                lambda: ld.MaxSim(ENCODER, vector_cache=disk, token_pooling=4, **FP32),
                disk,
            ),
        }
        for name, (make, file) in models.items():
            row = {"model": name, **cost_of(make, texts, queries, file)}
            row["bytes/token"] = None if file is None else round(stored_bytes(file) / tokens)
            rows.append(row)
    print(f"{len(texts)} documents, {tokens} tokens, {len(queries)} queries; CPU seconds for all documents")
    return pd.DataFrame(rows)


# Equality.


def equality() -> pd.DataFrame:
    """Return a row for each checkpoint that another library has written and scored with."""
    rows = []
    for file in sorted((Path(__file__).parents[1] / "support" / "late_interaction").glob("*/scores.json")):
        theirs = json.loads(file.read_text(encoding="utf-8"))
        expected, model = np.array(theirs["scores"]), ld.MaxSim(str(file.parent), **FP32)
        ours = np.stack([model.rank(q, theirs["texts"]).sort_values("number")["score"] for q in theirs["queries"]])
        rows.append([file.parent.name, theirs["library"], expected.size, expected.max(), abs(ours - expected).max()])
    return pd.DataFrame(rows, columns=["checkpoint", "written by", "scores", "largest", "largest difference"])


# Quality.


class Judged:
    """A collection with human judgements and no splits: `texts, topics, qrels`, and nothing `placed`."""

    def __init__(self, folder: Path, number: int) -> None:
        dataset = pt.get_dataset(f"longdoc:folder:{folder}")
        self.texts = {docno: row["text"] for docno, row in dataset.documents.items()}
        self.qrels = dataset.get_qrels()
        self.topics = dataset.get_topics().query("qid in @self.qrels.qid").head(number)
        self.placed = None

    def task(self, name: str) -> tuple[dict[str, str], pd.DataFrame]:
        return self.texts, self.qrels


def questions_of(folder: Path, split: str, number: int) -> Any:
    """The questions of a split, or all topics of a collection without splits."""
    return Questions(folder, split, number) if (folder / "splits.tsv").is_file() else Judged(folder, number)


def systems_of(model: str, *, selectors: bool) -> dict[str, Any]:
    """Models that read all windows, and the packaged ones over each selector's three best windows."""
    maxp = ld.CrossEncoder.load("longdoc:maxp", **FP32)
    late = ld.MaxSim.load(model, **WHOLE, **FP32)
    systems = {
        "MaxP": maxp,
        "BiEncoder": ld.BiEncoder(ENCODER, windows=maxp.make_windows(), **FP32),
        "MaxSim": late,
    }
    if not selectors:
        return systems
    firstp = ld.CrossEncoder.load("longdoc:firstp", **FP32)
    chosen_by = {
        "BM25Windows": ld.BM25Windows(SELECTED),
        "EmbeddingWindows": ld.EmbeddingWindows(SELECTED, ld.BiEncoder(ENCODER, **FP32)),
        "CrossEncoderWindows": ld.CrossEncoderWindows(SELECTED, firstp),
        "MaxSimWindows": ld.MaxSimWindows(SELECTED, late),
    }
    for name, selector in chosen_by.items():
        systems[f"MaxP, {name}"] = ld.CrossEncoder.load("longdoc:maxp", preselect=selector, **FP32)
    parade = ld.CrossEncoder.load("longdoc:parade-attn", preselect=chosen_by["BM25Windows"], **FP32)
    return {**systems, "FirstP": firstp, "PARADE attn, BM25Windows": parade}


def quality(args: argparse.Namespace) -> None:
    """Print nDCG@10 and RR with intervals and tests against MaxP, and evidence@1 and @3."""
    is_whole = args.task == "documents"
    systems = systems_of(args.model, selectors=is_whole)
    questions = questions_of(args.collection, args.split, args.queries)
    texts, qrels = questions.task(args.task)
    found = candidates(texts, questions.topics, args.depth)
    frames = {"BM25": found}
    for name, model in systems.items():
        if name in args.leave_out:
            continue
        start = time.process_time()
        frames[name] = model(found)
        print(f"{name}: {time.process_time() - start:.0f} CPU seconds", flush=True)
    for name in ("MaxP", "BiEncoder", "MaxSim"):
        weight = dict(args.weights).get(name, 0.0)
        if weight:
            frames[f"{name} + {weight:g} BM25"] = with_bm25(frames[name], found, weight)
    results = ld.Experiment(frames, questions.topics, qrels, [nDCG @ 10, RR], baseline="MaxP", correction="holm")
    print(f"{args.collection.name}, {args.task}: {len(questions.topics)} queries, the best {args.depth} of BM25")
    columns = ["name", "measure", "mean", "difference", "low", "high", "p-value", "p-value corrected"]
    print(results.means.to_string(), results.comparisons[columns].to_string(index=False), sep="\n")
    if is_whole and questions.placed is not None:
        show_evidence(args.model, systems, questions)


def tune(args: argparse.Namespace) -> None:
    """Print the weight of BM25 in the sum with each model that has the highest nDCG@10 on a dev split."""
    questions = Questions(args.collection, "dev", args.queries)
    texts, qrels = questions.task(args.task)
    found = candidates(texts, questions.topics, args.depth)
    systems = systems_of(args.model, selectors=False)
    weights = [0.0, *(2.0**power for power in range(-6, 4))]
    for name in ("MaxP", "BiEncoder", "MaxSim"):
        run = systems[name](found)
        runs = {f"{weight:g}": with_bm25(run, found, weight) for weight in weights}
        means = ld.Experiment(runs, questions.topics, qrels, [nDCG @ 10]).means["nDCG@10"]
        print(f"{name}: {means.round(3).to_dict()}", flush=True)


def show_evidence(model: str, systems: dict[str, Any], questions: Questions) -> None:
    """Print how often the best windows of the right document, MaxP's windows for all, have the gold text."""
    rows = questions.placed[["qid", "docno"]].drop_duplicates().merge(questions.topics, on="qid")
    rows = rows.assign(text=rows["docno"].map(questions.texts))
    by_window = {
        "CrossEncoderWindows": systems["MaxP"],
        "EmbeddingWindows": systems["BiEncoder"],
        "MaxSimWindows": ld.MaxSim.load(model, windows=systems["MaxP"].make_windows(), **WHOLE, **FP32),
    }
    evidence = ld.evidence_recall(explained(by_window, rows), questions.placed)
    print(evidence.table.to_string(index=False))
    print(evidence.comparisons[["name", "reference", "measure", "difference", "low", "high"]].to_string(index=False))


# Length.

UNRELATED = (0, 200, 800, 3200)
"""Words of docstrings behind a passage."""
AGGREGATIONS = ("document", "max")


def length(args: argparse.Namespace) -> None:
    """Print what unrelated text does to scores, and nDCG@10 of whole documents, by aggregation."""
    questions = Questions(args.collection, "dev", args.queries)
    model = ld.MaxSim.load(args.model, **WHOLE, **FP32, cached_bytes=4 * 2**30)
    print(lengthened(model, questions).round(2).to_string(index=False))
    found = candidates(questions.texts, questions.topics, args.depth)
    frames = {"BM25": found, **{name: by_aggregation(model, name, found) for name in AGGREGATIONS}}
    results = ld.Experiment(frames, questions.topics, questions.qrels, [nDCG @ 10], baseline="document")
    columns = ["name", "mean", "difference", "low", "high", "p-value"]
    print(f"{args.collection.name}: {len(questions.topics)} queries, the best {args.depth} of BM25")
    print(results.means.to_string(), results.comparisons[columns].to_string(index=False), sep="\n")
    pairs = set(zip(questions.qrels["qid"], questions.qrels["docno"], strict=True))
    for name, frame in frames.items():
        wrong = frame[[pair not in pairs for pair in zip(frame["qid"], frame["docno"], strict=True)]]
        wrong = wrong.assign(length=wrong["text"].str.len())
        by_query = [of["score"].corr(of["length"], method="spearman") for _, of in wrong.groupby("qid")]
        print(f"{name}: rank correlation of score and length among wrong documents {np.nanmean(by_query):.2f}")


def by_aggregation(model: Any, name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The results of a MaxSim with this aggregation; the vectors of windows serve both."""
    model.aggregation = name
    return model(rows)


def lengthened(model: Any, questions: Questions) -> pd.DataFrame:
    """Return mean scores by words of unrelated text, and how often a longer wrong passage is above the right one."""
    texts, qrels = questions.task("passages")
    right = qrels.drop_duplicates("qid").merge(questions.topics, on="qid")
    best = candidates(texts, questions.topics, 10).merge(qrels, on=["qid", "docno"], how="left")
    wrong = best[best["label"].isna()].drop_duplicates("qid")[["qid", "docno"]]
    pairs = right.merge(wrong, on="qid", suffixes=("", "_wrong"))
    corpus = pt.get_dataset("longdoc:docstrings").get_corpus_iter(verbose=False)
    words = " ".join(row["text"] for row in corpus).split()
    rows = []
    for number in UNRELATED:
        behind = [" ".join(words[start : start + number]) for start in range(0, 5000 * len(pairs), 5000)]
        row: dict[str, Any] = {"unrelated words": number}
        for name in AGGREGATIONS:
            model.aggregation = name
            for what, docnos in {"right": pairs["docno"], "wrong": pairs["docno_wrong"]}.items():
                long = [f"{texts[docno]}\n{tail}" for docno, tail in zip(docnos, behind, strict=True)]
                row[f"{name}, {what}"] = model.score(pairs["query"].tolist(), long).scores
        rows.append(row)
    for name in AGGREGATIONS:
        short = rows[0][f"{name}, right"].copy()
        for row in rows:
            above = np.mean(row[f"{name}, wrong"] > short)
            row |= {f"{name}, {what}": row[f"{name}, {what}"].mean() for what in ("right", "wrong")}
            row[f"{name}, above"] = above
    return pd.DataFrame(rows)


def with_bm25(run: pd.DataFrame, bm25: pd.DataFrame, weight: float) -> pd.DataFrame:
    """A run whose scores are sums with the first stage's."""
    first = bm25[["qid", "docno", "score"]].rename(columns={"score": "first"})
    both = run.drop(columns=["rank"]).merge(first, on=["qid", "docno"])
    return pt.model.add_ranks(both.assign(score=both["score"] + weight * both["first"]).drop(columns="first"))


def explained(models: dict[str, Any], rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Results with each model's scores of MaxP's windows; BM25's best are a baseline of `evidence_recall`."""
    frames = {}
    for name, model in models.items():
        model.explain = True
        frames[name] = model(rows)
        model.explain = False
    return frames


def weight_of(text: str) -> tuple[str, float]:
    """`MaxSim=0.5`."""
    name, weight = text.split("=")
    return name, float(weight)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("cost")
    for name, default in {"documents": 20, "tokens": 1500, "queries": 3}.items():
        first.add_argument(f"--{name}", type=int, default=default)
    commands.add_parser("equality")
    second, third, fourth = (commands.add_parser(name) for name in ("quality", "tune", "length"))
    for each in (second, third, fourth):
        each.add_argument("model")
        each.add_argument("collection", type=Path)
        for name, default in {"queries": 25 if each is fourth else 100, "depth": 10}.items():
            each.add_argument(f"--{name}", type=int, default=default)
    for each in (second, third):
        each.add_argument("--task", choices=("documents", "passages"), default="documents")
    second.add_argument("--split", default="test")
    second.add_argument("--leave-out", nargs="*", default=[], help="systems, which take long")
    second.add_argument("--weights", nargs="*", type=weight_of, default=[], metavar="MODEL=WEIGHT")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{processor()}, {torch.get_num_threads()} thread(s)")
    if args.command == "cost":
        print(cost(args).to_string(index=False, float_format="{:.2f}".format, na_rep=""))
    elif args.command == "equality":
        print(equality().to_string(index=False))
    else:
        {"quality": quality, "tune": tune, "length": length}[args.command](args)


if __name__ == "__main__":
    main()
