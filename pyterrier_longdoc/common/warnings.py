"""Warnings that name the user's line; a transformer gives each of its warnings once.

Python's filter does not see to that: whenever pandas enters `warnings.catch_warnings`, it forgets what it has shown.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .coverage import Coverage
from .frames import EmptyTextWarning, Text, TruncationWarning, as_document, field_names, strings
from .indices import is_from_terrier

_QUERY_LANGUAGE = re.compile(r"^\s*applypipeline:|#combine:|#uw\d*\(")
"""What query expansions and `SDM` write, and no user."""

_SHORTEST_CUT = 500
"""Characters: shorter texts may well be of equal length."""

_NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""Beginnings of the names of modules between the user's line and the warning."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package and PyTerrier that led here, whether by a pipeline or an experiment."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_once(owner: Any, message: str, category: type[Warning]) -> None:
    """Warn if the owner has not given this warning before; its text holds no counts."""
    if message not in owner.warned:
        owner.warned.add(message)
        warn(message, category)


def warn_of_inputs(transformer: Any, frame: pd.DataFrame, texts: Sequence[Text]) -> None:
    """Warn of queries that are no words, and of texts that an index has cut."""
    name = type(transformer).__name__
    queries = set(strings(frame["query"], "query")) if "query" in frame.columns else ()
    language = next(filter(None, map(_QUERY_LANGUAGE.search, queries)), None)
    if language:
        cure = "put pt.rewrite.reset() after the query expansion, which gives the user's queries back"
        message = f"{name} reads Terrier's query language ({language[0].strip()!r}) as words: {cure}."
        warn_once(transformer, message, UserWarning)
    lengths = [len(as_document(text).text) for text in set(texts)]
    longest = max(lengths, default=0)
    if longest >= _SHORTEST_CUT and sum(length >= longest - 2 for length in lengths) >= 3:
        is_terriers = "docid" in frame.columns or is_from_terrier(transformer.text_loader)
        has_passages = frame["docno"].astype(str).str.contains("%p", regex=False, na=False).any()
        if is_terriers and not has_passages:  # passages may well be of equal length
            cure = "index with a larger `meta` length, or load them from the dataset"
            message = f"{name}: several texts end at character {longest:,}; {cure}"
            warn_once(transformer, f"{message}. If you cut them yourself, nothing is wrong.", TruncationWarning)


def warn_of_coverage(transformer: Any, coverage: Coverage, task: str = "") -> None:
    """Warn of each argument that cut text, except those that choose windows, and of rows without text or query."""
    name, columns = type(transformer).__name__ + task, ", ".join(map(repr, field_names(transformer.text_field)))
    for cause in [*coverage.lost, *(["the server"] if coverage.windows_cut else [])]:
        message = f"{name} did not read all text: some is cut by {cause} (see .coverage)."
        warn_once(transformer, message, TruncationWarning)
    missing = {f"text (in {columns})": coverage.rows_without_text, "query (in 'query')": coverage.rows_without_query}
    for what in (what for what, rows in missing.items() if rows):
        advice = "they are scored like all others (see .coverage): supply it, or leave them out"
        warn_once(transformer, f"{name}: some rows have no {what}; {advice}.", EmptyTextWarning)
