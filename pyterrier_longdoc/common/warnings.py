"""Warnings that name the user's line, once for an object and cause, or for a system with all its runs and copies."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from .coverage import Coverage
from .frames import EmptyTextWarning, Text, TruncationWarning, as_document, field_names, is_blank, strings
from .indices import is_from_terrier

SeenWarnings = set[tuple[Any, ...]]
"""The causes that an object has warned of."""

Empties = dict[tuple[str, str], Coverage]
"""Coverage of transformers that met rows without text or query, by name and text columns."""

_QUERY_LANGUAGE = re.compile(r"^\s*applypipeline:|#combine:|#uw\d*\(")
"""What query expansions and `SDM` write, and no user."""

_SHORTEST_CUT = 500
"""Characters: shorter texts may well be of equal length."""

_NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""Beginnings of the names of modules between the user's line and the warning."""


@dataclass(frozen=True)
class _Run:
    """The running system: its name, warnings given so far, empty rows counted so far, whether it is muted."""

    system: str | None = None
    record: SeenWarnings | None = None
    empties: Empties | None = None
    muted: bool = False


_NOTHING = _Run()
_RUN: ContextVar[_Run] = ContextVar("run", default=_NOTHING)


@contextmanager
def _within(**changes: Any) -> Iterator[None]:
    token = _RUN.set(replace(_RUN.get(), **changes))
    try:
        yield
    finally:
        _RUN.reset(token)


def one_system(name: str | None, record: SeenWarnings) -> AbstractContextManager[None]:
    """Make one system of all transformers that run within, unless they are part of another one.

    Without a name its transformers name themselves; `record` has earlier warnings.
    """
    return _within(system=name, record=record) if _RUN.get().record is None else nullcontext()


def muted() -> AbstractContextManager[None]:
    """Leave all warnings to a later run."""
    return _within(muted=True)


@contextmanager
def added_up() -> Iterator[Empties]:
    """Add up rows without text or query instead of a warning."""
    empties: Empties = {}
    with _within(empties=empties):
        yield empties


@contextmanager
def empties_at_end(owner: Any = None) -> Iterator[Empties]:
    """Warn of rows without text or query once, at the end, in the name of `owner` if there is one."""
    empties: Empties = {}
    try:
        with added_up() as empties:
            yield empties
    finally:
        sums: Empties = {}
        for (name, columns), coverage in empties.items():
            key = name if owner is None else _name(owner), columns
            sums[key] = Coverage.total([sums.get(key, Coverage()), coverage])
        warn_once_of_empty(sums)


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package and PyTerrier that led here, whether by a pipeline or an experiment."""
    if _RUN.get().muted:
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def first_time(record: SeenWarnings, *cause: Any) -> bool:
    """Return whether this is the first warning of this cause, by the object and its system; record it for both."""
    run = _RUN.get()
    if run.muted:
        return False
    records = [record] if run.record is None else [record, run.record]
    is_new = cause not in set().union(*records)
    for causes in records:
        causes.add(cause)
    return is_new


def warn_of_cuts(transformer: Any, record: SeenWarnings, causes: Iterable[str], sentence: str) -> None:
    """Warn that a transformer has not read all text, once for each argument that cut it."""
    system = _RUN.get().system
    new_causes = [cause for cause in causes if first_time(record, TruncationWarning, system, cause)]
    if new_causes:
        warn(f"{_name(transformer)}{sentence} (see .coverage).", TruncationWarning)


def warn_of_inputs(transformer: Any, frame: pd.DataFrame, texts: Sequence[Text]) -> None:
    """Warn of queries that are no words, and of texts that an index has cut, once each for a model."""
    name = type(transformer).__name__
    queries = set(strings(frame["query"], "query")) if "query" in frame.columns else ()
    language = next(filter(None, map(_QUERY_LANGUAGE.search, queries)), None)
    if language and first_time(transformer.warned, "query language", name):
        cure = "put pt.rewrite.reset() after the query expansion, which gives the user's queries back"
        warn(
            f"{_name(transformer)} reads Terrier's query language ({language[0].strip()!r}) as words: {cure}.",
            UserWarning,
        )
    lengths = [len(as_document(text).text) for text in set(texts)] if _may_be_cut(transformer, frame) else []
    longest = max(lengths, default=0)
    ends = sum(length >= longest - 2 for length in lengths)
    if ends >= 3 and longest >= _SHORTEST_CUT and first_time(transformer.warned, "texts cut by an index", name):
        cure = "index with a larger `meta` length, or load them from the dataset"
        message = f"{_name(transformer)}: {ends} of {len(lengths)} texts end at character {longest:,}; {cure}"
        warn(f"{message}. If you cut them yourself, nothing is wrong.", TruncationWarning)


def _may_be_cut(transformer: Any, frame: pd.DataFrame) -> bool:
    """Return whether whole documents come from an index of Terrier; passages may well be of equal length."""
    is_terriers = "docid" in frame.columns or is_from_terrier(transformer.text_loader)
    return is_terriers and not frame["docno"].astype(str).str.contains("%p", regex=False, na=False).any()


def count_empty(coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool]) -> None:
    """Count the rows of a frame, those that have no text, and those without a query."""
    no_query = np.array(list(map(is_blank, strings(frame["query"], "query"))), dtype=bool)
    coverage.rows += len(frame)
    coverage.rows_without_text += sum(map(int, no_text))
    coverage.rows_without_query += int(no_query.sum())
    coverage.queries_empty += frame["qid"][no_query].nunique()


def warn_of_empty(
    transformer: Any, coverage: Coverage, frame: pd.DataFrame, no_text: Iterable[bool], task: str = ""
) -> None:
    """Count rows without text or query, and warn of them: once for each call, system, or `empties_at_end`."""
    count_empty(coverage, frame, no_text)
    if _RUN.get().empties is None and not coverage.empties(""):
        return
    names = field_names(transformer.text_field)
    columns = f"{'columns' if names[1:] else 'column'} {', '.join(map(repr, names))}"
    name, system = type(transformer).__name__, _RUN.get().system
    speaker = name if system is None else f"{system!r}: {name}"
    warn_once_of_empty({(speaker + task, columns): coverage})


def warn_once_of_empty(empties: Mapping[tuple[str, str], Coverage]) -> None:
    """Warn of counts of rows without text or query, or add them to an open sum."""
    total = _RUN.get().empties
    for (speaker, columns), coverage in empties.items():
        if total is not None:
            total[speaker, columns] = Coverage.total([total.get((speaker, columns), Coverage()), coverage])
        elif (sentence := coverage.empties(columns)) and first_time(set(), EmptyTextWarning):
            advice = "they are scored like all others (see .coverage): supply what is missing, or leave them out"
            warn(f"{speaker}: {sentence}; {advice}.", EmptyTextWarning)


def _name(transformer: Any) -> str:
    system = _RUN.get().system
    return repr(transformer) if system is None else f"{system!r}: {transformer!r}"
