"""Schedules before a noisy oracle: calls against the published numbers, recovery of the best ten, what the cache saves.

The oracle knows what each document is worth. It sorts a group by comparisons, each of which errs with probability p;
the same group has the same answer. The first stage ranks by the true rank plus normal noise, or at random.

Run: python -m tests.benchmarks.bench_schedules
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean

from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    LLMClient,
    PairwiseAll,
    PairwiseBubble,
    ParallelBlocks,
    Schedule,
    SetwiseHeapsort,
    SetwiseInsertion,
    TopDown,
    Tournament,
)
from pyterrier_longdoc.listwise.ranker import mean_order
from tests.benchmarks.compare_schedules import compare_schedules
from tests.support.llm import candidates
from tests.support.noisy import NoisyOracle, noisy_order, play

DOCUMENTS, BEST, QUERIES = 100, 10, 40
NOISE = 20.0
"""Standard deviation of the first stage's ranks around the true ones."""

ERRORS = (0.0, 0.05, 0.1, 0.2, 0.3)

PUBLISHED = {
    BackToFront(): "1 + (n - 20) / 10 = 9",
    TopDown(): "2 + ceil((n - 20) / 19) = 7",
    ParallelBlocks(): "2 n / 20 = 10",
    Tournament(): "5 + 5 + 1 + 1 + 1 = 13",
    SetwiseHeapsort(): "O(n / 3 + k log n), <= 85",
    SetwiseInsertion(): "heap of k + (n - k) / 3 + inserted",
    PairwiseBubble(): "k (2 n - k - 1) = 1890",
    PairwiseAll(): "n (n - 1) = 9900",
}

SPENT: dict[str, list[tuple[Schedule, int]]] = {
    "BackToFront, shuffles": [(BackToFront(), shuffles) for shuffles in (1, 3, 5, 14)],
    "TopDown, shuffles": [(TopDown(), shuffles) for shuffles in (1, 3, 7, 18)],
    "ParallelBlocks, replicas": [(ParallelBlocks(replicas=replicas), 1) for replicas in (2, 6, 10, 26)],
    "Tournament, tournaments": [(Tournament(tournaments), 1) for tournaments in (1, 2, 4, 10)],
    "SetwiseHeapsort, children": [(SetwiseHeapsort(children), 1) for children in (19, 9, 4, 2)],
}
"""Settings that take about 10, 30, 50 and 130 prompts, each schedule by its own means."""


def first_stage(query: int, noise: float | None) -> dict[int, float]:
    """What each document of the first stage's order is worth; None for an order that has nothing to do with it."""
    rng = random.Random(query)
    place = {rank: rng.random() if noise is None else rank + rng.gauss(0, noise) for rank in range(DOCUMENTS)}
    return {number: -float(rank) for number, rank in enumerate(sorted(place, key=place.__getitem__))}


def oracle(worth: Mapping[int, float], p: float, seed: int, shuffles: int) -> Callable[[list[int]], list[int] | None]:
    """Orders groups, from several shuffles if asked."""

    def order(group: list[int]) -> list[int] | None:
        found = []
        for shuffle in range(shuffles):
            rng = random.Random(f"{seed}|{p}|{shuffle}|{group}")
            found.append([group[i] for i in noisy_order([worth[document] for document in group], p, rng)])
        return mean_order(group, found)

    return order


def recovery(schedule: Schedule, p: float, *, noise: float | None = NOISE, shuffles: int = 1) -> tuple[float, ...]:
    """Share of the best ten among the first ten, prompts and rounds: means over queries."""
    found, prompts, waits = [], [], []
    for query in range(10 if isinstance(schedule, PairwiseAll) else QUERIES):
        worth = first_stage(query, noise)
        ranking, rounds = play(schedule, DOCUMENTS, oracle(worth, p, query, shuffles))
        best = set(sorted(worth, key=worth.__getitem__, reverse=True)[:BEST])
        found.append(len(best & set(ranking[:BEST])) / BEST)
        prompts.append(shuffles * sum(rounds))
        waits.append(len(rounds))
    return mean(found), mean(prompts), mean(waits)


def calls_and_recovery() -> None:
    errors = "".join(f"{f'p={p}':>8s}" for p in ERRORS)
    print(f"{'schedule':17s}{'published':>36s}{'prompts':>9s}{'rounds':>8s}{errors}{'random':>8s}")
    worths = [first_stage(query, NOISE) for query in range(QUERIES)]
    known = mean(len({d for d in range(BEST) if worth[d] > -BEST}) / BEST for worth in worths)
    print(f"{'first stage':17s}{'':36s}{0:9d}{0:8d}" + f"{known:8.2f}" * len(ERRORS) + f"{BEST / DOCUMENTS:8.2f}")
    for schedule, published in PUBLISHED.items():
        rows = [recovery(schedule, p) for p in ERRORS]
        by_chance = recovery(schedule, 0.1, noise=None)
        shares = "".join(f"{share:8.2f}" for share, *_ in [*rows, by_chance])
        _, prompts, rounds = rows[ERRORS.index(0.1)]
        print(f"{type(schedule).__name__:17s}{published:>36s}{prompts:9.0f}{rounds:8.0f}{shares}")


def spending() -> None:
    print("\nrecovery at p=0.2 (prompts)")
    for name, settings in SPENT.items():
        found = [recovery(schedule, 0.2, shuffles=shuffles) for schedule, shuffles in settings]
        print(f"{name:27s}" + "".join(f"{share:8.2f} ({prompts:3.0f})" for share, prompts, _ in found))


def sharing() -> None:
    """30 documents, as all pairs of 100 are many files of a cache."""
    run = candidates(queries=5, documents=30)
    schedules = [PairwiseAll(), PairwiseBubble(), SetwiseHeapsort(1), SetwiseHeapsort(), SetwiseInsertion()]
    named = {repr(schedule): schedule for schedule in [*schedules, BackToFront(), TopDown(), BackToFront(20, 5)]}
    with tempfile.TemporaryDirectory() as folder:
        backend = CallableBackend(NoisyOracle(0.1), name="noisy")
        llm = LLMClient(backend, cache=Path(folder) / "replies.sqlite")
        table = compare_schedules(llm, run, schedules=named).table
    print("\ncalls for 5 queries of 30 documents, one schedule after the other with one cache")
    print(table[["name", "calls", "replayed"]].iloc[1:].to_string(index=False))


def main() -> None:
    print(f"{DOCUMENTS} documents, {QUERIES} queries (10 for PairwiseAll): share of the best {BEST} among the first")
    print(f"first stage: true rank + normal noise of {NOISE:.0f}; 'random': at random, p=0.1\n")
    calls_and_recovery()
    spending()
    sharing()


if __name__ == "__main__":
    main()
