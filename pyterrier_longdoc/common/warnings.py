"""Warnings that name the user's line, once for an object and cause, or for a system with all its runs and copies."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from .coverage import Coverage
from .frames import EmptyTextWarning, TruncationWarning, field_names, strings

SeenWarnings = set[tuple[Any, ...]]
"""What an object has warned of."""

Empties = dict[tuple[str, str], Coverage]
"""What was read by those who met rows without text or query, by how they are called and their text columns."""

_NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""Beginnings of the names of modules between the user's line and the place that warns."""


@dataclass(frozen=True)
class _Whole:
    """What is run as one, and warns once: a system with its name, what adds up rows without text, what is muted."""

    system: str | None = None
    seen: SeenWarnings | None = None
    empties: Empties | None = None
    muted: bool = False


_NOTHING = _Whole()
_WHOLE: ContextVar[_Whole] = ContextVar("whole", default=_NOTHING)


@contextmanager
def _within(**changes: Any) -> Iterator[None]:
    token = _WHOLE.set(replace(_WHOLE.get(), **changes))
    try:
        yield
    finally:
        _WHOLE.reset(token)


def one_system(name: str | None, seen: SeenWarnings) -> AbstractContextManager[None]:
    """Make one system of all transformers that run in here, unless they are part of another one.

    Without a name its transformers name themselves; `seen` is what was warned of before.
    """
    return _within(system=name, seen=seen) if _WHOLE.get().seen is None else nullcontext()


def muted() -> AbstractContextManager[None]:
    """Leave all warnings to a later run."""
    return _within(muted=True)


@contextmanager
def added_up() -> Iterator[Empties]:
    """Add up rows without text or query, and do not warn of them."""
    found: Empties = {}
    with _within(empties=found):
        yield found


@contextmanager
def told_together(owner: Any = None) -> Iterator[Empties]:
    """Warn of rows without text or query once, at the end, in the name of `owner` if there is one."""
    found: Empties = {}
    try:
        with added_up() as found:
            yield found
    finally:
        sums: Empties = {}
        for (who, columns), coverage in found.items():
            key = who if owner is None else _name(owner), columns
            sums[key] = Coverage.total([sums.get(key, Coverage()), coverage])
        tell_of_empties(sums)


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package and PyTerrier that led here, whether by a pipeline or an experiment."""
    if _WHOLE.get().muted:
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def first_time(seen: SeenWarnings, *cause: Any) -> bool:
    """Return whether neither an object nor the system that runs has warned of something; from now on both have."""
    whole = _WHOLE.get()
    if whole.muted:
        return False
    known = [seen] if whole.seen is None else [seen, whole.seen]
    first = cause not in set().union(*known)
    for each in known:
        each.add(cause)
    return first


def warn_of_cuts(transformer: Any, seen: SeenWarnings, causes: Iterable[str], what: str) -> None:
    """Warn that a transformer has not read some text, once for each of the arguments that cut it."""
    system = _WHOLE.get().system
    new = [cause for cause in causes if first_time(seen, TruncationWarning, system, cause)]
    if new:
        warn(f"{_name(transformer)}{what} (see .coverage).", TruncationWarning)


def count_empty(coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool]) -> None:
    """Count the rows of a frame, those that have no text, and those without a query."""
    no_query = [not query.strip() for query in strings(frame["query"], "query")]
    coverage.rows += len(frame)
    coverage.rows_without_text += sum(map(int, no_text))
    coverage.rows_without_query += sum(no_query)
    coverage.queries_empty += frame["qid"][no_query].nunique()


def warn_of_empty(
    transformer: Any, coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool], task: str = ""
) -> None:
    """Count rows without text or query, and warn of them: once for each call, system, or `told_together`."""
    count_empty(coverage, frame, no_text)
    if _WHOLE.get().empties is None and not coverage.empties(""):
        return
    names = field_names(transformer.text_field)
    columns = f"{'columns' if names[1:] else 'column'} {', '.join(map(repr, names))}"
    name, system = type(transformer).__name__, _WHOLE.get().system
    who = name if system is None else f"{system!r}: {name}"
    tell_of_empties({(who + task, columns): coverage})


def tell_of_empties(found: Mapping[tuple[str, str], Coverage]) -> None:
    """Warn of rows without text or query that were added up, or add them to those of the whole."""
    together = _WHOLE.get().empties
    for (who, columns), coverage in found.items():
        if together is not None:
            together[who, columns] = Coverage.total([together.get((who, columns), Coverage()), coverage])
        elif (said := coverage.empties(columns)) and first_time(set(), EmptyTextWarning):
            what_to_do = "they count like all others (see .coverage): supply what is missing, or leave them out"
            warn(f"{who}: {said}; {what_to_do}.", EmptyTextWarning)


def _name(transformer: Any) -> str:
    system = _WHOLE.get().system
    return repr(transformer) if system is None else f"{system!r}: {transformer!r}"
