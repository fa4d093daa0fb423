"""Helpers for file readers: errors that name the malformed row, frames, and documents on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.files import read_lines
from ..common.language import Counter
from .collection import Documents
from .passages import TextSpool

Rows = Iterable[tuple[str, dict[str, Any]]]
"""Rows of a file, each with its location."""


def check_field(valid: bool, where: str, field: str, rule: str, value: Any) -> None:
    """Raise ValueError for an invalid value, naming row and field."""
    if not valid:
        raise ValueError(f"{where}: field {field!r} must {rule}, got {str(value)[:80]!r}")


def put_once(values: dict[str, Any], name: str, value: Any, where: str) -> bool:
    """Store a value by name and return whether it is new; raise ValueError if the name has another value."""
    is_new = name not in values
    if values.setdefault(name, value) != value:
        raise ValueError(f"{where}: {name!r} must be unique, but occurs twice with different contents")
    return is_new


def unique_rows(rows: Rows, field: str) -> dict[str, dict[str, Any]]:
    """Return the rows by a field that must be unique; equal rows can be repeated."""
    unique: dict[str, dict[str, Any]] = {}
    for where, row in rows:
        put_once(unique, row[field], row, where)
    return unique


def judged_lines(file: Path) -> Iterator[tuple[str, str, int]]:
    """Read `qid, docno, label` from qrels in TREC's format."""
    for where, line in read_lines(file):
        try:
            qid, _, docno, label = line.split()
            row = qid, docno, int(label)
        except ValueError:
            raise ValueError(f"{where}: expected 'qid iteration docno label', got {line[:80]!r}") from None
        yield row


def topics_frame(rows: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Return topics as a frame for PyTerrier."""
    return pd.DataFrame(list(rows), columns=["qid", "query"], dtype=str)


def qrels_frame(rows: Iterable[tuple[str, str, int]]) -> pd.DataFrame:
    """Return judgements as a frame for PyTerrier."""
    return pd.DataFrame(list(rows), columns=["qid", "docno", "label"]).astype({"qid": str, "docno": str, "label": int})


class SpooledDocuments(Mapping[str, Mapping[str, str]]):
    """Documents on disk, docno -> `docno, text`, from (location, docno, text) rows; equal rows count once."""

    def __init__(self, rows: Iterable[tuple[str, str, str]]) -> None:
        digests: dict[str, int] = {}
        self._spool = TextSpool(
            (docno, text) for where, docno, text in rows if put_once(digests, docno, hash(text), where)
        )
        self._index_of = {docno: index for index, docno in enumerate(digests)}

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return {"docno": docno, "text": self._spool.text(self._index_of[docno])}

    def __iter__(self) -> Iterator[str]:
        return iter(self._index_of)

    def __len__(self) -> int:
        return len(self._index_of)


def recount(gold: Iterable[tuple[Any, ...]], documents: Documents, count: Counter) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `PositionedCollection.gold` with `first_token` and `length` from this counter."""
    # Cached, because questions share passages. The space before a passage can be part of its first token.
    before = cache(lambda docno, start: count([documents[docno]["text"][:start].rstrip()])[0])
    length = cache(lambda docno: count([documents[docno]["text"]])[0])
    for qid, docno, start, end, _, _, position, passage in gold:
        yield qid, docno, start, end, before(docno, start), length(docno), position, passage
