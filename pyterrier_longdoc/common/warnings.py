"""Warnings that name the user's line; a transformer gives each of its warnings once.

Python's filter does not see to that: whenever pandas enters `warnings.catch_warnings`, it forgets what it has shown.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .coverage import Coverage
from .frames import EmptyTextWarning, Text, TruncationWarning, as_document, field_names, is_blank, strings
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


def warn_of_cuts(transformer: Any, causes: Iterable[str], task: str = "") -> None:
    """Warn of each argument that cut text."""
    name = type(transformer).__name__ + task
    for cause in causes:
        message = f"{name} did not read all text: some is cut by {cause} (see .coverage)."
        warn_once(transformer, message, TruncationWarning)


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
    """Count rows without text or query, and warn of them."""
    count_empty(coverage, frame, no_text)
    columns = ", ".join(map(repr, field_names(transformer.text_field)))
    missing = {f"text (in {columns})": coverage.rows_without_text, "query (in 'query')": coverage.rows_without_query}
    for what, rows in missing.items():
        if rows:
            advice = "they are scored like all others (see .coverage): supply it, or leave them out"
            message = f"{type(transformer).__name__}{task}: some rows have no {what}; {advice}."
            warn_once(transformer, message, EmptyTextWarning)
