"""Top-down partitioning: order the first window, then compare all others with a pivot from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...common.arguments import argument
from .base import Rounds, Schedule


@dataclass(frozen=True)
class TopDown(Schedule):
    """Orders the first window, finds other documents that are better than its pivot, and orders those.

    Source: top-down partitioning (Parry et al. 2024, arXiv 2405.14589). The method assumes that the first window of the
    first stage has a good pivot; with a bad one, more than `budget` documents are better than the pivot. Differs from
    the authors' code, which processes the partitions one by one until it has `budget` documents: here, all partitions
    share a round, and documents beyond the budget follow in the order of the partitions. If the better documents are
    partitioned again, that code appends those below the second pivot after all documents below the first one; here,
    they are ranked above the first pivot, because they are better than it.

    Prompts, if the answers require the last one: at most 2 + ceil((n - window) / (window - 1)) for n > window and a
    budget of at most a window, in 3 rounds: 7 for 100 documents. A larger budget can repeat this with the better
    documents.

    Args:
        window: the maximum number of documents in a prompt. 20 in Parry et al. 2024.
        pivot: the rank of the pivot in the first window and the number of top documents. 10 in Parry et al. 2024.
        budget: the maximum number of documents better than the pivot that are ordered again. 20 in Parry et al. 2024;
            None for all.
    """

    papers: ClassVar[tuple[str, ...]] = ("parry-2024-top",)

    window: int = argument(20, at_least=2)
    pivot: int = argument(10, at_least=1, below="window")
    budget: int | None = argument(20, at_least=1)

    def rank(self, n: int) -> Rounds:
        """Rank; without an answer, the first window keeps its order, and a partition stays below the pivot."""
        return (yield from self._top(list(range(n))))

    def _top(self, documents: list[int]) -> Rounds:
        head, rest = documents[: self.window], documents[self.window :]
        (answer,) = yield [head]
        head = answer or head
        if not rest:
            return head
        better, pivot, worse = head[: self.pivot - 1], head[self.pivot - 1], head[self.pivot :]
        size = self.window - 1
        partitions = [[pivot, *rest[i : i + size]] for i in range(0, len(rest), size)]
        winners: list[int] = []
        for partition, answer in zip(partitions, (yield partitions), strict=True):
            order = answer or partition
            at = order.index(pivot)
            winners += order[:at]
            worse += order[at + 1 :]
        if not winners:
            return [*better, pivot, *worse]
        candidates = [*better, *winners]
        budget = len(candidates) if self.budget is None else self.budget
        top = yield from self._top(candidates[:budget])
        return [*top, *candidates[budget:], pivot, *worse]

    def estimate(self, n: int) -> int:
        if n <= self.window:
            return int(n > 1)
        most_better = n - 1 - (self.window - self.pivot)
        candidates = most_better if self.budget is None else min(most_better, self.budget)
        return 1 - (self.window - n) // (self.window - 1) + max(self.estimate(candidates), 1)
