"""What `ld.distributed` costs beside the same model in this process, and what a block costs without any model.

    python tests/benchmarks/bench_ray.py [--workers 1 2] [--queries 6] [--depth 10] [--words 150] [--rounds 5]

MaxP (22M parameters, `longdoc:minilm-l6`) scores `--queries` times `--depth` made-up texts of `--words` words, one
query a block: here, and on workers with as many threads each. One worker against this process is the overhead; two
have half of the work each. Each round runs all of them, one after the other, and begins with another; ratios are those
of the least seconds, in brackets the least ratio of a round, for machines on which other things run. A first round
sends the models. Scores are compared bit for bit. `cpu` is the processor time of this process and the worker together
beside that of the first line, which waiting for others does not change; of one worker only. Ray's workers have the
niceness 15, so that anything else on the machine goes first; here they have this program's own, unless
RAY_worker_niceness says otherwise.

`dispatch` is the time of a block of 100 rows with `--words` words each and a function that does nothing: what is left
is sending the frame and getting it back. Needs the extras `demo` and `ray`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.scale import Distributed, RayExecutor
from pyterrier_longdoc.scale.blocks import blocks_of, transformed
from tests.support import tiny

WORDS = " ".join(tiny.WORDS).split()


def made_up(queries: int, depth: int, words: int) -> pd.DataFrame:
    """Texts of their own for each query."""
    rng = np.random.default_rng(0)
    rows = [
        (f"q{q}", " ".join(rng.choice(WORDS, 6)), f"d{q}-{d}", " ".join(rng.choice(WORDS, words)), float(-d), d)
        for q in range(queries)
        for d in range(depth)
    ]
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score", "rank"])


def processor_time(model: object, item: None) -> float:
    """Seconds that this process has computed so far; what its models remember of the round before is forgotten."""
    forget_embeddings()
    return time.process_time()


def seconds_of(run: Callable[[], pd.DataFrame], there: Distributed) -> tuple[float, float, pd.DataFrame]:
    """Of one run by the clock and of processors, here and on a worker, and what it returns."""

    def computed() -> float:
        items = [(None, None)]
        return processor_time(None, None) + sum(
            own for _, own in there.executor.map(processor_time, there.model, items)
        )

    before, start = computed(), time.perf_counter()
    out = run()
    taken = time.perf_counter() - start
    return taken, computed() - before, out


def dispatch(workers: int, words: int, blocks: int = 200) -> float:
    """Milliseconds of a block with nothing to do."""
    frame = made_up(1, 100, words)
    with RayExecutor(workers, gpus_per_worker=0) as executor:
        for some in (2 * workers, blocks):
            start = time.perf_counter()
            for _ in executor.map(transformed, pt.Transformer.identity(), ((i, frame) for i in range(some))):
                pass
        return (time.perf_counter() - start) / blocks * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--queries", type=int, default=6)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of this process, and of each worker")
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", ld.UntrainedWarning)
    frame = made_up(args.queries, args.depth, args.words)
    # One that runs here would be sent again each time, with what it has read.
    model, sent = (ld.MaxP("longdoc:minilm-l6", device="cpu", dtype="float32") for _ in range(2))
    blocks = blocks_of(frame["qid"], 1)
    runs: dict[str, Callable[[], pd.DataFrame]] = {
        "here, block by block": lambda: pd.concat([model(frame.iloc[rows]) for rows in blocks]),
        "here, all at once": lambda: model(frame),
    }
    print(
        f"{len(frame)} rows in {len(blocks)} blocks, {args.threads} thread(s) each, {os.cpu_count()} cores", flush=True
    )
    for workers in args.workers:
        with RayExecutor(workers, cpus_per_worker=args.threads, gpus_per_worker=0) as executor:
            there = executor.distributed(sent, block_rows=1)
            compare({**runs, f"{workers} worker(s)": lambda there=there: there(frame)}, args.rounds, there)
        print(f"dispatch with {workers} worker(s): {dispatch(workers, args.words):.1f} ms a block", flush=True)


def compare(runs: dict[str, Callable[[], pd.DataFrame]], rounds: int, there: Distributed) -> None:
    """Runs all in turn and prints their least seconds beside the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    computed: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    results = {name: run() for name, run in runs.items()}
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            taken, processors, results[name] = seconds_of(runs[name], there)
            seconds[name].append(taken)
            computed[name].append(processors)
    first = names[0]
    for name in names:
        ratios = [own / other for own, other in zip(seconds[name], seconds[first], strict=True)]
        differ = np.abs(results[name]["score"] - results[first]["score"]).max()
        cpu = f"{min(computed[name]) / min(computed[first]):.3f}" if there.executor.workers == 1 else "-"
        print(
            f"{name:22}{min(seconds[name]):9.2f} s{min(seconds[name]) / min(seconds[first]):8.3f} ({min(ratios):.3f})"
            f"   cpu {cpu:>6}   scores differ by {differ:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
