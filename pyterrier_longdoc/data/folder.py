"""Read a user's collection from a folder."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.files import checked_row, full_path, read_jsonl, read_lines
from ..common.frames import labels_of
from ..common.language import token_counter
from .collection import CollectionParts, Documents, PositionedCollection
from .rows import check_field, judged_lines, qrels_frame, recount, topics_frame, unique_rows

_LAYOUT = "docs.jsonl (docno, text[, title]), topics.tsv (qid<tab>query) and qrels.txt (qid iteration docno label)"


class FolderDataset(PositionedCollection):
    """A collection read from a folder: ``pt.get_dataset("longdoc:folder:PATH")``.

    ======================  =================================================================
    ``docs.jsonl``          one JSON object per line: ``docno``, ``text`` and optionally ``title``
    ``topics.tsv``          ``qid <tab> query``, no header
    ``qrels.txt``           TREC: ``qid iteration docno label``
    ``spans.jsonl``         `gold`: ``qid``, ``docno``, ``start``, ``end`` (half-open character offsets)
    ``splits.tsv``          variants of topics and qrels: ``qid <tab> variant``, no header
    ======================  =================================================================

    Files are in UTF-8 and read on first use; blank lines and other fields are ignored. Qrels can judge documents that
    are not in ``docs.jsonl``, as in TREC. If only some documents have titles, the others get the title ``""``. Only
    ``docs.jsonl`` is required; topics and qrels can be missing until they are needed.

    Args:
        path: the path of the folder.
        tokenizer: counts the tokens of lengths and positions, see `token_counter`.

    Raises:
        ValueError: on first use, if a line is malformed, a split has an unknown qid, two different rows have the same
            docno or qid, or a span is outside of its text.
    """

    def __init__(self, path: str | Path, *, tokenizer: Any = None) -> None:
        self.path = Path(full_path(path))
        super().__init__(self.path.name, CollectionParts({}, topics_frame(()), qrels_frame(())), tokenizer=tokenizer)
        self._file("docs.jsonl")

    @cached_property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", optionally "title"}, in order."""
        rows = unique_rows(_read_documents(self.path / "docs.jsonl"), "docno")
        has_titles = any("title" in row for row in rows.values())
        return {docno: {**row, "title": row.get("title", "")} if has_titles else row for docno, row in rows.items()}

    @cached_property
    def topics(self) -> pd.DataFrame:
        """All topics, `qid` and `query`."""
        rows = unique_rows(_read_pairs(self._file("topics.tsv"), "query"), "qid")
        return topics_frame((qid, row["query"]) for qid, row in rows.items())

    @cached_property
    def qrels(self) -> pd.DataFrame:
        """All judgements, `qid`, `docno` and `label`."""
        file = self._file("qrels.txt")
        qrels = qrels_frame(judged_lines(file))
        labels_of(qrels, str(file))
        return qrels

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        """The qids of each variant of topics and qrels; empty without ``splits.tsv``."""
        file = self.path / "splits.tsv"
        known = set(self.topics["qid"]) if (self.path / "topics.tsv").is_file() else None
        rows = unique_rows(_read_pairs(file, "variant", known), "qid") if file.is_file() else {}
        variant_of = pd.Series({qid: row["variant"] for qid, row in rows.items()}, dtype=str)
        return {str(variant): list(qids) for variant, qids in variant_of.groupby(variant_of, sort=False).groups.items()}

    def gold_rows(self) -> Iterable[tuple[Any, ...]]:
        """Return the rows of `gold` from ``spans.jsonl``."""
        file = self.path / "spans.jsonl"
        spans = _read_spans(file, self.documents) if file.is_file() else ()
        return recount(spans, self.documents, token_counter(self.tokenizer))

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: a collection folder has {_LAYOUT}")
        return file

    def _describe_component(self, component: str) -> bool | list[str] | None:
        file = {"corpus": "docs.jsonl", "topics": "topics.tsv", "qrels": "qrels.txt"}.get(component)
        if not (file and (self.path / file).is_file()):
            return None
        return True if component == "corpus" else list(self.splits) or True

    def __repr__(self) -> str:
        return f"FolderDataset({str(self.path)!r})"


def _read_documents(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in read_jsonl(file, ("docno", "text")):
        checked_row(where, row, row.keys() & {"title"})
        yield where, {name: row[name] for name in ("docno", "text", "title") if name in row}


def _read_pairs(file: Path, name: str, known: Container[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in read_lines(file):
        qid, value = (part.strip() for part in line.partition("\t")[::2])
        if not (qid and value) or (qid, value) == ("qid", name):
            kind = "no header" if value else f"'qid<tab>{name}'"
            raise ValueError(f"{where}: expected {kind}, got {line[:80]!r}")
        if known is not None and qid not in known:
            raise ValueError(f"{where}: {qid!r} is not in topics.tsv")
        yield where, {"qid": qid, name: value}


def _read_spans(file: Path, documents: Documents) -> Iterator[tuple[Any, ...]]:
    for where, row in read_jsonl(file, ("qid", "docno")):
        docno, start, end = row["docno"], row.get("start"), row.get("end")
        check_field(docno in documents, where, "docno", "be one of docs.jsonl", docno)
        size = len(documents[docno]["text"])
        is_span = isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= size
        check_field(is_span, where, "end", f"come after 'start', both within the {size} characters", (start, end))
        yield row["qid"], docno, start, end, 0, 0, "", ""
