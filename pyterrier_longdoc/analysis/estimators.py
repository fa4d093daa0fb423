"""Which of the chunks that a judge has seen tells where a document's relevant text begins.

Of one judge's numbers different estimators make very different positions: figures in `tests/benchmarks/README.md`.
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

    nothing: str
    """The reason why a document has no position, if none of its chunks is chosen."""

    @abstractmethod
    def __call__(self, numbers: np.ndarray) -> int | None:
        """Return the number of the chosen chunk, from 0, or None; of `(C,)` numbers, NaN where none was readable."""

    def decides(self, number: float) -> bool:
        """Return whether a chunk with this number is chosen whatever comes after it, so that no more is judged."""
        return False


class _BestChunk(Estimator):
    nothing = "no chunk better than the others"

    def __repr__(self) -> str:
        return "best_chunk"

    def __call__(self, numbers: np.ndarray) -> int | None:
        known = numbers[~np.isnan(numbers)]
        # The first of chunks that are all equal would be the start of every document that the judge cannot make out.
        if not len(known) or (len(known) > 1 and known.min() == known.max()):
            return None
        return int(np.nanargmax(numbers))


@dataclass(frozen=True, repr=False)
class FirstAbove(Estimator):
    """See `first_above`."""

    threshold: float
    nothing = "no relevant chunk"

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

It needs no threshold, whatever the scale of the judge's numbers, and favours no place. It gives the position of a
document's most relevant text, which is that of its first relevant text where one passage is relevant. All chunks are
judged.
"""


def first_above(threshold: float) -> FirstAbove:
    """Return what chooses the first chunk with a number above a threshold; none if there is no such chunk.

    `first_above(0)` is the protocol of Boytsov et al. 2025 for a language model with grades from 0 to 3 such as
    `RelevanceJudge`: every positive grade is relevant, and no chunk after the first relevant one is asked about. Scores
    of rerankers have no such zero, and among many chunks one that is above by mistake comes before the relevant one
    more often than not: take a threshold from `calibrated_on_positions` or `calibrated_on_nonrelevant`.
    """
    return FirstAbove(float(threshold))


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """The chunks of a document and what a judge says of them.

    Attributes:
        length: in tokens; None of one that is not in the corpus.
        chunks: all of them, each by its tokens and by its characters.
        shown: how many of them, from the first on, the judge was allowed to see.
        numbers: `(J,)` what it says of those that it was asked about; NaN without a readable grade.
        reason: why there is nothing to judge, if so.
    """

    length: int | None
    chunks: Sequence[tuple[Span, Span]]
    shown: int
    numbers: np.ndarray
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether the judge was asked about all chunks that it was allowed to see."""
        return len(self.numbers) == self.shown

    def position(self, estimator: Estimator) -> dict[str, Any]:
        """Return the row of this document in the frame of `RelevantPositions`."""
        if self.reason:
            return {"length": self.length, "reason": self.reason}
        chosen = estimator(self.numbers)
        decided = chosen is not None and estimator.decides(self.numbers[chosen])
        if not (decided or self.complete):
            raise ValueError(f"not all chunks were judged: call relevant_positions with estimator={estimator!r}")
        row: dict[str, Any] = {
            "length": self.length,
            "chunks": len(self.chunks),
            "judged": len(self.numbers),
            "unjudged": int(np.isnan(self.numbers).sum()),
            "unread": 0 if decided else self._unread,
        }
        if chosen is None:
            ungraded = np.isnan(self.numbers).all()
            reason = "no readable grade" if ungraded else estimator.nothing
            return {**row, "reason": reason + (" among those judged" if row["unread"] else "")}
        (first_token, end_token), (start, end) = self.chunks[chosen]
        of_chunk = {"first_token": first_token, "end_token": end_token, "start": start, "end": end}
        return {**row, **of_chunk, "chunk": chosen, "grade": float(self.numbers[chosen])}

    @property
    def _unread(self) -> int:
        """Tokens after the last chunk that the judge was allowed to see."""
        return self.chunks[-1][0][1] - self.chunks[self.shown - 1][0][1]

    def first_token(self, estimator: Estimator) -> float:
        """Return the token at which the chosen chunk begins; NaN if there is none."""
        chosen = estimator(self.numbers)
        return float("nan") if chosen is None else float(self.chunks[chosen][0][0])


def share_above(documents: Sequence[JudgedDocument], threshold: float) -> float:
    """Return the share of chunks above a threshold, in documents of several; NaN if not all of them were judged."""
    judged = [document for document in documents if document.shown > 1]
    if not judged or not all(document.complete for document in judged):
        return float("nan")
    return float((np.concatenate([document.numbers for document in judged]) > threshold).mean())


def threshold_effect(documents: Sequence[JudgedDocument], threshold: float) -> np.ndarray | None:
    """Return `(3,)` median positions with a somewhat lower threshold, with this one, and with a somewhat higher one.

    It moves by `SHIFT`, down from the next number above it and up from the next one below, so that it stays between
    the same two of a few grades. Documents without a position under one of the three do not count; None if there is
    none, or the judge did not see all chunks.
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
    three = (above - shift, threshold, below + shift if np.isfinite(below) else threshold)
    firsts = np.array([[document.first_token(FirstAbove(t)) for t in three] for document in judged])
    firsts = firsts[~np.isnan(firsts).any(axis=1)]
    return np.median(firsts, axis=0) if len(firsts) else None
