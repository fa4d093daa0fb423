"""The files that MS MARCO FarRelevant is released in, those of FlexNeuART.

=======================================  ==============================================================
``input_data/docs/AnswerFields.jsonl.gz``    the documents: ``DOCNO``, ``text_raw``
``input_data/PART/QuestionFields.jsonl``     the topics of a part: ``DOCNO`` (the qid), ``text_raw``
``input_data/PART/qrels.txt``                TREC: ``qid iteration docno label``
``gold.jsonl``                               where relevant passages stand: the columns of ``gold``
=======================================  ==============================================================

Released parts are ``bitext`` (training), ``dev_official`` and ``dev_official_sample1K``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.common.language import token_counter
from pyterrier_longdoc.data.folder import qrel
from pyterrier_longdoc.data.passages import TextSpool
from pyterrier_longdoc.data.positioned import Parts, PositionedCollection, gold_frame


def write_far_relevant(collection: PositionedCollection, folder: str | Path, *, verbose: bool = False) -> None:
    """Writes a collection, one document at a time; equal collections give equal bytes.

    Args:
        collection: made by `far_relevant`, or any other of its kind.
        folder: is made; files in it are replaced when they are complete.
        verbose: show a progress bar.

    Raises:
        ValueError: before anything is written, if a name cannot be read back: white space in the names that qrels.txt
            has, and splits whose names are no names of folders.
    """
    _check_names(collection)
    data = Path(folder, "input_data")
    documents = collection.get_corpus_iter(verbose=verbose)
    rows = ({"DOCNO": row["docno"], "text_raw": row["text"]} for row in documents)
    _write(data / "docs" / "AnswerFields.jsonl.gz", map(_line, rows))
    for part in collection.splits or [None]:
        topics, qrels = collection.get_topicsqrels(part)
        rows = ({"DOCNO": qid, "text_raw": query} for qid, query in topics[["qid", "query"]].itertuples(index=False))
        _write(data / (part or "all") / "QuestionFields.jsonl", map(_line, rows))
        judged = qrels[["qid", "docno", "label"]].itertuples(index=False)
        _write(data / (part or "all") / "qrels.txt", (f"{qid} 0 {docno} {label}\n" for qid, docno, label in judged))
    _write(Path(folder, "gold.jsonl"), map(_line, collection.gold_rows()))


def read_far_relevant(
    folder: str | Path, *, tokenizer: Any = None, default: str | None = None, name: str = "far-relevant"
) -> PositionedCollection:
    """Reads a collection, the released one or one that `write_far_relevant` wrote.

    The documents are copied to a temporary file, not into memory.

    Args:
        folder: all files of the names above are read, wherever they are below it, compressed or not; each folder with
            topics is a variant of topics and qrels.
        tokenizer: for statistics, see `token_counter`.
        default: the part to take if none is asked for; None takes all.
        name: of the collection.

    Returns:
        The collection; its `gold` is empty if there is no such file.

    Raises:
        FileNotFoundError: if there are no documents, no topics or no qrels.
        ValueError: if a line is malformed, or two documents or topics of the same name differ.
    """
    documents, queries = SpooledDocuments(), _Unique()
    for file in _files(folder, "AnswerFields.jsonl"):
        for where, row in read_jsonl(file, ("DOCNO", "text_raw")):
            documents.add(where, row["DOCNO"], row["text_raw"])
    splits: dict[str, list[str]] = {}
    for file in _files(folder, "QuestionFields.jsonl"):
        for where, row in read_jsonl(file, ("DOCNO", "text_raw")):
            queries.add(where, row["DOCNO"], row["text_raw"])
            splits.setdefault(file.parent.name, []).append(row["DOCNO"])
    judged = dict.fromkeys(qrel(*line) for file in _files(folder, "qrels.txt") for line in _lines(file))
    gold_files = _files(folder, "gold.jsonl", needed=False)
    gold = [row for file in gold_files for _, row in read_jsonl(file, ("qid", "docno", "position", "passage"))]
    parts = Parts(
        documents,
        pd.DataFrame(list(queries.items()), columns=["qid", "query"]).astype(str),
        pd.DataFrame(list(judged), columns=["qid", "docno", "label"]),
        gold_frame(gold),
        splits=splits,
    )
    return PositionedCollection(name, parts, count=token_counter(tokenizer), default=default, variants=list(splits))


class SpooledDocuments(Mapping[str, Mapping[str, str]]):
    """Documents in a temporary file: docno -> `docno, text`."""

    def __init__(self) -> None:
        self._spool = TextSpool()
        self._index_of: dict[str, int] = {}

    def add(self, where: str, docno: str, text: str) -> None:
        """Adds a document, or does nothing if it is there already.

        Raises:
            ValueError: if it is there with another text.
        """
        if docno not in self._index_of:
            self._index_of[docno] = len(self._spool)
            self._spool.append(docno, text)
        elif self._spool.read(self._index_of[docno])[1] != text:
            raise ValueError(f"{where}: {docno!r} is there twice, with different texts; names must be unique")

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return {"docno": docno, "text": self._spool.read(self._index_of[docno])[1]}

    def __iter__(self) -> Iterator[str]:
        return iter(self._index_of)

    def __len__(self) -> int:
        return len(self._index_of)


class _Unique(dict[str, str]):
    def add(self, where: str, name: str, text: str) -> None:
        if self.setdefault(name, text) != text:
            raise ValueError(f"{where}: {name!r} is there twice, with different texts; names must be unique")


def read_jsonl(file: Path, fields: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads JSON objects from a file, compressed or not.

    Args:
        file: one object a line; blank lines are skipped.
        fields: that must be there and be strings.

    Yields:
        Where the line is, for messages, and the object.

    Raises:
        ValueError: if a line is malformed or lacks a field.
    """
    for where, line in _lines(file):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not a JSON object ({error}): {line[:80]!r}") from None
        yield where, checked_fields(where, row, fields)


def checked_fields(where: str, row: Any, fields: Iterable[str]) -> dict[str, Any]:
    """The row itself; raises ValueError, saying where, if it is no dict or one of the fields is no string."""
    for field in fields:
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"{where}: expected an object with the string {field!r}, got {str(row)[:80]!r}")
    return row


def _files(folder: str | Path, name: str, *, needed: bool = True) -> list[Path]:
    root = Path(folder).expanduser()
    found = sorted([*root.rglob(name), *root.rglob(f"{name}.gz")])
    if needed and not found:
        raise FileNotFoundError(f"{root} holds no {name} or {name}.gz, in no folder below it either")
    return found


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{file}:{number}", line.rstrip("\n")


def _check_names(collection: PositionedCollection) -> None:
    for part in collection.splits:
        if part in ("", ".", "..") or "/" in part or "\\" in part:
            raise ValueError(f"split {part!r} cannot be written: it must be the name of a folder")
    qrels = collection.qrels
    for column in ("qid", "docno"):
        for name in qrels[column].unique():
            if name.split() != [name]:
                raise ValueError(f"{column} {name!r} cannot be written: names in qrels.txt must have no white space")


def _line(row: Mapping[Any, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write(file: Path, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with pt.io.finalized_open(str(file), "b") as raw:
        if file.suffix == ".gz":
            # Neither name nor time in the header, so that the same documents give the same bytes.
            with gzip.GzipFile("", "wb", 4, raw, mtime=0) as stream:
                stream.writelines(line.encode() for line in lines)
        else:
            raw.writelines(line.encode() for line in lines)
