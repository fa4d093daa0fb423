"""The packaged PARADE on BM25's three best windows, added to BM25: beside BM25, PARADE alone and FirstP.

    python tests/benchmarks/bench_recipe.py [--collection PATH/time] [--topics 100] [--depth 20] [--threads 2]

Without `--collection`: topics of the docstrings' test split whose relevant document has more than 512 tokens; the
packaged models never saw any other collection. Reranks BM25's top documents; prints nDCG@10 and reciprocal rank, with
queries won and lost and p-values (paired t-test, Holm) against BM25. Sums are those of
`bm25 >> (pt.Transformer.identity() + model)`: scores as they are, no weight is tuned; "scaled" brings both to 0..1 for
each query before. Then what FirstP and PARADE cost: tokens of document read, and the time of one `transform` with
everything loaded. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from bench_trained import collection


def timed(model: Any, candidates: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The reranked frame, and a row of costs."""
    model.transform(candidates.head(1))  # loads everything
    start = time.perf_counter()
    run = model.transform(candidates)
    seconds, coverage = time.perf_counter() - start, model.coverage
    return run, {
        "tokens/document": coverage.tokens_read / coverage.documents,
        "share read": coverage.share_read,
        "windows/document": coverage.windows_per_document,
        "ms/document": 1000 * seconds / len(candidates),
    }


def systems(candidates: pd.DataFrame, runs: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """By name: BM25, the models, their sums with BM25."""
    import pyterrier as pt

    bm25, firstp, parade = map(pt.Transformer.from_df, (candidates, runs["FirstP"], runs["PARADE"]))
    both_scaled = map(pt.Transformer.from_df, map(scaled, (candidates, runs["PARADE"])))
    return {
        "BM25": bm25,
        "FirstP": firstp,
        "PARADE": parade,
        "BM25 + FirstP": bm25 + firstp,
        "BM25 + PARADE": bm25 + parade,
        "BM25 + PARADE, scaled": next(both_scaled) + next(both_scaled),
    }


def scaled(run: pd.DataFrame) -> pd.DataFrame:
    """A run with the scores of each query brought to 0..1."""
    scores = run.groupby("qid")["score"]
    low, high = scores.transform("min"), scores.transform("max")
    return run.assign(score=(run["score"] - low) / (high - low).where(high > low, 1.0))


def main() -> None:
    """Prints the tables of one collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt; default: docstrings")
    parser.add_argument("--topics", type=int, default=0, help="sample so many; 0 takes all")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--dtype", help="of the models: float32, fastest, ...")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    import torch

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.demo import first_stage

    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*did not read ")
    dataset, topics, qrels = collection(args.collection, args.topics)
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", args.depth) >> dataset.text_loader()
        candidates = bm25(topics)
    models = {
        "FirstP": ld.FirstP.load("longdoc:firstp", dtype=args.dtype),
        "PARADE": ld.PARADE.load("longdoc:parade-attn", dtype=args.dtype, preselect=ld.BM25Windows(3)),
    }
    runs, costs = {}, {}
    for name, model in models.items():
        runs[name], costs[name] = timed(model, candidates)
    results = ld.Experiment(
        systems(candidates, runs),
        topics,
        qrels,
        ["nDCG@10", "RR"],
        baseline="BM25",
        correction="holm",
        filter_by_qrels=True,
        round=4,
    )
    print(f"{len(results.qids)} topics, {args.depth} documents each")
    table = results.table.drop(columns=["RR +", "RR -", *results.table.filter(regex="p-value$|reject$")])
    print(table.rename(columns=lambda name: name.replace("p-value corrected", "p (Holm)")).to_string(index=False))
    print(pd.DataFrame(costs).T.round(2).to_string())


if __name__ == "__main__":
    main()
