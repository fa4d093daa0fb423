"""Time and memory of evaluating and testing precomputed runs.

    python tests/benchmarks/bench_experiment.py [--queries 1000] [--systems 30] [--seeds 3] [--depth 100]

Runs are made at random, given as frames and then as TREC files. Each way runs in a process of its own; the peak
includes Python, its libraries and, for frames, the runs themselves. Target: under 30 s and below 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

from pyterrier_longdoc.experiment import Experiment, write_run

METRICS = ["nDCG@10", "AP", "RR"]
DOCUMENTS = 100_000


def collection(queries: int, depth: int) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
    """Topics, qrels (10 relevant of each query's candidates, graded) and (Q, depth) candidates."""
    rng = np.random.default_rng(0)
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(queries)], "query": "some words"})
    candidates = np.stack([rng.choice(DOCUMENTS, depth, replace=False) for _ in range(queries)])
    judged = candidates[:, :10]
    qrels = pd.DataFrame(
        {
            "qid": np.repeat(topics["qid"].to_numpy(dtype=object), 10),
            "docno": [f"D{d:07d}" for d in judged.ravel()],
            "label": rng.integers(1, 4, judged.size),
        }
    )
    return topics, qrels, candidates


def make_run(topics: pd.DataFrame, candidates: np.ndarray, system: int, seed: int) -> pd.DataFrame:
    """Scores of which relevant documents get more, the more the later the system."""
    rng = np.random.default_rng([system, seed])
    scores = rng.normal(size=candidates.shape)
    scores[:, :10] += 1.0 + 0.01 * system
    docnos = np.array([f"D{d:07d}" for d in range(DOCUMENTS)], dtype=object)
    qids = np.repeat(topics["qid"].to_numpy(dtype=object), candidates.shape[1])
    return pd.DataFrame({"qid": qids, "docno": docnos[candidates.ravel()], "score": scores.ravel()})


def measure(args: argparse.Namespace) -> None:
    topics, qrels, candidates = collection(args.queries, args.depth)
    systems: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as folder:
        for system in range(args.systems):
            name = f"system {system}"
            runs = (make_run(topics, candidates, system, seed) for seed in range(args.seeds))
            if args.only == "frames":
                systems[name] = list(runs)
                continue
            systems[name] = [Path(folder) / f"{system}-{seed}.res.gz" for seed in range(args.seeds)]
            for run, path in zip(runs, systems[name], strict=True):
                write_run(run, path, name)
        partner = {f"system {i}": f"system {i - i % 3}" for i in range(args.systems) if i % 3}
        start, start_cpu = time.perf_counter(), time.process_time()
        results = Experiment(
            systems, topics, qrels, METRICS, baseline=["system 0", "system 1"], partner=partner, correction="holm"
        )
        evaluated = time.perf_counter()
        assert len(results.table) == args.systems
        assert results.comparisons["p-value corrected"].notna().all()
        results.to_markdown()
        tested, tested_cpu = time.perf_counter(), time.process_time()
        assert len(results.retest(test="randomisation").comparisons) == len(results.comparisons)
        randomised = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {args.only} | {evaluated - start:.1f} | {tested - evaluated:.1f} | {tested - start:.1f} | "
        f"{tested_cpu - start_cpu:.1f} | {randomised - tested:.1f} | {peak:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("queries", 1000), ("systems", 30), ("seeds", 3), ("depth", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=["frames", "files"])
    args = parser.parse_args()
    if args.only:
        warnings.simplefilter("ignore")
        measure(args)
        return
    print(f"{args.queries} queries x {args.systems} systems x {args.seeds} seeds, {args.depth} documents each\n")
    print("| runs as | evaluated (s) | tests, table (s) | together (s) | CPU (s) | + randomisation (s) | peak (MB) |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for only in ("frames", "files"):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", only], check=True)


if __name__ == "__main__":
    main()
