"""Tournaments of several stages: TourRank."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ...common.arguments import argument
from .base import PromptGroup, Rounds, Schedule

STAGES = ((20, 10), (10, 4), (20, 10), (10, 5), (5, 2))
"""Chen et al. 2025 for 100 documents: 5 groups of 20, 5 of 10, then one of 20, 10 and 5."""


@dataclass(frozen=True)
class Tournament(Schedule):
    """Tournaments in which the best of each group get a point and advance to the next stage.

    Source: TourRank (Chen et al. 2025, arXiv 2406.11678). The current ranking is dealt out to the groups, so that each
    gets its share of the best; the order within a group is random. Documents are ranked by the points of all
    tournaments, then by the first stage. Groups are as even as possible, and the same share of each advances. Differs
    in the prompt, which asks for an order of the group, of which the best advance.

    Prompts: the sum over the stages of ceil(documents / group size), times `tournaments`, with one round per stage: 13
    for 100 documents and one tournament.

    Args:
        tournaments: the number of tournaments, which run in parallel. 1 and 10 in Chen et al. 2025 (TourRank-1,
            TourRank-10).
        stages: for each stage, the maximum number of documents in a group and how many of a full group advance.
        seed: the random seed of the orders within groups.
    """

    papers: ClassVar[tuple[str, ...]] = ("chen-2025-tourrank",)

    tournaments: int = argument(1, at_least=1)
    stages: tuple[tuple[int, int], ...] = STAGES
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stages", tuple((size, best) for size, best in self.stages))
        if not self.stages or not all(0 < best < size for size, best in self.stages):
            raise ValueError(
                f"stages={self.stages!r} must be pairs (documents in a group, how many advance), e.g. {STAGES!r}"
            )

    def rank(self, n: int) -> Rounds:
        """Rank; in a group without an answer, no document gets a point or advances."""
        points: Counter[int] = Counter()
        rngs = [random.Random(f"{self.seed}|{number}") for number in range(self.tournaments)]
        entrants = [list(range(n)) for _ in rngs]
        for size, best in self.stages:
            groups = [
                [rng.sample(group, len(group)) for group in deal(of_tournament, size)]
                for of_tournament, rng in zip(entrants, rngs, strict=True)
            ]
            answers = iter((yield [group for of_tournament in groups for group in of_tournament]))
            for number, of_one in enumerate(groups):
                winners = {d for group in of_one for d in (next(answers) or ())[: winner_count(len(group), size, best)]}
                points.update(winners)
                # Winners have the same points in this tournament, so the first stage orders them.
                entrants[number] = sorted(winners)
        return sorted(range(n), key=lambda document: -points[document])

    def estimate(self, n: int) -> int:
        prompts = 0
        for size, best in self.stages:
            groups = deal(list(range(n)), size)
            prompts += sum(len(group) > 1 for group in groups)
            n = sum(winner_count(len(group), size, best) for group in groups)
        return prompts * self.tournaments


def deal(documents: list[int], size: int) -> list[PromptGroup]:
    """Deal the documents out one by one to as few groups of at most `size` as possible."""
    groups = -(-len(documents) // size)
    return [documents[first::groups] for first in range(groups)]


def winner_count(documents: int, size: int, best: int) -> int:
    """Return how many of a group advance: `best` of a full group of `size`, otherwise the same share, rounded up."""
    return -(-documents * best // size)
