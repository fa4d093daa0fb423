"""Overlapping blocks that are ordered in parallel and then combined: JointRank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from ...common.arguments import argument
from .base import Rounds, Schedule

DAMPING = 0.85
"""Damping factor of PageRank, as in Brin and Page 1998."""


@dataclass(frozen=True)
class ParallelBlocks(Schedule):
    """Random blocks, with each document in several of them, which are ordered in parallel and then combined.

    Source: JointRank (Dedov 2025, arXiv 2506.22262), with its equi-replicate design: documents are dealt out in random
    order, `replicas` times. Each order counts as a comparison of all its pairs, and documents are ranked by PageRank,
    where each passes its weight to those that it lost against. Differs if the blocks do not come out even: the last one
    is filled, so that each document is in at least `replicas` blocks.

    Prompts: ceil(n * replicas / block) for n > block, else 1, all in one round: 10 for 100 documents.

    Args:
        block: the maximum number of documents in a prompt.
        replicas: the number of blocks that contain each document. The author's code has a default of 20 documents per
            block and 2 replicas, and configurations with 20 and 4, 10 and 2, or, for 1,000 documents, 100 and 3.
        seed: the random seed of the blocks.
    """

    papers: ClassVar[tuple[str, ...]] = ("dedov-2025-jointrank",)

    block: int = argument(20, at_least=2)
    replicas: int = argument(2, at_least=1)
    seed: int = 42

    def blocks(self, n: int) -> list[list[int]]:
        """Return the blocks of `n` documents; no document is twice in the same block."""
        if n <= self.block:
            return [list(range(n))]
        rng = random.Random(f"{self.seed}|{n}")
        sequence: list[int] = []
        blocks: list[list[int]] = []
        while len(blocks) < self.estimate(n):
            if len(sequence) < self.block:
                rest = set(sequence)
                # A stable sort moves the remaining documents to the end, and so into another block.
                sequence += sorted(rng.sample(range(n), n), key=rest.__contains__)
            blocks.append(sequence[: self.block])
            sequence = sequence[self.block :]
        return blocks

    def rank(self, n: int) -> Rounds:
        """Rank; a block without an answer is ignored."""
        answers = yield self.blocks(n)
        wins = np.zeros((n, n))  # how often the document of the row was ranked above that of the column
        for order in answers:
            for better, worse in combinations(order or (), 2):
                wins[better, worse] += 1
        lost = wins.sum(axis=0)
        # Rows are losers; a document that never lost passes its weight to all.
        passes = np.where(lost[:, None] > 0, wins.T / np.maximum(lost, 1)[:, None], 1 / n)
        weight = np.full(n, 1 / n)
        for _ in range(100):
            weight = (1 - DAMPING) / n + DAMPING * weight @ passes
        # Rounded, so that ties are the same on every machine.
        return np.argsort(-np.round(weight * n, 9), kind="stable").tolist()

    def estimate(self, n: int) -> int:
        return int(n > 1) if n <= self.block else -(-n * self.replicas // self.block)
