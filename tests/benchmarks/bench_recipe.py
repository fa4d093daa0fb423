"""What the packaged models are worth on BM25's three best windows: alone, and with BM25's score added.

    python tests/benchmarks/bench_recipe.py [--topics 200] [--depth 20] [--variant test-long] [--models firstp ...]
    python tests/benchmarks/bench_recipe.py --collection PATH/time

Without `--collection`: topics of the docstrings' test split whose relevant document has more than 512 tokens. Reranks
BM25's top documents; prints nDCG@10 and reciprocal rank with differences, queries won and lost, and p-values (paired
t-test, Holm) against BM25. Sums are those of `bm25 >> (WEIGHT * pt.Transformer.identity() + model)`. Then what each
model reads. `--variant dev-long` is for choices. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import BM25_WEIGHT, first_stage

MODELS = ("firstp", "maxp", "avgp", "parade-attn", "parade-transformer")


def main() -> None:
    """Print the tables of one collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt; default: docstrings")
    parser.add_argument("--variant", default="test-long", help="of the docstrings' topics")
    parser.add_argument("--topics", type=int, default=200, help="sample so many; 0 takes all")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--folder", type=Path, help="where the models are; default: the package")
    parser.add_argument("--windows", type=int, default=3, help="of a document, BM25's best; 0 reads all")
    parser.add_argument("--weight", type=float, default=BM25_WEIGHT, help="of BM25 in the sums")
    parser.add_argument("--dtype", help="of the models: float32, fastest, ...")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=ld.TruncationWarning)
    warnings.filterwarnings("ignore", category=ld.ExperimentWarning)
    dataset = pt.get_dataset(f"longdoc:folder:{args.collection}" if args.collection else "longdoc:docstrings")
    variant = None if args.collection else args.variant
    topics = dataset.get_topics(variant)
    if 0 < args.topics < len(topics):
        topics = topics.sample(args.topics, random_state=0).sort_values("qid", ignore_index=True)
    with tempfile.TemporaryDirectory() as scratch:
        candidates = (first_stage(dataset, Path(scratch) / "index", args.depth) >> dataset.text_loader())(topics)
        common = {"dtype": args.dtype, "verbose": True, "score_cache": Path(scratch) / "scores.sqlite"}
        systems: dict[str, pt.Transformer] = {"BM25": pt.Transformer.identity()}
        models = {}
        for name in args.models:
            read = {} if name == "firstp" or not args.windows else {"preselect": ld.BM25Windows(args.windows)}
            source = args.folder / name if args.folder else f"longdoc:{name}"
            models[name] = systems[name] = ld.CrossEncoder.load(source, **common, **read)
        systems |= {f"{name} + BM25": args.weight * systems["BM25"] + model for name, model in models.items()}
        first = pt.Transformer.from_df(candidates)
        results = ld.Experiment(
            {name: first >> system for name, system in systems.items()},
            topics,
            dataset.get_qrels(variant),
            ["nDCG@10", "RR"],
            baseline="BM25",
            correction="holm",
            filter_by_qrels=True,
        )
    print(
        f"{len(results.qids)} topics, {args.depth} documents each; BM25 {results.means.loc['BM25'].round(4).to_dict()}"
    )
    columns = ["measure", "name", "mean", "difference", "low", "high", "p-value corrected"]
    print(results.comparisons[columns].round(4).to_string(index=False))
    read = {n: (m.coverage.share_read, m.coverage.windows_per_document) for n, m in models.items()}
    print(pd.DataFrame(read, index=["share read", "windows/document"]).T.round(2).to_string())


if __name__ == "__main__":
    main()
