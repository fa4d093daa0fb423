"""Read the released files of MS MARCO FarRelevant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.files import full_path, read_jsonl
from ..common.frames import labels_of
from .collection import CollectionParts, PositionedCollection
from .rows import SpooledDocuments, judged_lines, put_once, qrels_frame, topics_frame


def read_far_relevant(
    folder: str | Path, *, tokenizer: Any = None, default: str | None = None, name: str = "far-relevant"
) -> PositionedCollection:
    """Read the released MS MARCO FarRelevant, in FlexNeuART's format.

    The documents are copied to a temporary file instead of into memory. The authors' own map of positions is not read,
    so `gold` is empty. The collection has the parts ``bitext`` (training), ``dev_official`` and
    ``dev_official_sample1K``.

    ============================================  ============================================================
    ``input_data/docs/AnswerFields.jsonl.gz``     the documents: ``DOCNO``, ``text_raw``
    ``input_data/PART/QuestionFields.jsonl``      the topics of a part: ``DOCNO`` (the qid), ``text_raw``
    ``input_data/PART/qrels.txt``                 TREC: ``qid iteration docno label``
    ============================================  ============================================================

    Args:
        folder: the folder with these files, at any depth, compressed or not. Each folder with topics is a variant of
            topics and qrels.
        tokenizer: counts lengths, see `token_counter`; None counts words and punctuation marks.
        default: the default part; None for all.
        name: the name of the collection.

    Raises:
        FileNotFoundError: if documents, topics or qrels are missing.
        ValueError: if a line is malformed, or names are not unique.
    """
    documents = SpooledDocuments(row[1:] for row in _named_texts(folder, "AnswerFields.jsonl"))
    queries, splits = dict[str, str](), dict[str, list[str]]()
    for part, where, qid, query in _named_texts(folder, "QuestionFields.jsonl"):
        put_once(queries, qid, query, where)
        splits.setdefault(part, []).append(qid)
    qrels = qrels_frame(dict.fromkeys(row for file in _find_files(folder, "qrels.txt") for row in judged_lines(file)))
    labels_of(qrels, f"qrels.txt in {str(folder)!r}")
    parts = CollectionParts(documents, topics_frame(queries.items()), qrels, splits=splits)
    return PositionedCollection(name, parts, tokenizer=tokenizer, default=default, papers=("boytsov-2025-positional",))


def _named_texts(folder: str | Path, name: str) -> Iterator[tuple[str, str, str, str]]:
    """Read the part, place, name and text of all rows in files of this name."""
    for file in _find_files(folder, name):
        for where, row in read_jsonl(file, ("DOCNO", "text_raw")):
            yield file.parent.name, where, row["DOCNO"], row["text_raw"]


def _find_files(folder: str | Path, name: str) -> list[Path]:
    root = Path(full_path(folder))
    files = sorted([*root.rglob(name), *root.rglob(f"{name}.gz")])
    if not files:
        raise FileNotFoundError(f"{root} and its subfolders have no {name} or {name}.gz: check the path")
    return files
