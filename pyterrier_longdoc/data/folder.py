"""A user's collection in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.files import checked_row, read_jsonl, read_lines
from .collection import CollectionParts, Documents, PositionedCollection
from .rows import judged_lines, qrels_frame, topics_frame, unique_rows

_LAYOUT = "docs.jsonl (docno, text[, title]), topics.tsv (qid<tab>query) and qrels.txt (qid iteration docno label)"


class FolderDataset(PositionedCollection):
    """A collection read from a folder: ``pt.get_dataset("longdoc:folder:PATH")``.

    ======================  =================================================================
    ``docs.jsonl``          one JSON object a line: ``docno``, ``text`` and perhaps ``title``
    ``topics.tsv``          ``qid <tab> query``, no header
    ``qrels.txt``           TREC: ``qid iteration docno label``
    ======================  =================================================================

    Files are UTF-8 and read at the first use; blank lines are skipped. Qrels may judge documents that are
    not in ``docs.jsonl``, as TREC's often do. A document without a title has the title ``""`` where others
    have one. ``docs.jsonl`` must be there; the other two files may be missing until they are read. ValueError at the
    first use if a line is malformed, or two different rows have one docno or qid.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        super().__init__(self.path.name, CollectionParts({}, topics_frame(()), qrels_frame(())))
        self._file("docs.jsonl")

    @cached_property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", perhaps "title"}, in order."""
        rows = unique_rows(_read_documents(self.path / "docs.jsonl"), "docno")
        has_titles = any("title" in row for row in rows.values())
        return {docno: {**row, "title": row.get("title", "")} if has_titles else row for docno, row in rows.items()}

    @cached_property
    def topics(self) -> pd.DataFrame:
        """All topics, `qid` and `query`."""
        rows = unique_rows(_read_topics(self._file("topics.tsv")), "qid")
        return topics_frame((qid, row["query"]) for qid, row in rows.items())

    @cached_property
    def qrels(self) -> pd.DataFrame:
        """All judgements, `qid`, `docno` and `label`."""
        return qrels_frame(judged_lines(self._file("qrels.txt")))

    def _topics_and_qrels(self, split: str) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
        return super(PositionedCollection, self)._topics_and_qrels(split)  # as files may be missing

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; a collection folder holds {_LAYOUT}")
        return file

    def _describe_component(self, component: str) -> bool | list[str] | None:
        file = {"corpus": "docs.jsonl", "topics": "topics.tsv", "qrels": "qrels.txt"}.get(component)
        return True if file and (self.path / file).is_file() else None

    def __repr__(self) -> str:
        return f"FolderDataset({str(self.path)!r})"


def _read_documents(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in read_jsonl(file, ("docno", "text")):
        checked_row(where, row, row.keys() & {"title"})
        yield where, {name: row[name] for name in ("docno", "text", "title") if name in row}


def _read_topics(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in read_lines(file):
        qid, query = (part.strip() for part in line.partition("\t")[::2])
        if not (qid and query):
            raise ValueError(f"{where}: expected 'qid<tab>query', got {line[:80]!r}")
        yield where, {"qid": qid, "query": query}
