"""How the documents of a FarRelevant collection are put together: their length, and where the relevant passage goes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

POSITIONS = ("early", "uniform", "far")

Length = str | int | Sequence[int] | Callable[[random.Random, int, int], int]
"""Distribution of document lengths: "uniform", a number, numbers to draw from, or `(rng, smallest, largest) -> int`."""


@dataclass(frozen=True)
class Recipe:
    """How a document is put together; the arguments of `far_relevant` of the same names."""

    position: str = "far"
    min_offset: int = 512
    within: int | None = None
    max_length: int = 1431
    length: Length = "uniform"
    extra_passage: bool = True
    separator: str = " "
    seed: int = 0

    def __post_init__(self) -> None:
        if self.position not in POSITIONS:
            raise ValueError(f"position={self.position!r} is unknown; choose one of {', '.join(POSITIONS)}")
        if self.min_offset < 0:
            raise ValueError(f"min_offset={self.min_offset} must be at least 0")
        if self.within is not None and self.within < 1:
            raise ValueError(f"within={self.within} must be at least 1")
        if self.max_length <= self.min_offset:
            raise ValueError(f"max_length={self.max_length} must be greater than min_offset={self.min_offset}")
        several = hasattr(self.length, "__len__") and not isinstance(self.length, str)
        one = isinstance(self.length, int | np.integer) or callable(self.length)
        if not (several or one or self.length == "uniform"):
            raise ValueError(f"length={self.length!r} is unknown; choose 'uniform', whole numbers, or a function")
        if several and not len(self.length):  # type: ignore[arg-type]
            raise ValueError("length=[] holds no length to draw from")
        if self.separator.strip() or not self.separator:
            raise ValueError(f"separator={self.separator!r} must be white space, to keep passages and tokens apart")

    @property
    def beginning(self) -> int:
        """Tokens of a document within which an early passage ends."""
        return self.min_offset if self.within is None else self.within

    def target(self, rng: random.Random, smallest: int) -> int:
        """Draws the length of a document, D_max in the paper's words.

        Args:
            rng: random numbers.
            smallest: `min_offset` and the relevant passage.

        Raises:
            ValueError: if there is no such length from `smallest` to `max_length`.
        """
        if smallest > self.max_length:
            raise ValueError(f"{smallest} tokens are needed, but max_length={self.max_length}; raise it")
        if isinstance(self.length, str):
            return between(rng, smallest, self.max_length)
        if callable(self.length):
            drawn = self.length(rng, smallest, self.max_length)
        elif isinstance(self.length, int | np.integer):
            drawn = int(self.length)
        else:
            fitting = [size for size in map(int, self.length) if smallest <= size <= self.max_length] or [-1]
            drawn = fitting[between(rng, 0, len(fitting) - 1)]
        if not smallest <= drawn <= self.max_length:
            raise ValueError(f"length={self.length!r} gives none from {smallest} to max_length={self.max_length}")
        return drawn

    def slots(self, before: np.ndarray, passage: int) -> tuple[int, int]:
        """The places among the filler where the relevant passage may stand.

        Args:
            before: `(n + 1,)`, tokens of the first 0, 1, ..., n filler passages.
            passage: tokens of the relevant passage.

        Returns:
            First and last place; i stands for after i filler passages.
        """
        last = len(before) - 1
        if self.position == "far":
            return int(np.searchsorted(before, self.min_offset)), last
        if self.position == "early":
            return 0, max(0, int(np.searchsorted(before, self.beginning - passage, side="right")) - 1)
        return 0, last


def between(rng: random.Random, first: int, last: int) -> int:
    """A random number from `first` to `last`, both included; the same for all versions of Python."""
    # random() is the one method whose numbers Python promises not to change.
    return first + int(rng.random() * (last - first + 1))


def pick(rng: random.Random, indices: np.ndarray) -> int:
    """One of the indices, at random."""
    return int(indices[between(rng, 0, len(indices) - 1)])
