"""Workers that take one block of queries after the other: how long a job takes, and what is lost, for up to 1,000.

    python tests/benchmarks/simulate_workers.py [--collection PATH/time] [--blocks 5193] [--hours 2000]

Service times are measured: the packaged MaxP scores BM25's `--depth` best documents of `--topics` topics, one topic a
block, on one thread, and the simulation draws from these times, scaled so that `--blocks` blocks are `--hours` hours of
work for one worker. (Blocks differ because documents are of different lengths. `--service FILE` reads the times that
`--write FILE` wrote.) Of the workers, `--slow` of all are half as fast as the others; each dies once in `--life` hours
on average, and its successor begins after `--start` seconds, as all do; it takes `--dispatch` milliseconds of the one
process that hands out blocks to hand out one (`bench_ray.py`).

Who gets what: `one by one`, a block whenever a worker is free (Ray's workers); `two each`, a second one waits
at each worker; `again`, as the first, and at the end idle workers get blocks that others are at, whichever is done
first counts; `shards`, block i belongs to worker i mod n (arrays of `shard=(i, n)`).

`to ideal`: time of the job / (all work / speed of all workers). `twice`: blocks that were begun more than once. `lost`:
work that did not count, in shares of all work. The mean of `--rounds` simulations.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
import warnings
from collections import deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

POLICIES = ("one by one", "two each", "again", "shards")
HOUR = 3600.0


def measured(args: argparse.Namespace) -> np.ndarray:
    """Seconds of each topic's block."""
    if args.service:
        return np.array(json.loads(Path(args.service).read_text(encoding="utf-8")))
    import torch

    import pyterrier_longdoc as ld
    from tests.benchmarks.bench_speed import collection

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    frame, _ = collection(args)
    model = ld.MaxP.load("longdoc:maxp", device="cpu")
    model(frame.head(1))
    seconds = []
    for _, block in frame.groupby("qid"):
        start = time.perf_counter()
        model(block)
        seconds.append(time.perf_counter() - start)
    if args.write:
        Path(args.write).write_text(json.dumps(seconds), encoding="utf-8")
    return np.array(seconds)


class Job:
    """One simulation: events are blocks that end and workers that start, in the order of time."""

    def __init__(self, work: np.ndarray, workers: int, policy: str, args: argparse.Namespace, seed: int) -> None:
        self.work, self.policy, self.args = work, policy, args
        self.rng = np.random.default_rng(seed)
        self.speed = np.where(self.rng.random(workers) < args.slow, 0.5, 1.0)
        self.common = deque(range(len(work)))
        self.own: list[deque[int]] = [deque() for _ in range(workers)]
        if policy == "shards":
            self.own = [deque(range(i, len(work), workers)) for i in range(workers)]
            self.common.clear()
        self.done = np.zeros(len(work), dtype=bool)
        self.begun = np.zeros(len(work), dtype=int)
        self.computed, self.driver, self.end = 0.0, 0.0, 0.0
        self.events: list[tuple[float, int, int | None, bool]] = []
        self.idle: set[int] = set()

    def run(self) -> tuple[float, int, float]:
        """Seconds, blocks begun more than once, and work that did not count as a share of all."""
        for worker in range(len(self.speed)):
            heapq.heappush(self.events, (self.args.start, worker, None, False))
        while not self.done.all():
            now, worker, block, died = heapq.heappop(self.events)
            if block is not None and not died and not self.done[block]:
                self.done[block], self.end = True, now
            if died:
                if block is not None and not self.done[block]:
                    (self.own[worker] if self.policy == "shards" else self.common).appendleft(block)
                while self.policy == "two each" and self.own[worker]:
                    self.common.appendleft(self.own[worker].pop())
                heapq.heappush(self.events, (now + self.args.start, worker, None, False))
                for other in list(self.idle):
                    self.next_block(other, now)
                continue
            self.next_block(worker, now)
        total = self.work.sum()
        return self.end, int((self.begun > 1).sum()), (self.computed - total) / total

    def next_block(self, worker: int, now: float) -> None:
        """The worker begins a block, if there is one for it."""
        self.idle.discard(worker)
        block = self.pick(worker)
        if block is None:
            self.idle.add(worker)
            return
        # One process hands out all blocks; what waits at a worker already is not waited for.
        self.driver = max(self.driver, now) + (0.0 if self.policy == "shards" else self.args.dispatch / 1e3)
        start = now if self.policy == "two each" else self.driver
        seconds = self.work[block] / self.speed[worker]
        life = self.rng.exponential(self.args.life * HOUR)
        self.begun[block] += 1
        self.computed += min(seconds, life) * self.speed[worker]
        heapq.heappush(self.events, (start + min(seconds, life), worker, block, life < seconds))

    def pick(self, worker: int) -> int | None:
        own = self.own[worker]
        if self.policy == "two each":
            while len(own) < 2 and self.common:
                own.append(self.common.popleft())
        if own:
            return own.popleft()
        while self.common:
            block = self.common.popleft()
            if not self.done[block]:
                return block
        if self.policy == "again":
            open_blocks = np.flatnonzero(~self.done & (self.begun == 1))
            if len(open_blocks):
                return int(open_blocks[0])
        return None


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt")
    parser.add_argument("--topics", type=int, default=30)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--service", help="file of measured seconds")
    parser.add_argument("--write", help="file for the measured seconds")
    parser.add_argument("--blocks", type=int, default=5193)
    parser.add_argument("--hours", type=float, default=2000.0)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 64, 256, 1000])
    parser.add_argument("--slow", type=float, default=0.02)
    parser.add_argument("--life", type=float, default=24.0)
    parser.add_argument("--start", type=float, default=60.0)
    parser.add_argument("--dispatch", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    times = measured(args)
    shares = np.percentile(times / times.mean(), [0, 50, 90, 100])
    print(f"{len(times)} blocks measured: mean {times.mean():.2f} s; least, median, 90 %, most of the mean: ", end="")
    print(", ".join(f"{share:.2f}" for share in shares))
    work = np.random.default_rng(0).choice(times, args.blocks)
    work *= args.hours * HOUR / work.sum()
    print(f"{args.blocks} blocks of {work.mean() / 60:.1f} minutes on average, {args.hours:.0f} hours in all")
    print(f"{'workers':>8} {'who gets what':15}{'hours':>8}{'to ideal':>10}{'twice':>7}{'lost':>8}")
    for workers in args.workers:
        for policy in POLICIES:
            jobs = [Job(work, workers, policy, args, seed) for seed in range(args.rounds)]
            results = np.array([(*job.run(), work.sum() / job.speed.sum()) for job in jobs])
            seconds, twice, lost, ideal = results.mean(axis=0)
            print(
                f"{workers:8} {policy:15}{seconds / HOUR:8.2f}{seconds / ideal:10.2f}{twice:7.0f}{lost:8.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
