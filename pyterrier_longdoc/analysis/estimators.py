"""Estimators of where a document's relevant text begins, by a judge's numbers for its chunks.

Estimators differ widely on the same judge's numbers: figures in `tests/benchmarks/README.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..modelling.tokens import Span

SHIFT = 0.5
"""A moderate shift of a threshold, in standard deviations of the numbers of all chunks."""


class Estimator(ABC):
    """Chooses the chunk in which the relevant text begins; use `best_chunk` or `first_above(threshold)`."""

    failure: str
    """The reason why a document has no position if no chunk is chosen."""

    @abstractmethod
    def __call__(self, numbers: np.ndarray) -> int | None:
        """Return the chosen chunk's index, or None; `numbers` are `(C,)`, NaN without a readable grade."""

    def decides(self, number: float) -> bool:
        """Return whether a chunk with this number is chosen whatever follows, so that judging can stop."""
        return False


class _BestChunk(Estimator):
    failure = "no chunk better than the others"

    def __repr__(self) -> str:
        return "best_chunk"

    def __call__(self, numbers: np.ndarray) -> int | None:
        grades = numbers[~np.isnan(numbers)]
        # If all chunks are equal, the judge cannot tell, and the first one would always be the document's start.
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
"""The chunk that the judge likes best, the first of several; none if it likes all chunks the same.

It needs no threshold, works on any scale of numbers, and favours no place. It gives the position of a document's most
relevant text. If one passage is relevant, that is also the position of its first relevant text. All chunks are judged.
"""


def first_above(threshold: float) -> FirstAbove:
    """Return the estimator that chooses the first chunk with a number above a threshold, if there is one.

    `first_above(0)` is the protocol of Boytsov et al. 2025 for a language model with grades from 0 to 3 such as
    `RelevanceJudge`: every positive grade is relevant, and no chunk after the first relevant one is asked about. Scores
    of rerankers have no such zero, and among many chunks one above it by mistake mostly comes before the relevant one:
    take a threshold from `calibrated_on_positions` or `calibrated_on_nonrelevant`.
    """
    return FirstAbove(float(threshold))


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """The chunks of a document and a judge's numbers for them.

    Attributes:
        length: in tokens; None if the document is not in the corpus.
        chunks: all of them, each by its tokens and by its characters.
        limit: number of chunks, from the first on, that the judge may see.
        numbers: `(J,)` the judge's numbers for the chunks that it was asked about; NaN without a readable grade.
        reason: why there is nothing to judge; else empty.
    """

    length: int | None
    chunks: Sequence[tuple[Span, Span]]
    limit: int
    numbers: np.ndarray
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether the judge was asked about all chunks that it may see."""
        return len(self.numbers) == self.limit

    def position(self, estimator: Estimator) -> dict[str, Any]:
        """Return the row of this document in the frame of `RelevantPositions`."""
        if self.reason:
            return {"length": self.length, "reason": self.reason}
        chunk = estimator(self.numbers)
        final = chunk is not None and estimator.decides(self.numbers[chunk])
        if not (final or self.complete):
            raise ValueError(f"not all chunks were judged: call relevant_positions with estimator={estimator!r}")
        row: dict[str, Any] = {
            "length": self.length,
            "chunks": len(self.chunks),
            "judged": len(self.numbers),
            "unjudged": int(np.isnan(self.numbers).sum()),
            "unread": 0 if final else self._unread,
        }
        if chunk is None:
            reason = "no readable grade" if np.isnan(self.numbers).all() else estimator.failure
            return {**row, "reason": reason + (" among those judged" if row["unread"] else "")}
        (first_token, end_token), (start, end) = self.chunks[chunk]
        place = {"first_token": first_token, "end_token": end_token, "start": start, "end": end}
        return {**row, **place, "chunk": chunk, "grade": float(self.numbers[chunk])}

    @property
    def _unread(self) -> int:
        """Tokens after the last chunk that the judge may see."""
        return self.chunks[-1][0][1] - self.chunks[self.limit - 1][0][1]

    def first_token(self, estimator: Estimator) -> float:
        """Return the token at which the chosen chunk begins; NaN if there is none."""
        chunk = estimator(self.numbers)
        return float("nan") if chunk is None else float(self.chunks[chunk][0][0])


def share_above(documents: Sequence[JudgedDocument], threshold: float) -> float:
    """Return the share of chunks above a threshold, in documents with several; NaN unless all were judged."""
    judged = [document for document in documents if document.limit > 1]
    if not judged or not all(document.complete for document in judged):
        return float("nan")
    return float((np.concatenate([document.numbers for document in judged]) > threshold).mean())


def threshold_effect(documents: Sequence[JudgedDocument], threshold: float) -> np.ndarray | None:
    """Return `(3,)` median positions with a somewhat lower threshold, this one, and a somewhat higher one.

    It moves by `SHIFT`, down from the next number above it and up from the next one below, so that it stays between
    the same two of a few grades. Only documents with a position under all three count; None if there is no such
    document, or if the judge did not see all chunks.
    """
    judged = [document for document in documents if not document.reason]
    if not judged or not all(document.complete for document in judged):
        return None
    numbers = np.concatenate([document.numbers for document in judged])
    numbers = numbers[~np.isnan(numbers)]
    below = numbers[numbers <= threshold].max(initial=-np.inf)
    above = numbers[numbers > threshold].min(initial=np.inf)
    if np.isinf(above):
        return None
    shift = SHIFT * np.std(numbers)
    thresholds = (above - shift, threshold, below + shift if np.isfinite(below) else threshold)
    firsts = np.array([[document.first_token(FirstAbove(t)) for t in thresholds] for document in judged])
    firsts = firsts[~np.isnan(firsts).any(axis=1)]
    return np.median(firsts, axis=0) if len(firsts) else None
