"""Late interaction beside MaxP and a bi-encoder: what it costs, and with a trained model how good it is.

    python -m tests.benchmarks.bench_maxsim cost [--collection NAME] [--documents 20] [--tokens 1500] [--queries 3]
    python -m tests.benchmarks.bench_maxsim quality MODEL COLLECTION [--task passages] [--queries 100]

`cost`: seconds for a query over the same documents, of at least so many tokens and less than twice as many: the first
query, and another one with the vectors in memory. Weights do not matter: MaxSim has the packaged encoder with a random
projection.

`quality`: MODEL is a folder that `MaxSim.save` wrote, COLLECTION one with gold text or judgements (a folder as
`longdoc:folder:PATH` reads it). nDCG@10 on its test split over BM25's best documents, or passages, alone and in a sum
with BM25, beside BiEncoder, the packaged models that read all windows, and those over each selector's three best
windows; and evidence@1 and @3 of the windows by four selectors.

Needs the extra `demo`. All figures are in float32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import torch
from ir_measures import nDCG

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.evidence import BASELINES
from pyterrier_longdoc.common.frames import Document

from ..support.systems import forget
from .questions import Questions, candidates, processor

ENCODER = "longdoc:minilm-l6"
FP32: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
WHOLE: dict[str, Any] = {"text_field": "text", "repeat": None, "max_doc_len": None}
"""How documents are read by a model that was trained on passages with titles."""
SELECTED = 3
READ = 5
"""Windows of a document in the sums with BM25."""
WEIGHT = 0.25
"""Of BM25's score in a sum with a model's, chosen for MaxSim on dev questions."""


# Cost.


def seconds(model: Any, query: str, texts: list[str]) -> float:
    """Processor time, which other programs on the machine change less than wall-clock time."""
    start = time.process_time()
    model.score([query] * len(texts), texts)
    return time.process_time() - start


def cost_of(make: Callable[[], Any], texts: list[str], queries: list[str]) -> dict[str, Any]:
    """Mean seconds over queries: the first one of a document's life, and later ones."""
    times: dict[str, list[float]] = {"first": [], "again": []}
    for number, query in enumerate(queries):
        model = make()
        forget(model)
        seconds(model, "warm up", ["a text"])
        times["first"].append(seconds(model, query, texts))
        times["again"].append(seconds(model, f"{query} {number}", texts))
    means = {name: sum(values) / len(values) for name, values in times.items()}
    return {**means, "again/first": means["again"] / means["first"], "documents/s again": len(texts) / means["again"]}


def cost(args: argparse.Namespace) -> pd.DataFrame:
    """Return a row for each model."""
    dataset = pt.get_dataset(args.collection)
    maxp, best = ld.CrossEncoder.load("longdoc:maxp", **FP32), {"preselect": ld.BM25Windows(READ), **FP32}
    best_maxp = ld.CrossEncoder.load("longdoc:maxp", **best)
    texts, tokens = [], 0
    for row in dataset.get_corpus_iter(verbose=False):
        size = len(maxp.model.reader.tokenize([Document(row["text"])])[0])
        if args.tokens <= size < 2 * args.tokens and len(texts) < args.documents:
            texts, tokens = [*texts, row["text"]], tokens + size
    queries = dataset.get_topics("test" if "test" in dataset.splits else None)["query"].head(args.queries).tolist()
    models: dict[str, Callable[[], Any]] = {
        "MaxP": lambda: maxp,
        f"MaxP, best {READ} windows": lambda: best_maxp,
        "BiEncoder": lambda: ld.BiEncoder(ENCODER, **FP32),
        "MaxSim": lambda: ld.MaxSim(ENCODER, **FP32),
        f"MaxSim, best {READ} windows": lambda: ld.MaxSim(ENCODER, window_size=100, stride=80, **best),
        "MaxSim, windows of 180": lambda: ld.MaxSim(ENCODER, window_size=180, **FP32),
    }
    rows = [{"model": name, **cost_of(make, texts, queries)} for name, make in models.items()]
    print(f"{len(texts)} documents, {tokens} tokens, {len(queries)} queries; CPU seconds for all documents")
    return pd.DataFrame(rows)


# Quality.


