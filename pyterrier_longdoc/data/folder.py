"""A test collection kept in a folder of three plain text files.

======================  =================================================================
``docs.jsonl``          one JSON object a line: ``docno``, ``text`` and perhaps ``title``
``topics.tsv``          ``qid <tab> query``, no header
``qrels.txt``           TREC: ``qid iteration docno label``
======================  =================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from pyterrier_longdoc.data.textstore import Documents, InMemoryDataset

_LAYOUT = "docs.jsonl (docno, text[, title]), topics.tsv (qid<tab>query) and qrels.txt (qid iteration docno label)"


class FolderDataset(InMemoryDataset):
    """A collection read from a folder: ``pt.get_dataset("longdoc:folder:PATH")``.

    Files are UTF-8 and read at the first use; blank lines are skipped. Qrels may judge documents that are
    not in ``docs.jsonl``, as TREC's often do. A document without a title has the title ``""`` where others
    have one.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: If the folder or its ``docs.jsonl`` is missing. The other two files are only
            missed when asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.name = self.path.name
        self._file("docs.jsonl")

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """The topics, with columns ``qid`` and ``query``.

        Raises:
            ValueError: If a variant is asked for, or a line is malformed or repeats a qid.
        """
        self._no_variant("topics", variant)
        queries: dict[str, str] = {}
        for where, line in self._lines("topics.tsv"):
            qid, tab, query = line.partition("\t")
            if not (tab and qid.strip() and query.strip()):
                raise ValueError(f"{where}: expected 'qid<tab>query', got {line[:80]!r}")
            if qid.strip() in queries:
                raise ValueError(f"{where}: qid {qid.strip()!r} is there twice; qids must be unique")
            queries[qid.strip()] = query.strip()
        return pd.DataFrame({"qid": list(queries), "query": list(queries.values())}, dtype=str)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """The judgements, with columns ``qid``, ``docno`` and ``label`` (int).

        Raises:
            ValueError: If a variant is asked for, or a line is malformed.
        """
        self._no_variant("qrels", variant)
        rows = [qrel(where, line) for where, line in self._lines("qrels.txt")]
        return pd.DataFrame(rows, columns=["qid", "docno", "label"]).astype({"qid": str, "docno": str, "label": int})

    def _read_documents(self) -> Documents:
        documents: dict[str, dict[str, str]] = {}
        for where, line in self._lines("docs.jsonl"):
            row = _document(where, line)
            if row["docno"] in documents:
                raise ValueError(f"{where}: docno {row['docno']!r} is there twice; docnos must be unique")
            documents[row["docno"]] = row
        if any("title" in row for row in documents.values()):
            for row in documents.values():
                row.setdefault("title", "")
        return documents

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            missing = file if self.path.is_dir() else self.path
            raise FileNotFoundError(f"{missing} is missing; a collection folder holds {_LAYOUT}")
        return file

    def _lines(self, name: str) -> Iterator[tuple[str, str]]:
        file = self._file(name)
        # Not splitlines(): it would also break lines at the form feeds and U+2028 that JSON strings may hold.
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}:{number}", line.rstrip("\n")

    def _no_variant(self, component: str, variant: str | None) -> None:
        if variant is not None:
            raise ValueError(f"{self!r} has no variants of its {component}, but {variant!r} was asked for")

    def _describe_component(self, component: str) -> bool | None:
        file = {"corpus": "docs.jsonl", "topics": "topics.tsv", "qrels": "qrels.txt"}.get(component)
        return True if file and (self.path / file).is_file() else None

    def __repr__(self) -> str:
        return f"FolderDataset({str(self.path)!r})"


def _document(where: str, line: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object ({error}): {line[:80]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {line[:80]!r}")
    for field in ("docno", "text"):
        if not isinstance(row.get(field), str):
            raise ValueError(f"{where}: field {field!r} must be a string, got {row.get(field)!r}")
    if not isinstance(row.get("title", ""), str):
        raise ValueError(f"{where}: field 'title' must be a string, got {row['title']!r}")
    return {field: row[field] for field in ("docno", "text", "title") if field in row}


def qrel(where: str, line: str) -> tuple[str, str, int]:
    """One line of TREC qrels: qid, docno and label.

    Raises:
        ValueError: if it is malformed; the message says where.
    """
    try:
        qid, _, docno, label = line.split()
        return qid, docno, int(label)
    except ValueError:
        raise ValueError(f"{where}: expected 'qid iteration docno label', got {line[:80]!r}") from None
