"""Read LongEmbed from its published files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..common.files import full_path, read_rows
from .collection import CollectionParts, PositionedCollection
from .rows import Rows, qrels_frame, topics_frame, unique_rows

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

    Raises:
        FileNotFoundError: if a table is missing.
        ValueError: for a malformed row or a duplicate id.
        ImportError: for Parquet without pyarrow.
    """
    corpus = unique_rows(_rows(folder, "corpus", ("doc_id", "text")), "doc_id")
    queries = unique_rows(_rows(folder, "queries", ("qid", "text")), "qid")
    judgements = _rows(folder, "qrels", ("qid", "doc_id"))
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


def _rows(folder: str | Path, table: str, strings: tuple[str, ...]) -> Rows:
    """Read a table, which can be in several files."""
    root = Path(full_path(folder))
    files = (path for path in sorted(root.glob("*")) if path.is_file())
    matches = {path: match for path in files if (match := _TABLE.fullmatch(path.name))}
    paths = {path: match for path, match in matches.items() if match[1] == table}
    if not paths:
        others = ", ".join(sorted({match[1] for match in matches.values()})) or "none"
        raise FileNotFoundError(
            f"{root} has no {table}.parquet, .jsonl or .jsonl.gz, in one or several parts (other tables: {others}): "
            f"use a folder with the files of the dataset dwzhu/LongEmbed of the Hugging Face hub, in the same layout"
        )
    if len({match[3] for match in paths.values()}) > 1 or any(int(m[2] or 1) != len(paths) for m in paths.values()):
        names = ", ".join(path.name for path in paths)
        raise FileNotFoundError(f"{root} must have all parts of {table} in the same format; it has {names}")
    return (row for file in paths for row in read_rows(file, strings))
