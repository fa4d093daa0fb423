"""Windows from the back of the ranking to its front: RankGPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...common.arguments import argument
from .base import Rounds, Schedule


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
