"""Warnings that point to the user's line and are shown once per transformer.

Python's own filter is not enough, because it is reset whenever pandas enters `warnings.catch_warnings`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pandas as pd

from .coverage import Coverage
from .frames import (
    Document,
    EmptyTextWarning,
    Question,
    SeenQueriesWarning,
    TruncationWarning,
    digest_of_query,
    field_names,
    is_from_terrier,
)
from .language import counted

_QUERY_LANGUAGE = re.compile(r"^\s*applypipeline:|#combine:|#uw\d*\(")
"""Syntax written by query expansion and `SDM`, but not by users."""

_SHORTEST_CUT = 500
"""In characters; shorter texts can have equal lengths by chance."""

_NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""Prefixes of modules that are not user code."""


_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
"""The warnings about empty rows in the parts of the current call."""


@contextmanager
def as_one_call() -> Iterator[None]:
    """Warn about empty rows once, although a call transforms its rows in several parts."""
    token = _SAID.set(set())
    try:
        yield
    finally:
        _SAID.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning for the user's line that called this package, directly or through PyTerrier."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_once(owner: Any, message: str, category: type[Warning]) -> None:
    """Issue a warning unless the owner has issued it before; the message must not contain counts."""
    if message not in owner.warned:
        owner.warned.add(message)
        warn(message, category)


def warn_of_queries(transformer: Any, queries: Sequence[str]) -> None:
    """Warn about queries in Terrier's query language."""
    language = next(filter(None, map(_QUERY_LANGUAGE.search, set(queries))), None)
    if language:
        cure = "put pt.rewrite.reset() after the query expansion to restore the original queries"
        message = f"reads Terrier's query syntax ({language[0].strip()!r}) as plain words: {cure}."
        warn_once(transformer, f"{type(transformer).__name__} {message}", UserWarning)


def warn_of_texts(transformer: Any, frame: pd.DataFrame, texts: Sequence[Document]) -> None:
    """Warn about texts truncated by an index and documents with several texts."""
    name = type(transformer).__name__
    lengths = [len(text.text) for text in set(texts)]
    longest = max(lengths, default=0)
    if longest >= _SHORTEST_CUT and sum(length >= longest - 2 for length in lengths) >= 3:
        is_terriers = "docid" in frame.columns or is_from_terrier(transformer.text_loader)
        has_passages = frame["docno"].astype(str).str.contains("%p", regex=False, na=False).any()
        if is_terriers and not has_passages:  # passages can have equal lengths
            cure = "index with a larger `meta` length, or load them from the dataset"
            message = f"{name}: several texts end at character {longest:,}, probably truncated by the index; {cure}"
            warn_once(transformer, f"{message}. Ignore this if you truncated them.", TruncationWarning)
    text_of: dict[tuple[Any, Any], Document] = {}
    for qid, docno, text in zip(frame["qid"], frame["docno"], texts, strict=True):
        if text_of.setdefault((qid, docno), text) != text:
            problem = f"the document {str(docno)!r} has several rows with different texts for the query {str(qid)!r}"
            cure = "measures count it once: give each row its own docno, as ld.Passages does, or keep one"
            warn_once(transformer, f"{name}: {problem}; {cure}.", UserWarning)
            break


def warn_of_seen_queries(transformer: Any, trained: frozenset[str], queries: Sequence[Question]) -> None:
    """Warn once about queries that are among the training queries, given by their digests."""
    if SeenQueriesWarning.__name__ in transformer.warned:
        return
    seen = len(trained.intersection(map(digest_of_query, set(queries))))
    if seen:
        transformer.warned.add(SeenQueriesWarning.__name__)  # not the message, whose number differs between calls
        of_call = counted(len({query.text for query in queries}), "query", "queries")
        what = f"{type(transformer).__name__} was trained on {seen} of the {of_call} of this call"
        warn(f"{what}: evaluate it on others.", SeenQueriesWarning)


def warn_of_coverage(transformer: Any, coverage: Coverage, task: str = "") -> None:
    """Warn about arguments that truncated text (except those that select windows) and rows without text or query."""
    name, columns = type(transformer).__name__ + task, ", ".join(map(repr, field_names(transformer.text_field)))
    for cause in coverage.lost:
        message = f"{name} did not read all text: some was truncated by {cause} (see .coverage)."
        warn_once(transformer, message, TruncationWarning)
    seen = getattr(getattr(transformer, "trained_on", None), "longest_input", 0)
    if not task and coverage.longest_input > 2 * seen > 0:
        message = f"{name} reads inputs more than twice as long as any in its training ({seen} tokens)"
        warn_once(transformer, f"{message}: compare shorter windows.", UserWarning)
    said = _SAID.get()
    for what, rows, cure in (
        (f"text (in {columns})", coverage.rows_without_text, "drop them, or use a text loader that finds their texts"),
        ("query (in 'query')", coverage.rows_without_query, "drop them, or add their queries"),
    ):
        subject = f"{name}: no {what}"
        if rows and (said is None or subject not in said):
            message = f"{name}: {rows} of {coverage.rows} rows have no {what}, and their scores mean nothing"
            warn(f"{message}: {cure}.", EmptyTextWarning)
            if said is not None:
                said.add(subject)
