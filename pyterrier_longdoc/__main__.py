"""The demo: why long documents should be read to the end, in two tables and a figure, offline.

    python -m pyterrier_longdoc [--collection DIR] [--backbone NAME_OR_FOLDER] [--queries N] [--depth N]

Without arguments, it uses the documentation of the installed Python packages and the models of this package. The first
part reranks docstrings with FirstP, MaxP, PARADE, MaxSim and BM25 + MaxP + MaxSim, and tests them against BM25. The
second part places the passage that answers a query early, anywhere or far into a document, and tests FirstP and MaxP
against chance.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
from ir_measures import RR

from . import demo
from .analysis import PositionEffectiveness
from .common.frames import TruncationWarning
from .common.presentation import percent
from .experiment import Experiment, ExperimentResults, ExperimentWarning

MOVED_SHARE, MOVED_DEPTH = 1 / 3, 5
"""Share of topics and documents per topic in the second part, where few are enough because effects are large."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments, by default the process's; return the exit code."""
    args = _arguments(argv)
    out = Path(args.output)
    dataset: Any = pt.get_dataset(f"longdoc:folder:{args.collection}" if args.collection else "longdoc:docstrings")
    models = demo.rerankers(args.backbone, out / "scores.sqlite")
    with warnings.catch_warnings():
        # The output already reports unread text and failed checks.
        warnings.simplefilter("ignore", TruncationWarning)
        warnings.simplefilter("ignore", ExperimentWarning)
        natural = _run_natural(args, dataset, models, out / "natural")
        moved = None if args.collection else _run_moved(args, models, out)
    demo.draw(natural, moved).savefig(out / "comparison.png", dpi=150)
    if moved is None:
        print("(There is no second part: only the docstrings have known positions of relevant passages.)")
    print(f"\nruns, tables and comparison.png are in {out}/")
    return 0


def _run_natural(args: argparse.Namespace, dataset: Any, models: Mapping[str, Any], folder: Path) -> ExperimentResults:
    """Run the first part: BM25, the models and the sum on the original documents."""
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = demo.first_stage(dataset, Path(scratch) / "index", args.depth)
        pool = dataset.get_topics()
        topics = _sample(pool, args.queries, args.seed)
        print(f"{len(topics)} of {len(pool)} topics, {args.depth} documents each, baseline {args.baseline}", flush=True)
        results = Experiment(
            demo.pipelines(bm25, dataset.text_loader(), models),
            topics,
            dataset.get_qrels(),
            demo.DEMO_MEASURES,
            baseline=args.baseline,
            correction="holm",
            filter_by_qrels=True,
            save_dir=folder,
            save_mode="overwrite",
            verbose=True,
        )
    _report(demo.readable_table(results.table), models, [results])
    return results


def _run_moved(args: argparse.Namespace, models: Mapping[str, Any], out: Path) -> PositionEffectiveness:
    """Run the second part: FirstP and MaxP on documents that only differ in the position of the relevant passage."""
    collection: Any = pt.get_dataset("longdoc:docstrings-far")
    topics = _sample(collection.get_topics(), math.ceil(args.queries * MOVED_SHARE), args.seed)
    moved_models = {name: models[name] for name in ("FirstP", "MaxP")}
    groups = {}
    for place, candidates in demo.moved_candidates(topics, MOVED_DEPTH, args.seed).items():
        print(f"{len(topics)} topics, {MOVED_DEPTH} documents each, relevant passage {place}", flush=True)
        results = Experiment(
            {name: pt.Transformer.from_df(candidates) >> model for name, model in moved_models.items()},
            topics,
            collection.get_qrels(),
            [RR],
            save_dir=out / place,
            save_mode="overwrite",
            verbose=True,
        )
        groups[place] = demo.with_chance(results, MOVED_DEPTH)
        groups[place].save(out / place)
    moved = PositionEffectiveness(groups)
    _report(demo.readable_by_place(moved), moved_models, list(groups.values()))
    return moved


def _sample(topics: pd.DataFrame, number: int, seed: int) -> pd.DataFrame:
    """Draw `number` topics; 0 for all."""
    if not 0 < number < len(topics):
        return topics
    return topics.sample(number, random_state=seed).sort_values("qid").reset_index(drop=True)


def _report(table: pd.DataFrame, models: Mapping[str, Any], results: Sequence[ExperimentResults]) -> None:
    """Print a table, how much of the documents each model read, and failed checks."""
    print(f"\n{table.to_string(index=False)}\n(* p < 0.05)\n")
    for name, model in models.items():
        coverage, share = model.coverage, percent(model.coverage.share_read, 0)
        print(f"{name} read {share} of the documents, {coverage.windows_per_document:.1f} windows of each")
    for message in dict.fromkeys(message for result in results for message in result.checks["message"]):
        print(f"note: {message}")
    print(flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyterrier_longdoc",
        description="Why long documents should be read to the end, in two tables and a figure.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt (default: docstrings)")
    parser.add_argument("--backbone", help="cross-encoder, name or folder, instead of the packaged ones")
    topics = "topics to sample, a third of them for the second part; 0 for all (default 100)"
    parser.add_argument("--queries", type=int, default=100, help=topics)
    depth = f"documents to rerank per topic (default 7; {MOVED_DEPTH} in the second part)"
    parser.add_argument("--depth", type=int, default=7, help=depth)
    baseline = "system against which the others are tested (default BM25)"
    parser.add_argument("--baseline", default="BM25", choices=("BM25", *demo.MODELS, demo.SUM), help=baseline)
    parser.add_argument("--output", default="longdoc-demo", help="folder for scores, runs, tables and the figure")
    parser.add_argument("--seed", type=int, default=42, help="random seed of the samples (default 42)")
    args = parser.parse_args(argv)
    if args.queries < 0 or args.depth < 1:
        parser.error(f"--queries must be at least 0 and --depth at least 1, not {args.queries} and {args.depth}")
    return args


EXAMPLES = """examples:
  python -m pyterrier_longdoc                             both parts, in about five minutes
  python -m pyterrier_longdoc --queries 200 --depth 20    more topics and documents; earlier scores are reused
  python -m pyterrier_longdoc --collection my-collection  your own documents, topics and judgements
  python -m pyterrier_longdoc --backbone cross-encoder/ms-marco-MiniLM-L6-v2
"""


if __name__ == "__main__":
    raise SystemExit(main())
