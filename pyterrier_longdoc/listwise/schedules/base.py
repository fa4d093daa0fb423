"""Schedules: which documents meet in which prompt, and how the answers become a ranking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from ...common.arguments import validate
from ...common.citations import Cited

PromptGroup = list[int]
"""Documents of one prompt, in their order in it."""

Answer = list[int] | None
"""The documents of a group, best first; None without a readable answer."""

Rounds = Generator[list[PromptGroup], list[Answer], list[int]]
"""Yields independent groups, is sent an answer for each, and returns documents, best first."""


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

        Each `yield` is a round: a list of groups whose prompts may run at the same time. Its value is a list with the
        order of each group, None for a group without an answer. Documents that are not returned follow in the order of
        the first stage.
        """

    @abstractmethod
    def estimate(self, n: int) -> int:
        """Return the number of prompts for `n` documents, the largest where answers decide."""
