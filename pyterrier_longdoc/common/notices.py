"""Warnings that name the user's line, once for a transformer, or for a system with all its runs, batches and copies."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pandas as pd

from .coverage import Coverage
from .frames import EmptyTextWarning, TruncationWarning, blank_rows, field_names

NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""What the names of modules begin with that stand between the user's line and the place where something is noticed."""

Told = set[tuple[Any, ...]]
"""What somebody was warned of."""


class _System(NamedTuple):
    name: str | None
    told: Told


_SYSTEM: ContextVar[_System | None] = ContextVar("system", default=None)
"""The system that is run."""

Empties = dict[tuple[str, str], Coverage]
"""Who has read rows without text or query, and in which columns; and all that was read."""

_EMPTIES: ContextVar[Empties | None] = ContextVar("empties", default=None)
"""Where they are added up, if they are not told at once."""

_HEARD: ContextVar[bool] = ContextVar("heard", default=True)
"""Whether somebody is to be warned."""


@contextmanager
def one_system(name: str | None, told: Told) -> Iterator[None]:
    """Whatever transformers run in here are one system; within another system nothing changes.

    Args:
        name: of the system; None where its transformers name themselves.
        told: of what was warned before; grows.
    """
    token = _SYSTEM.set(_SYSTEM.get() or _System(name, told))
    try:
        yield
    finally:
        _SYSTEM.reset(token)


@contextmanager
def unheard() -> Iterator[None]:
    """What would be told in here is left to be told by a later run."""
    token = _HEARD.set(False)
    try:
        yield
    finally:
        _HEARD.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package and PyTerrier that led here, whether by a pipeline or an experiment."""
    if not _HEARD.get():
        return
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def is_news(told: Told, *notice: Any) -> bool:
    """Whether neither a transformer nor the system that is run has warned of something; from now on both have.

    Args:
        told: of what the transformer has warned.
        notice: of what it would warn.
    """
    if not _HEARD.get():
        return False
    system = _SYSTEM.get()
    known = [told] if system is None else [told, system.told]
    news = not any(notice in each for each in known)
    for each in known:
        each.add(notice)
    return news


def warn_of_cuts(transformer: Any, told: Told, causes: Iterable[str], what: str) -> None:
    """Warns in a system's name of text that was not read, once for each of the arguments that cut it.

    Args:
        transformer: what has cut it.
        told: of what it has warned.
        causes: the arguments.
        what: says how much was not read.
    """
    name, who = _named(transformer)
    news = [is_news(told, TruncationWarning, name, cause) for cause in causes]
    if any(news):
        warn(f"{who}{what} (see .coverage).", TruncationWarning)


def _named(transformer: Any) -> tuple[str | None, str]:
    """The name of the system that is run, and how a warning begins."""
    system = _SYSTEM.get()
    name = None if system is None else system.name
    return name, repr(transformer) if name is None else f"{name!r}: {transformer!r}"


def count_empty(coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool]) -> None:
    """Counts rows, and those without text or query.

    Args:
        coverage: takes the counts.
        frame: R rows.
        no_text: whether each has none.
    """
    no_query = blank_rows(frame, ["query"])
    coverage.rows += len(frame)
    coverage.rows_without_text += sum(map(int, no_text))
    coverage.rows_without_query += int(no_query.sum())
    coverage.queries_empty += frame["qid"][no_query].nunique()


def warn_of_empty(
    transformer: Any, coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool], task: str = ""
) -> None:
    """Counts, and warns in a system's name: once for each call, for a system, or for what is `told_together`.

    Args:
        transformer: what has read the rows.
        coverage: see `count_empty`.
        frame: see `count_empty`.
        no_text: see `count_empty`.
        task: what the rows were used for, where that is not plain.
    """
    count_empty(coverage, frame, no_text)
    if _EMPTIES.get() is not None or coverage.empties(""):
        names = field_names(transformer.text_field)
        columns = f"{'columns' if names[1:] else 'column'} {', '.join(map(repr, names))}"
        tell_of_empties({(_named(transformer)[1] + task, columns): coverage})


def tell_of_empties(found: Mapping[tuple[str, str], Coverage]) -> None:
    """As `warn_of_empty`, of what was added up elsewhere."""
    together = _EMPTIES.get()
    for (who, columns), coverage in found.items():
        if together is not None:
            together[who, columns] = Coverage.total([together.get((who, columns), Coverage()), coverage])
        elif (said := coverage.empties(columns)) and is_news(set(), EmptyTextWarning):
            what_to_do = "they count like all others (see .coverage): supply what is missing, or leave them out"
            warn(f"{who}: {said}; {what_to_do}.", EmptyTextWarning)


@contextmanager
def added_up() -> Iterator[Empties]:
    """Rows without text or query are not told of in here, but added up."""
    found: Empties = {}
    token = _EMPTIES.set(found)
    try:
        yield found
    finally:
        _EMPTIES.reset(token)


@contextmanager
def told_together(whole: Any = None) -> Iterator[Empties]:
    """All calls in here are one: of rows without text or query is told at the end.

    Args:
        whole: in whose name, where models share out rows between them; None where each has a name of its own.
    """
    found: Empties = {}
    try:
        with added_up() as found:
            yield found
    finally:
        of_whole: Empties = {}
        for (who, columns), coverage in found.items():
            notice = who if whole is None else _named(whole)[1], columns
            of_whole[notice] = Coverage.total([of_whole.get(notice, Coverage()), coverage])
        tell_of_empties(of_whole)
