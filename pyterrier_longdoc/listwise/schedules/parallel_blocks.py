"""Overlapping blocks, all at once, whose orders are joined: JointRank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from ...common.arguments import argument
from .base import Answer, Rounds, Schedule

DAMPING = 0.85
"""Of PageRank, as Brin and Page 1998 chose it."""


@dataclass(frozen=True)
class ParallelBlocks(Schedule):
    """Orders random blocks in which each document stands several times, all at once, and joins their orders.

    Source: JointRank (Dedov 2025, arXiv 2506.22262), with its equi-replicate design: documents are dealt out in random
    order, as often as `replicas` says. Each order counts as a comparison of all pairs in it. Differs where blocks do
    not come out even: the last one is filled, so that each document stands in at least `replicas` blocks.

    Prompts: ceil(n * replicas / block) for n > block, else 1, all in one round: 10 for 100 documents.

    Args:
        block: most documents in a prompt.
        replicas: the number of blocks with each document. A block of 20 and 2 replicas are the defaults of the author's
            code; its configurations have 20 and 4, 10 and 2, or, for 1,000 documents, 100 and 3.
        aggregation: `"pagerank"`, in which a document passes its weight on to those that it lost to; or `"winrate"`,
            the share of its comparisons that it won. Dedov 2025 uses the first.
        seed: of the blocks.
    """

    papers: ClassVar[tuple[str, ...]] = ("dedov-2025-jointrank",)

    block: int = argument(20, at_least=2)
    replicas: int = argument(2, at_least=1)
    aggregation: str = argument("pagerank", choices=("pagerank", "winrate"))
    seed: int = 42

    def blocks(self, n: int) -> list[list[int]]:
        """Return the blocks of `n` documents; no document is in one block twice."""
        if n <= self.block:
            return [list(range(n))]
        rng = random.Random(f"{self.seed}|{n}")
        sequence: list[int] = []
        blocks: list[list[int]] = []
        while len(blocks) < self.estimate(n):
            if len(sequence) < self.block:
                rest = set(sequence)
                # A stable sort: documents of the rest come last, in another block.
                sequence += sorted(rng.sample(range(n), n), key=rest.__contains__)
            blocks.append(sequence[: self.block])
            sequence = sequence[self.block :]
        return blocks

    def rank(self, n: int) -> Rounds:
        """Rank; a block without an answer compares nothing."""
        answers = yield self.blocks(n)
        wins = _wins(answers, n)
        score = {"pagerank": _pagerank, "winrate": _winrate}[self.aggregation](wins)
        return np.argsort(-score, kind="stable").tolist()

    def estimate(self, n: int) -> int:
        return int(n > 1) if n <= self.block else -(-n * self.replicas // self.block)


def _wins(answers: Sequence[Answer], n: int) -> np.ndarray:
    """Return `(n, n)`: how often the document of the row was before that of the column."""
    wins = np.zeros((n, n))
    for order in answers:
        for better, worse in combinations(order or (), 2):
            wins[better, worse] += 1
    return wins


def _winrate(wins: np.ndarray) -> np.ndarray:
    """Return `(n,)` shares; 1/2 for a document that was not compared."""
    won, lost = wins.sum(axis=1), wins.sum(axis=0)
    return (won + 0.5 * (won + lost == 0)) / np.maximum(won + lost, 1)


def _pagerank(wins: np.ndarray) -> np.ndarray:
    """Return `(n,)` weights, rounded so that equal ones are equal on every machine."""
    n = len(wins)
    lost = wins.sum(axis=0)
    # Row: the loser; a document that never lost passes its weight on to all.
    passes = np.where(lost[:, None] > 0, wins.T / np.maximum(lost, 1)[:, None], 1 / n)
    weight = np.full(n, 1 / n)
    for _ in range(100):
        weight = (1 - DAMPING) / n + DAMPING * weight @ passes
    return np.round(weight * n, 9)
