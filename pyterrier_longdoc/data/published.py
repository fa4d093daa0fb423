"""Read LongEmbed and MLDR from their published files.

Both readers return a `PositionedCollection`. They need the files of the Hugging Face hub and raise FileNotFoundError at
once if these are missing. Files are read on first use, row by row: ValueError for a malformed row or a duplicate id,
ImportError for Parquet without pyarrow. Documents are copied to a temporary file instead of into memory. Only
LongEmbed, which is small, is read at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..common.arguments import check_arguments
from ..common.files import checked_row, full_path, read_rows
from ..common.warnings import warn
from .collection import CollectionParts, PositionedCollection
from .rows import Rows, SpooledDocuments, check_field, qrels_frame, topics_frame, unique_rows

_TABLE = re.compile(r"(.+?)(?:-\d+-of-(\d+))?(\.parquet|\.jsonl|\.jsonl\.gz)")
"""The name of a table, the number of its parts if there are several, and the format."""


def read_longembed(folder: str | Path, *, tokenizer: Any = None, name: str = "longembed") -> PositionedCollection:
    """Read a set of LongEmbed (Zhu et al. 2024): `needle`, `passkey`, or one of its real tasks.

    Topics and qrels have a variant for each context length. Positions are not published, so `gold` is empty.

    Args:
        folder: the folder of a set, with the tables `corpus` (`doc_id, text`), `queries` (`qid, text`) and `qrels`
            (`qid, doc_id`). Documents and queries can have the field `context_length`.
        tokenizer: counts tokens for statistics, see `token_counter`.
        name: the name of the collection.
    """
    hub = "dwzhu/LongEmbed"
    corpus = unique_rows(_rows(_tables(folder, "corpus", hub), ("doc_id", "text")), "doc_id")
    queries = unique_rows(_rows(_tables(folder, "queries", hub), ("qid", "text")), "qid")
    judgements = _rows(_tables(folder, "qrels", hub), ("qid", "doc_id"))
    splits: dict[str, list[str]] = {}
    for qid, row in queries.items():
        if "context_length" in row:
            splits.setdefault(str(row["context_length"]), []).append(qid)
    parts = CollectionParts(
        documents={docno: {"docno": docno, "text": row["text"]} for docno, row in corpus.items()},
        topics=topics_frame((qid, row["text"]) for qid, row in queries.items()),
        qrels=qrels_frame((row["qid"], row["doc_id"], 1) for _, row in judgements),
        splits=splits,
        groups={docno: str(row["context_length"]) for docno, row in corpus.items() if "context_length" in row},
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, papers=("zhu-2024-longembed",))


def read_mldr(
    folder: str | Path, *, splits: Sequence[str] | None = None, tokenizer: Any = None
) -> PositionedCollection:
    """Read MLDR in one language (Chen et al. 2024): questions about a paragraph of a long document.

    Topics and qrels have a variant for each split. The training split has judged negatives with the label 0.

    Args:
        folder: the folder of a language, such as `mldr-v1.0-en` of `Shitao/MLDR`, with `corpus.jsonl.gz`
            (`docid, text`) and `train.jsonl.gz`, `dev.jsonl.gz` or `test.jsonl.gz` (`query_id, query,
            positive_passages, negative_passages`, which have a `docid`).
        splits: the splits to read; None for all in the folder. "test" is the default variant if it is read. The
            English training topics take 1.3 GB, because their files repeat the text of each passage.
        tokenizer: counts tokens for statistics, see `token_counter`.
    """
    hub, choices = "Shitao/MLDR", ("train", "dev", "test")
    for split in splits or ():
        check_arguments("str", choices=choices, splits=split)
    corpus = _tables(folder, "corpus", hub)
    paths = {split: _tables(folder, split, hub, required=splits is not None) for split in splits or choices}
    files = {split: paths[split] for split in paths if paths[split]} or {"test": _tables(folder, "test", hub)}
    default, papers = "test" if "test" in files else None, ("chen-2024-m3",)
    parts = partial(_mldr, corpus, files)
    return PositionedCollection("mldr", parts, tokenizer=tokenizer, default=default, variants=files, papers=papers)


def _mldr(corpus: list[Path], files: dict[str, list[Path]]) -> CollectionParts:
    labels: list[tuple[str, str, int]] = []
    splits: dict[str, list[str]] = {split: [] for split in files}
    rows = unique_rows((row for split in files for row in _mldr_rows(files[split], split)), "query_id")
    for qid, row in rows.items():
        splits[row["split"]].append(qid)
        labels += [(qid, docno, label) for docno, label in row["judged"]]
    topics = topics_frame((qid, row["query"]) for qid, row in rows.items())
    documents = SpooledDocuments((where, row["docid"], row["text"]) for where, row in _rows(corpus, ("docid", "text")))
    missing = [docno for _, docno, _ in labels if docno not in documents]
    if missing:
        warn(
            f"{len(missing)} of {len(labels)} judged documents are missing from the corpus of {len(documents)} "
            f"documents, e.g. {missing[0]!r}, and cannot be retrieved",
            UserWarning,
        )
    return CollectionParts(documents, topics, qrels_frame(labels), splits=splits)


def _mldr_rows(files: list[Path], split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows without the texts of their passages."""
    for where, row in _rows(files, ("query_id", "query")):
        judgements = []
        for field, label in (("positive_passages", 1), ("negative_passages", 0)):
            passages = row.get(field)
            check_field(isinstance(passages, list), where, field, "be a list of passages", passages)
            judgements += [(checked_row(where, passage, ("docid",))["docid"], label) for passage in row[field]]
        yield where, {"query_id": row["query_id"], "query": row["query"], "split": split, "judged": judgements}


# Files.


def _rows(files: list[Path], strings: tuple[str, ...]) -> Rows:
    return (row for file in files for row in read_rows(file, strings))


def _tables(folder: str | Path, table: str, hub: str, *, required: bool = True) -> list[Path]:
    """Find the files of a table, which can have several parts."""
    root = Path(full_path(folder))
    files = (path for path in sorted(root.glob("*")) if path.is_file())
    matches = {path: match for path in files if (match := _TABLE.fullmatch(path.name))}
    paths = {path: match for path, match in matches.items() if match[1] == table}
    if required and not paths:
        others = ", ".join(sorted({match[1] for match in matches.values()})) or "none"
        raise FileNotFoundError(
            f"{root} has no {table}.parquet, .jsonl or .jsonl.gz, in one or several parts (other tables: {others}): "
            f"use a folder with the files of the dataset {hub} of the Hugging Face hub, in the same layout"
        )
    if len({match[3] for match in paths.values()}) > 1 or any(int(m[2] or 1) != len(paths) for m in paths.values()):
        names = ", ".join(path.name for path in paths)
        raise FileNotFoundError(f"{root} must have all parts of {table} in the same format; it has {names}")
    return list(paths)
