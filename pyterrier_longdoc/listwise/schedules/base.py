"""What a schedule is: which documents meet in which prompt, and how the answers become a ranking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from ...common.arguments import validate
from ...common.citations import Cited

PromptGroup = list[int]
"""Documents that meet in one prompt, in the order in which they are shown."""

Answer = list[int] | None
"""The documents of a group, best first; None where no answer could be read."""

Rounds = Generator[list[PromptGroup], list[Answer], list[int]]
"""Yields groups that do not depend on each other, is sent an answer for each, and returns documents, best first."""


class Schedule(Cited, ABC):
    """Which documents meet in which prompt, and how the answers become a ranking.

    Knows neither texts nor models: documents are numbers, in the order of the first stage. A new schedule is a frozen
    dataclass with two methods.
    """

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def rank(self, n: int) -> Rounds:
        """Rank the documents 0..n-1 of one query, at least 2; return them, best first.

        Each `yield` is a round: a list of groups that may be asked about at the same time. It is answered by a list
        with the order of each group; an answer of None says nothing about the group, and nothing is made of it.
        Documents that are not returned follow in the order of the first stage.
        """

    @abstractmethod
    def estimate(self, n: int) -> int:
        """Return how many prompts `n` documents take, or at most take where the class says that answers decide."""
