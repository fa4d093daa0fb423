"""Pairwise schedules: all pairs, or bubble sort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from ...common.arguments import argument
from .base import Answer, PromptGroup, Rounds, Schedule


@dataclass(frozen=True)
class PairwiseAll(Schedule):
    """All pairs, each in both orders; documents are ranked by their number of wins.

    Source: PRP-Allpair (Qin et al. 2024, arXiv 2306.17563). A pair counts half for both documents if its two answers
    differ or one is missing.

    Prompts: n (n - 1), all in one round: 9,900 for 100 documents.
    """

    papers: ClassVar[tuple[str, ...]] = ("qin-2024-large",)

    def rank(self, n: int) -> Rounds:
        pairs = list(combinations(range(n), 2))
        answers = yield [group for pair in pairs for group in both_orders(*pair)]
        won = [0.0] * n
        for pair, forward, backward in zip(pairs, answers[::2], answers[1::2], strict=True):
            better = preferred(forward, backward)
            for document in pair:
                won[document] += 0.5 if better is None else float(document == better)
        return sorted(range(n), key=lambda document: -won[document])

    def estimate(self, n: int) -> int:
        return n * (n - 1)


@dataclass(frozen=True)
class PairwiseBubble(Schedule):
    """Adjacent pairs from the back to the front, each in both orders; `k` passes move the best `k` to the top.

    Source: PRP-Sliding-K (Qin et al. 2024, arXiv 2306.17563). A pair is only swapped if both answers agree. A pass ends
    below the documents that earlier passes moved to the top.

    Prompts: k (2 n - k - 1) for n > k, two per round: 1,890 for 100 documents and k = 10. Repeated pairs are replayed
    if the client has a cache.

    Args:
        k: the number of passes. 10 in Qin et al. 2024.
    """

    papers: ClassVar[tuple[str, ...]] = ("qin-2024-large",)

    k: int = argument(10, at_least=1)

    def rank(self, n: int) -> Rounds:
        ranking = list(range(n))
        for top in range(min(self.k, n - 1)):
            for place in range(n - 1, top, -1):
                upper, lower = ranking[place - 1 : place + 1]
                if preferred(*(yield both_orders(upper, lower))) == lower:
                    ranking[place - 1 : place + 1] = lower, upper
        return ranking

    def estimate(self, n: int) -> int:
        passes = max(min(self.k, n - 1), 0)
        return passes * (2 * n - passes - 1)


def both_orders(first: int, second: int) -> list[PromptGroup]:
    """Return a pair in both orders."""
    return [[first, second], [second, first]]


def preferred(*answers: Answer) -> int | None:
    """Return the document that is first in all answers; None if the answers differ or one is missing."""
    winners: Sequence[int | None] = [None if answer is None else answer[0] for answer in answers]
    return winners[0] if len(set(winners)) == 1 else None
