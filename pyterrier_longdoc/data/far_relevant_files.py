"""Read and write collections in the file format of MS MARCO FarRelevant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..common.files import claim, full_path, read_jsonl, write_jsonl, write_lines
from ..common.frames import labels_of
from ..common.language import token_counter
from .collection import GOLD_COLUMNS, CollectionParts, PositionedCollection
from .rows import SpooledDocuments, check_field, judged_lines, put_once, qrels_frame, recount, topics_frame


def write_far_relevant(collection: PositionedCollection, folder: str | Path, *, verbose: bool = False) -> None:
    """Write a collection one document at a time; equal collections give equal bytes.

    Qids, docnos and splits must not have white space or slashes.

    The files are those of the released MS MARCO FarRelevant (in FlexNeuART's format), which has the parts ``bitext``
    (training), ``dev_official`` and ``dev_official_sample1K``.

    ============================================  ============================================================
    ``input_data/docs/AnswerFields.jsonl.gz``     the documents: ``DOCNO``, ``text_raw``
    ``input_data/PART/QuestionFields.jsonl``      the topics of a part: ``DOCNO`` (the qid), ``text_raw``
    ``input_data/PART/qrels.txt``                 TREC: ``qid iteration docno label``
    ``gold.jsonl``                                positions of relevant passages: the columns of ``gold``
    ``unit.jsonl``                                the name of the tokenizer that counted the positions
    ============================================  ============================================================

    Args:
        collection: the result of `far_relevant`, or another `PositionedCollection`.
        folder: the folder to create; existing files are replaced once the new ones are complete.
        verbose: show a progress bar.
    """
    folder = Path(full_path(folder))
    claim(folder)
    data = folder / "input_data"
    documents = (
        {"DOCNO": row["docno"], "text_raw": row["text"]} for row in collection.get_corpus_iter(verbose=verbose)
    )
    write_jsonl(data / "docs" / "AnswerFields.jsonl.gz", documents)
    for part in collection.splits or [None]:
        topics, qrels = collection.get_topicsqrels(part)
        queries = ({"DOCNO": qid, "text_raw": query} for qid, query in topics.itertuples(index=False))
        write_jsonl(data / (part or "all") / "QuestionFields.jsonl", queries)
        lines = (f"{qid} 0 {docno} {label}" for qid, docno, label in qrels.itertuples(index=False))
        write_lines(data / (part or "all") / "qrels.txt", lines)
    gold = (dict(zip(GOLD_COLUMNS, row, strict=True)) for row in collection.gold_rows())
    write_jsonl(folder / "gold.jsonl", gold)
    tokenizer = collection.tokenizer
    unit = tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", "")
    if tokenizer is not None and not unit:
        unit = getattr(tokenizer, "__qualname__", type(tokenizer).__name__)  # cannot be loaded again
    write_jsonl(folder / "unit.jsonl", [{"name": str(unit)}])


def read_far_relevant(
    folder: str | Path, *, tokenizer: Any = None, default: str | None = None, name: str = "far-relevant"
) -> PositionedCollection:
    """Read the released collection or one written by `write_far_relevant`.

    The documents are copied to a temporary file instead of into memory. The released collection has no `gold.jsonl`,
    and the authors' own map of positions is not read.

    Args:
        folder: the folder with the files of `write_far_relevant`, at any depth, compressed or not. Each folder with
            topics is a variant of topics and qrels.
        tokenizer: counts lengths and positions again, see `token_counter`. None uses the stored positions and the
            recorded tokenizer, which is loaded when it is needed; if none was recorded, words and punctuation marks are
            counted.
        default: the default part; None for all.
        name: the name of the collection.

    Returns:
        The collection; its `gold` is empty without `gold.jsonl`.

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
    gold_files, unit_files = (_find_files(folder, name, required=False) for name in ("gold.jsonl", "unit.jsonl"))
    gold = list(_gold(gold_files))
    as_written = tokenizer is None and len(unit_files) == len(gold_files)
    if tokenizer is None:
        names = {row["name"] for file in unit_files for _, row in read_jsonl(file, ("name",))}
        tokenizer = next(iter(names), None) or None
    parts = CollectionParts(
        documents,
        topics_frame(queries.items()),
        qrels,
        gold if as_written else partial(recount, gold, documents, token_counter(tokenizer)),
        splits=splits,
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, default=default, papers=("boytsov-2025-positional",))


def _gold(files: Iterable[Path]) -> Iterator[tuple[Any, ...]]:
    for file in files:
        for where, row in read_jsonl(file, ("qid", "docno", "position", "passage")):
            for name in ("start", "end", "first_token", "length"):
                check_field(isinstance(row.get(name), int), where, name, "be a whole number", row.get(name))
            yield tuple(map(row.get, GOLD_COLUMNS))


def _named_texts(folder: str | Path, name: str) -> Iterator[tuple[str, str, str, str]]:
    """Read the part, place, name and text of all rows in files of this name."""
    for file in _find_files(folder, name):
        for where, row in read_jsonl(file, ("DOCNO", "text_raw")):
            yield file.parent.name, where, row["DOCNO"], row["text_raw"]


def _find_files(folder: str | Path, name: str, *, required: bool = True) -> list[Path]:
    root = Path(full_path(folder))
    files = sorted([*root.rglob(name), *root.rglob(f"{name}.gz")])
    if required and not files:
        raise FileNotFoundError(f"{root} and its subfolders have no {name} or {name}.gz: check the path")
    return files
