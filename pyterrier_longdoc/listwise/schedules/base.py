"""Base class of schedules, which select the documents of each prompt and combine the answers to a ranking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar

from ...common.arguments import validate
from ...common.citations import Cited

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

    best_only: ClassVar[bool] = False
    """Whether only the first document of an answer counts, so that naming it is a whole answer."""

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
