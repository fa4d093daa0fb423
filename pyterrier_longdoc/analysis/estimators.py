"""Estimators of the position at which the relevant text of a document begins, from a judge's grades of its chunks.

With the same grades, estimators give very different results: see `tests/benchmarks/README.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..modelling.tokens import Span


class Estimator(ABC):
    """Chooses the chunk in which the relevant text begins: `best_chunk` or `first_above(threshold)`."""

    failure: str
    """The reason reported if no chunk is chosen."""

    @abstractmethod
    def __call__(self, numbers: np.ndarray) -> int | None:
        """Return the index of the chosen chunk or None; `numbers` are `(C,)` grades, NaN if a reply was unreadable."""

    def decides(self, number: float) -> bool:
        """Return whether a chunk with this grade is chosen whatever follows, so that judging can stop."""
        return False


class _BestChunk(Estimator):
    failure = "no chunk better than the others"

    def __repr__(self) -> str:
        return "best_chunk"

    def __call__(self, numbers: np.ndarray) -> int | None:
        grades = numbers[~np.isnan(numbers)]
        # If all grades are equal, the first chunk would always win although the judge has no preference.
        if not len(grades) or (len(grades) > 1 and grades.min() == grades.max()):
            return None
        return int(np.nanargmax(numbers))


@dataclass(frozen=True, repr=False)
class FirstAbove(Estimator):
    """See `first_above`."""

    threshold: float
    failure = "no relevant chunk"

    def __repr__(self) -> str:
        return f"first_above({self.threshold:g})"

    def __call__(self, numbers: np.ndarray) -> int | None:
        """See the base class."""
        above = np.flatnonzero(numbers > self.threshold)
        return int(above[0]) if len(above) else None

    def decides(self, number: float) -> bool:
        """See the base class."""
        return number > self.threshold


best_chunk: Estimator = _BestChunk()
"""Chooses the chunk with the highest grade, the first one in case of ties; none if all chunks have the same grade.

It needs no threshold, works with grades on any scale and has no positional bias. It estimates the position of the most
relevant text, which is the first relevant text if only one passage is relevant. All chunks are judged.
"""


def first_above(threshold: float) -> FirstAbove:
    """Return an estimator that chooses the first chunk with a grade above a threshold, if there is one.

    `first_above(0)` is the protocol of Boytsov et al. 2025 for a language model with grades from 0 to 3, such as
    `RelevanceJudge`: every positive grade is relevant, and chunks after the first relevant one are not judged. For the
    scores of rerankers, 0 has no such meaning, and among many chunks a false positive often precedes the relevant one.
    Use `calibrated_on_positions` or `calibrated_on_nonrelevant` to choose a threshold for them.
    """
    return FirstAbove(float(threshold))


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """The chunks of a document and their grades.

    Attributes:
        length: the length in tokens; None if the document is not in the corpus.
        chunks: the token span and character span of each chunk.
        limit: the maximum number of chunks to judge, from the first.
        numbers: the grades of the J judged chunks, `(J,)`; NaN if a reply was unreadable.
        reason: why there is nothing to judge; otherwise empty.
    """

    length: int | None
    chunks: Sequence[tuple[Span, Span]]
    limit: int
    numbers: np.ndarray
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether all chunks up to the limit were judged."""
        return len(self.numbers) == self.limit

    def position(self, estimator: Estimator) -> dict[str, Any]:
        """Return the row of this document in the frame of `RelevantPositions`."""
        if self.reason:
            return {"length": self.length, "reason": self.reason}
        chunk = estimator(self.numbers)
        final = chunk is not None and estimator.decides(self.numbers[chunk])
        if not (final or self.complete):
            raise ValueError(f"some chunks were not judged: call relevant_positions with estimator={estimator!r}")
        row: dict[str, Any] = {
            "length": self.length,
            "chunks": len(self.chunks),
            "judged": len(self.numbers),
            "unjudged": int(np.isnan(self.numbers).sum()),
            "unread": 0 if final else self.chunks[-1][0][1] - self.chunks[self.limit - 1][0][1],
        }
        if chunk is None:
            reason = "no readable grade" if np.isnan(self.numbers).all() else estimator.failure
            return {**row, "reason": reason + (" among those judged" if row["unread"] else "")}
        (first_token, end_token), (start, end) = self.chunks[chunk]
        place = {"first_token": first_token, "end_token": end_token, "start": start, "end": end}
        return {**row, **place, "chunk": chunk, "grade": float(self.numbers[chunk])}

    def first_token(self, estimator: Estimator) -> float:
        """Return the first token of the chosen chunk; NaN if there is none."""
        chunk = estimator(self.numbers)
        return float("nan") if chunk is None else float(self.chunks[chunk][0][0])
