"""Late interaction beside MaxP and a bi-encoder: what it costs, and with a trained model how good it is.

    python -m tests.benchmarks.bench_maxsim cost [--documents 20] [--tokens 1500] [--queries 3]
    python -m tests.benchmarks.bench_maxsim quality MODEL COLLECTION [--split test] [--queries 300] [--depth 20]

`cost`: seconds for a query over the same documents of `longdoc:docstrings` with at least so many tokens: the first
query, another one with the vectors in memory, and another one with the vectors on disk alone, as a new process has
them; and the bytes of a token on disk. Weights do not matter: MaxSim has the packaged encoder with a random projection.

`quality`: MODEL is a folder that `MaxSim.save` wrote, COLLECTION one with gold text (`longdoc:folder:PATH`). nDCG@10
over BM25's best documents, alone and in a sum with BM25 by a weight chosen on the dev split, beside the packaged MaxP
and BiEncoder and MaxP over each selector's three best windows; and evidence@1 and @3 of the windows by four selectors.
Needs the extra `demo`. All figures are in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import torch
from ir_measures import RR, nDCG

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings

from .bench_natural import Questions, candidates
from .replication.replicate import processor

ENCODER = "longdoc:minilm-l6"
FP32: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
WHOLE: dict[str, Any] = {"text_field": "text", "repeat": None, "max_doc_len": None}
"""How documents are read by a model that was trained on passages with titles."""
SELECTED = 3


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
    maxp = ld.CrossEncoder.load("longdoc:maxp", **FP32)
    texts, tokens = [], 0
    for row in dataset.get_corpus_iter(verbose=False):
        size = len(maxp.model.tokenize([row["text"]])[0])
        if args.tokens <= size < 2 * args.tokens and len(texts) < args.documents:
            texts, tokens = [*texts, row["text"]], tokens + size
    queries = dataset.get_topics("test")["query"].head(args.queries).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        disk = Path(scratch) / "vectors"
        models: dict[str, tuple[Callable[[], Any], Path | None]] = {
            "MaxP": (lambda: maxp, None),
            "BiEncoder": (lambda: ld.BiEncoder(ENCODER, **FP32), None),
            "MaxSim": (lambda: ld.MaxSim(ENCODER, **FP32), None),
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


# Quality.


def quality(args: argparse.Namespace) -> None:
    """Print nDCG@10 and RR with tests against MaxP, and evidence@1 and @3."""
    late = ld.MaxSim.load(args.model, **WHOLE, **FP32)
    maxp = ld.CrossEncoder.load("longdoc:maxp", **FP32)
    embeddings = ld.BiEncoder(ENCODER, windows=maxp.make_windows(), **FP32)
    selectors = {
        "BM25Windows": ld.BM25Windows(SELECTED),
        "EmbeddingWindows": ld.EmbeddingWindows(SELECTED, ld.BiEncoder(ENCODER, **FP32)),
        "CrossEncoderWindows": ld.CrossEncoderWindows(SELECTED, ld.CrossEncoder.load("longdoc:firstp", **FP32)),
        "MaxSimWindows": ld.MaxSimWindows(SELECTED, late),
    }
    systems = {"MaxP": maxp, "BiEncoder": embeddings, "MaxSim": late}
    for name, selector in selectors.items():
        systems[f"MaxP, {name}"] = ld.CrossEncoder.load("longdoc:maxp", preselect=selector, **FP32)
    questions = Questions(args.collection, args.split, args.queries)
    found = candidates(questions.texts, questions.topics, args.depth)
    frames = {"BM25": found}
    for name, model in systems.items():
        start = time.process_time()
        frames[name] = model(found)
        print(f"{name}: {time.process_time() - start:.0f} CPU seconds", flush=True)
    tune = Questions(args.collection, "dev", args.queries)
    tuning = candidates(tune.texts, tune.topics, args.depth)
    for name in ("MaxP", "MaxSim", "BiEncoder"):
        weight = best_weight(systems[name](tuning), tuning, tune)
        frames[f"{name} + {weight:g} BM25"] = with_bm25(frames[name], found, weight)
    results = ld.Experiment(frames, questions.topics, questions.qrels, [nDCG @ 10, RR], baseline="MaxP")
    print(results.table.to_string(index=False))
    rows = questions.placed[["qid", "docno"]].drop_duplicates().merge(questions.topics, on="qid")
    rows = rows.assign(text=rows["docno"].map(questions.texts))
    by_window = {
        "CrossEncoderWindows": maxp,
        "EmbeddingWindows": embeddings,
        "MaxSimWindows": ld.MaxSim.load(args.model, windows=maxp.make_windows(), **WHOLE, **FP32),
    }
    evidence = ld.evidence_recall(explained(by_window, rows), questions.placed)
    print(evidence.table.to_string(index=False))
    print(evidence.comparisons.to_string(index=False))


def best_weight(run: pd.DataFrame, bm25: pd.DataFrame, questions: Questions) -> float:
    """The weight of BM25 in the sum with the highest nDCG@10."""
    weights = [0.0, *(2.0**power for power in range(-6, 4))]
    runs = {str(weight): with_bm25(run, bm25, weight) for weight in weights}
    means = ld.Experiment(runs, questions.topics, questions.qrels, [nDCG @ 10]).means["nDCG@10"]
    return float(means.idxmax())


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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("cost")
    for name, default in {"documents": 20, "tokens": 1500, "queries": 3}.items():
        first.add_argument(f"--{name}", type=int, default=default)
    second = commands.add_parser("quality")
    second.add_argument("model")
    second.add_argument("collection", type=Path)
    second.add_argument("--split", default="test")
    for name, default in {"queries": 300, "depth": 20}.items():
        second.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{processor()}, {torch.get_num_threads()} thread(s)")
    if args.command == "cost":
        print(cost(args).to_string(index=False, float_format="{:.2f}".format, na_rep=""))
    else:
        quality(args)


if __name__ == "__main__":
    main()
