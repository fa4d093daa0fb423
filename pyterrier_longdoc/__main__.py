"""The demo: why long documents should be read to the end, in two tables and a figure, offline.

    python -m pyterrier_longdoc [--collection NAME] [--backbone NAME_OR_FOLDER] [--queries N] [--depth N] [--windows N]

Without arguments, it uses the documentation of the installed Python packages and the models of this package. The first
part reranks docstrings with FirstP, MaxP, PARADE, MaxSim and BM25 + MaxP + MaxSim, and tests them against BM25. The
second part places the passage that answers a query early, anywhere or far into a document, and tests FirstP and MaxP
against chance. On another collection whose answers have known positions, the second part divides the first part's
queries by whether FirstP can read their answer.
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
from .common.frames import TruncationWarning
from .common.presentation import percent
from .comparison import Comparison, PositionEffectiveness, compare

DEFAULT = "docstrings"

MOVED_SHARE, MOVED_DEPTH = 1 / 3, 5
"""Share of topics and documents per topic in the second part, where few are enough because effects are large."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments, by default the process's; return the exit code."""
    args = _arguments(argv)
    out = Path(args.output)
    dataset: Any = pt.get_dataset(f"longdoc:{args.collection}")
    out.mkdir(parents=True, exist_ok=True)
    models = demo.rerankers(args.backbone, out / "scores.sqlite", args.windows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)  # the output already reports unread text
        natural = _run_natural(args, dataset, models, out)
        moved, gold = None, getattr(dataset, "gold", None)
        if args.collection == DEFAULT:
            moved = _run_moved(args, models, out)
        elif gold is not None and gold["qid"].isin(natural.qids).any():
            moved = demo.by_answer(natural, dataset, models["FirstP"])
            sizes = ", ".join(f"{place} {len(part.qids)}" for place, part in moved.groups.items())
            print(f"by the place of the answer and FirstP's window: {sizes}\n")
            print(f"{demo.readable_by_place(moved).to_string(index=False)}\n(* p < 0.05)")
    demo.draw(natural, moved).savefig(out / "comparison.png", dpi=150)
    if moved is None:
        print("(There is no second part: the positions of the answers are not known.)")
    print(f"\nper-query values and comparison.png are in {out}/")
    return 0


def _run_natural(args: argparse.Namespace, dataset: Any, models: Mapping[str, Any], out: Path) -> Comparison:
    """Run the first part: BM25, the models and the sum on the original documents."""
    pool = dataset.get_topics().drop_duplicates("query")
    topics = _sample(pool, args.queries, args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = demo.first_stage(dataset, Path(scratch) / "index", args.depth)
        print(f"{len(topics)} of {len(pool)} topics, {args.depth} documents each, baseline {args.baseline}", flush=True)
        candidates = (bm25 >> dataset.text_loader())(topics)
    runs = _rerank(demo.with_sum(models), candidates)
    values = pt.Experiment(runs, topics, dataset.get_qrels(), demo.DEMO_MEASURES, perquery=True, filter_by_qrels=True)
    values.to_csv(out / "natural.csv", index=False)
    results = compare(values, measures=demo.DEMO_MEASURES, baseline=args.baseline, correction="holm")
    _report(demo.readable_table(results.table), models, candidates)
    return results


def _run_moved(args: argparse.Namespace, models: Mapping[str, Any], out: Path) -> PositionEffectiveness:
    """Run the second part: FirstP and MaxP on documents that only differ in the position of the relevant passage."""
    collection: Any = pt.get_dataset("longdoc:docstrings-far")
    topics = _sample(collection.get_topics(), math.ceil(args.queries * MOVED_SHARE), args.seed)
    systems, groups = {name: models[name] for name in ("FirstP", "MaxP")}, {}
    for place, candidates in demo.moved_candidates(topics, MOVED_DEPTH, args.seed).items():
        print(f"{len(topics)} topics, {MOVED_DEPTH} documents each, relevant passage {place}", flush=True)
        runs = _rerank(systems, candidates)
        values = pt.Experiment(runs, topics, collection.get_qrels(), [RR], perquery=True)
        values = demo.with_chance(values, MOVED_DEPTH)
        values.to_csv(out / f"{place}.csv", index=False)
        groups[place] = compare(values, baseline=demo.CHANCE, correction="holm")
    moved = PositionEffectiveness(groups)
    _report(demo.readable_by_place(moved), systems, candidates)
    return moved


def _rerank(systems: Mapping[str, Any], candidates: pd.DataFrame) -> dict[str, Any]:
    """Return the run of each system."""
    return {name: system(candidates) for name, system in pt.tqdm(systems.items(), desc="rerank", unit="system")}


def _sample(topics: pd.DataFrame, number: int, seed: int) -> pd.DataFrame:
    """Draw `number` topics; 0 for all."""
    if not 0 < number < len(topics):
        return topics
    return topics.sample(number, random_state=seed).sort_values("qid").reset_index(drop=True)


def _report(table: pd.DataFrame, models: Mapping[str, Any], candidates: pd.DataFrame) -> None:
    """Print a table, and how much of the documents each model reads, also of those with a stored score."""
    print(f"\n{table.to_string(index=False)}\n(* p < 0.05)\n")
    for name, model in models.items():
        coverage = model.summary(candidates)
        share = percent(coverage.share_read, 0)
        print(f"{name} read {share} of the documents, {coverage.windows_per_document:.1f} windows of each")
    print(flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyterrier_longdoc",
        description="Why long documents should be read to the end, in two tables and a figure.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    collection = "collection without 'longdoc:', such as folder:PATH or squad:FILE (default docstrings)"
    parser.add_argument("--collection", default=DEFAULT, help=collection)
    parser.add_argument("--backbone", help="cross-encoder, name or folder, instead of the packaged ones")
    topics = "topics to sample, a third of them for the second part; 0 for all (default 100)"
    parser.add_argument("--queries", type=int, default=100, help=topics)
    depth = f"documents to rerank per topic (default 7; {MOVED_DEPTH} in the second part)"
    parser.add_argument("--depth", type=int, default=7, help=depth)
    windows = "windows of a document that BM25 selects for all models but FirstP (default 3)"
    parser.add_argument("--windows", type=int, default=3, help=windows)
    baseline = "system against which the others are tested (default BM25)"
    parser.add_argument("--baseline", default="BM25", choices=("BM25", *demo.MODELS, demo.SUM), help=baseline)
    parser.add_argument("--output", default="longdoc-demo", help="folder for scores, per-query values and the figure")
    parser.add_argument("--seed", type=int, default=42, help="random seed of the samples (default 42)")
    args = parser.parse_args(argv)
    least = {"queries": 0, "depth": 1, "windows": 1}
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name} must be at least {value}, not {getattr(args, name)}")
    return args


EXAMPLES = """examples:
  python -m pyterrier_longdoc                             both parts, in about five minutes
  python -m pyterrier_longdoc --queries 200 --depth 20    more topics and documents; earlier scores are reused
  python -m pyterrier_longdoc --collection folder:PATH    your own documents, topics and judgements
  python -m pyterrier_longdoc --backbone cross-encoder/ms-marco-MiniLM-L6-v2
"""


if __name__ == "__main__":
    raise SystemExit(main())