def systems_of(model: str, *, selectors: bool) -> dict[str, Any]:
    """Models that read all windows, and the packaged ones over each selector's three best windows."""
    maxp = ld.CrossEncoder.load("longdoc:maxp", **FP32)
    late = ld.MaxSim.load(model, **WHOLE, **FP32)
    encoder = ld.BiEncoder(ENCODER, windows=maxp.make_windows(), **FP32)
    systems = {"MaxP": maxp, "BiEncoder": encoder, "MaxSim": late}
    if not selectors:
        return systems
    firstp = ld.CrossEncoder.load("longdoc:firstp", **FP32)
    chosen_by = {
        "BM25Windows": ld.BM25Windows(SELECTED),
        "EmbeddingWindows": ld.EmbeddingWindows(SELECTED, ld.BiEncoder(ENCODER, **FP32)),
        "CrossEncoderWindows": ld.CrossEncoderWindows(SELECTED, firstp),
        "MaxSim": ld.CrossEncoderWindows(SELECTED, late),
    }
    for name, selector in chosen_by.items():
        systems[f"MaxP, {name}"] = ld.CrossEncoder.load("longdoc:maxp", preselect=selector, **FP32)
    parade = ld.CrossEncoder.load("longdoc:parade-attn", preselect=chosen_by["BM25Windows"], **FP32)
    return {**systems, "FirstP": firstp, "PARADE attn, BM25Windows": parade}


def quality(args: argparse.Namespace) -> None:
    """Print nDCG@10 with intervals and tests against MaxP, and evidence@1 and @3."""
    is_whole = args.task == "documents"
    systems = systems_of(args.model, selectors=is_whole)
    questions = Questions(args.collection, "test", args.queries)
    texts, qrels = questions.task(args.task)
    found = candidates(texts, questions.topics, args.depth)
    frames = {"BM25": found}
    for name, model in systems.items():
        start = time.process_time()
        frames[name] = model(found)
        print(f"{name}: {time.process_time() - start:.0f} CPU seconds", flush=True)
    for name in ("MaxSim", "MaxP"):
        both = frames[name].merge(found[["qid", "docno", "score"]], on=["qid", "docno"], suffixes=("", "_bm25"))
        both["score"] += WEIGHT * both["score_bm25"]
        frames[f"{name} + {WEIGHT} BM25"] = pt.model.add_ranks(both.drop(columns=["rank", "score_bm25"]))
    values = pt.Experiment(frames, questions.topics, qrels, [nDCG @ 10], perquery=True)
    results = ld.compare(values, baseline="MaxP", correction="holm")
    print(f"{args.collection.name}, {args.task}: {len(questions.topics)} queries, the best {args.depth} of BM25")
    columns = ["name", "measure", "mean", "difference", "low", "high", "p-value", "p-value corrected"]
    print(results.means.to_string(), results.comparisons[columns].to_string(index=False), sep="\n")
    if is_whole and len(questions.placed):
        show_evidence(args.model, systems, questions)


def show_evidence(model: str, systems: dict[str, Any], questions: Questions) -> None:
    """Print how often the best windows of the right document, MaxP's windows for all, have the gold text."""
    rows = questions.placed[["qid", "docno"]].drop_duplicates().merge(questions.topics, on="qid")
    rows = rows.assign(text=rows["docno"].map(questions.texts))
    by_window = {
        "CrossEncoderWindows": systems["MaxP"],
        "EmbeddingWindows": systems["BiEncoder"],
        "MaxSim": ld.MaxSim.load(model, windows=systems["MaxP"].make_windows(), **WHOLE, **FP32),
    }
    for scorer in by_window.values():
        scorer.explain = True
    values = ld.evidence_recall({name: scorer(rows) for name, scorer in by_window.items()}, questions.placed)
    evidence = ld.compare(values, baseline=BASELINES)
    print(evidence.means.to_string())
    print(evidence.comparisons[["name", "reference", "measure", "difference", "low", "high"]].to_string(index=False))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("cost")
    first.add_argument("--collection", default="longdoc:docstrings")
    for name, default in {"documents": 20, "tokens": 1500, "queries": 3}.items():
        first.add_argument(f"--{name}", type=int, default=default)
    second = commands.add_parser("quality")
    second.add_argument("model")
    second.add_argument("collection", type=Path)
    for name, default in {"queries": 100, "depth": 10}.items():
        second.add_argument(f"--{name}", type=int, default=default)
    second.add_argument("--task", choices=("documents", "passages"), default="documents")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{processor()}, {torch.get_num_threads()} thread(s)")
    if args.command == "cost":
        print(cost(args).to_string(index=False, float_format="{:.2f}".format, na_rep=""))
    else:
        quality(args)


if __name__ == "__main__":
    main()
