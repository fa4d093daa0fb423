"""Schedules of published methods, which select the documents of each prompt and combine the answers to a ranking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from ..common.arguments import argument, validate
from ..common.citations import Cited

PromptGroup = list[int]
"""The documents of one prompt, in their order in the prompt."""

Answer = list[int] | None
"""The documents of a group, best first; None if there is no readable answer."""

Rounds = Generator[list[PromptGroup], list[Answer], list[int]]
"""Yields independent groups, receives an answer for each, and returns documents, best first."""


class Schedule(Cited, ABC):
    """Selects the documents of each prompt and combines the answers to a ranking.

    A schedule does not depend on texts or models: documents are indices in the order of the first stage. A new schedule
    is a frozen dataclass with two methods.
    """

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def rank(self, n: int) -> Rounds:
        """Rank the documents 0..n-1 of one query, n >= 2; return them, best first.

        Each `yield` is a round: a list of groups whose prompts can run concurrently. Its value is a list with the order
        of each group, or None for a group without an answer. Documents that are not returned follow in the order of the
        first stage.
        """

    @abstractmethod
    def estimate(self, n: int) -> int:
        """Return the number of prompts for `n` documents; the maximum if it depends on the answers."""


@dataclass(frozen=True)
class BackToFront(Schedule):
    """Overlapping windows that move from the back of the ranking to its front.

    Source: RankGPT (Sun et al. 2023, arXiv 2304.09542). The last window always includes the top, even if the windows do
    not divide the ranking evenly. If the model orders each window correctly, the best `window - stride` documents end
    up on top.

    Prompts: 1 + ceil((n - window) / stride) for n > window, else 1, each in a separate round: 9 for 100 documents.

    Args:
        window: the maximum number of documents in a prompt. 20 in Sun et al. 2023.
        stride: the number of documents by which the window moves. 10 in Sun et al. 2023. The best `window - stride`
            documents of a window are also in the next one.
    """

    papers: ClassVar[tuple[str, ...]] = ("sun-2023-is",)

    window: int = argument(20, at_least=2)
    stride: int = argument(10, at_least=1, below="window")  # documents only move up if windows overlap

    def windows(self, n: int) -> list[tuple[int, int]]:
        """Return the start and end of each window over `n` documents, in the order of the prompts; none for n = 1.

        Example:
            >>> BackToFront(20, 10).windows(25)
            [(5, 25), (0, 15)]
        """
        ends = range(n, min(self.window - self.stride, n - 1), -self.stride) if n > 1 else ()
        return [(max(end - self.window, 0), end) for end in ends]

    def rank(self, n: int) -> Rounds:
        """Rank; a window without an answer keeps its order."""
        ranking = list(range(n))
        for start, end in self.windows(n):
            (answer,) = yield [ranking[start:end]]
            ranking[start:end] = answer or ranking[start:end]
        return ranking

    def estimate(self, n: int) -> int:
        return len(self.windows(n))


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
