"""The same models on inputs of several lengths: does a model that reads more text lose what it has read before?

    python -m tests.benchmarks.bench_lengths longdoc:firstp MODEL --sizes 477 250 150 --to FOLDER \
        [--collections PATH/time PATH/medquad] [--queries 80] [--depth 8] [--without-maxp]

MODELs are names or folders of models that read only the beginning; `window_size` of each is set to each of the sizes.
Without collections, it reranks the documents of `longdoc:docstrings-early`, `-uniform` and `-far`: the relevant one and
random others, RR. With collections, it reranks BM25's best documents, nDCG@10. The baseline of the tests (paired
t-test, Holm) is the last MODEL at the first size; `longdoc:maxp`, which reads all, is in the table, too. FOLDER keeps
the scores: an interrupted command goes on.

Needs the extra `demo`. All figures are in float32.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import moved_candidates

from .questions import Questions, candidates, processor


def frames_of(args: argparse.Namespace) -> dict[str, tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, str]]:
    """Return topics, candidates with text, qrels and measure by name."""
    if args.collections:
        found = {}
        for folder in args.collections:
            questions = Questions(folder, "test", args.queries)
            run = candidates(questions.texts, questions.topics, args.depth)
            found[folder.name] = (questions.topics, run, questions.qrels, "nDCG@10")
        return found
    far: Any = pt.get_dataset("longdoc:docstrings-far")
    pool = far.get_topics()
    topics = pool.sample(min(args.queries, len(pool)), random_state=42).sort_values("qid", ignore_index=True)
    moved = moved_candidates(topics, args.depth)
    return {f"docstrings {place}": (topics, run, far.get_qrels(), "RR") for place, run in moved.items()}


def main() -> None:
    """Print a table for each collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sizes", nargs="+", type=int, default=[477, 250, 150])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", type=Path, default=[])
    parser.add_argument("--queries", type=int, default=80)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--without-maxp", action="store_true", help="which takes as long as all others")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.to.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"dtype": "float32", "device": "cpu", "score_cache": args.to / "scores.sqlite"}
    systems = {
        f"{Path(name).name} {size}": ld.FirstP.load(name, window_size=size, **kept)
        for name in args.models
        for size in args.sizes
    }
    if not args.without_maxp:
        systems["MaxP"] = ld.MaxP.load("longdoc:maxp", **kept)
    baseline = f"{Path(args.models[-1]).name} {args.sizes[0]}"
    print(f"{processor()}, {torch.get_num_threads()} thread(s)")
    for name, (topics, run, qrels, measure) in frames_of(args).items():
        frames = {system: model(run) for system, model in systems.items()}
        if args.collections:
            frames = {"BM25": run, **frames}
        results = ld.Experiment(frames, topics, qrels, [measure], baseline=baseline, correction="holm")
        print(f"{name}: {measure}, {len(topics)} queries, {args.depth} documents each")
        columns = ["name", "mean", "difference", "low", "high", "p-value", "p-value corrected"]
        print(results.means.T.to_string(float_format="{:.3f}".format))
        print(results.comparisons[columns].to_string(index=False, float_format="{:.3f}".format), flush=True)


if __name__ == "__main__":
    main()
