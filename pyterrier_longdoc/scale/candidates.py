"""Candidates in blocks: each query is in one of 1,024, whatever they are read from and by how many processes."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.files import file_digest
from ..common.frames import as_strings, check_columns, frame_digest
from ..experiment.runs import run_parts
from .tables import arrow, as_frame, as_table

BLOCKS = 1024

_ROWS_AT_ONCE = 50_000
_BYTES_AT_ONCE = 32 * 2**20  # of a Parquet file, whose rows may be documents
_BYTES_HELD = 128 * 2**20  # before they are appended to the files of the blocks: fewer, larger writes
_ROW = "longdoc:row"
"""The column of a dealt file with the row's number in the input."""


class Block(NamedTuple):
    """The rows of all queries of a block, in the order of the input, and the number of each query's first row there."""

    frame: pd.DataFrame
    first_rows: dict[str, int]


class Candidates(Protocol):
    """Candidates of which the rows of a block can be had."""

    rows: list[int]
    """Of each block."""

    def block(self, key: int) -> Block:
        """The rows of a block."""


class Source:
    """Candidates as they are given, and the topics that go with them.

    Args:
        run: a frame; or a path: of a TREC run, compressed or not, of a Parquet file, or of a folder of such files. Rows
            have `qid`, `docno` and `query`, or the topics have the latter.
        topics: `qid` and `query`; None where the candidates have the queries.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it cannot be candidates.
    """

    def __init__(self, run: pd.DataFrame | str | Path, topics: pd.DataFrame | None) -> None:
        self.frame = run if isinstance(run, pd.DataFrame) else None
        self.files = [] if isinstance(run, pd.DataFrame) else _files(run)
        self.topics: pd.DataFrame | None = None
        if topics is not None:
            check_columns(topics, ("qid", "query"), "topics")
            self.topics = topics.assign(qid=as_strings(topics["qid"])).set_index("qid")
            if self.topics.index.has_duplicates:
                twice = self.topics.index[self.topics.index.duplicated()][0]
                raise ValueError(f"topics hold the qid {twice!r} more than once")
        self._topics_digest = frame_digest(topics)

    def parts(self) -> Iterator[pd.DataFrame]:
        """The rows, in parts that fit into memory; qids and docnos are strings, queries are there."""
        if self.frame is not None:
            for start in range(0, max(1, len(self.frame)), _ROWS_AT_ONCE):
                yield self._checked(self.frame.iloc[start : start + _ROWS_AT_ONCE], "the candidates")
        for file in self.files:
            for part in _parquet_parts(file) if file.suffix == ".parquet" else run_parts(file, _ROWS_AT_ONCE):
                yield self._checked(part, f"the candidates in {str(file)!r}")

    def _checked(self, part: pd.DataFrame, what: str) -> pd.DataFrame:
        check_columns(part, ("qid", "docno"), what)
        part = part.assign(qid=as_strings(part["qid"]), docno=as_strings(part["docno"]))
        if "query" in part.columns and self.topics is not None:
            raise ValueError(f"{what} have a column query, so that topics= would have no effect: leave one of them out")
        if "query" in part.columns:
            return part
        if self.topics is None:
            raise ValueError(f"{what} have no column query: give topics=, a frame with qid and query")
        unknown = part.loc[~part["qid"].isin(self.topics.index), "qid"].unique()
        if len(unknown):
            some = ", ".join(map(repr, unknown[:5].tolist()))
            raise ValueError(f"{what} have {len(unknown)} qids that are not in topics, e.g. {some}")
        return part.join(self.topics[[name for name in self.topics if name not in part.columns]], on="qid")

    def in_memory(self) -> FrameCandidates | None:
        """The candidates, if they are a frame."""
        return None if self.frame is None else FrameCandidates(self._checked(self.frame, "the candidates"))

    def files_told(self, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Name, size, time and digest of each file.

        Args:
            known: what was told before: a file of the same name, size and time is not read again.
        """
        before = {(file["name"], file["size"], file["time"]): file["digest"] for file in known}
        told = []
        for file in self.files:
            stat = file.name, file.stat().st_size, file.stat().st_mtime_ns
            digest = before.get(stat) or file_digest(file)
            told.append({**dict(zip(("name", "size", "time"), stat, strict=True)), "digest": digest})
        return told

    def digests(self, files: list[dict[str, Any]]) -> dict[str, Any]:
        """What tells these candidates and topics from others; of files, which `files_told` has told, the contents."""
        candidates = [file["digest"] for file in files] if self.frame is None else frame_digest(self.frame)
        return {"candidates": candidates, "topics": self._topics_digest}


class FrameCandidates:
    """Candidates in memory."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._order, self._ends = _by_block(frame["qid"])
        self.rows = np.diff(self._ends).tolist()

    def block(self, key: int) -> Block:
        """The rows of a block."""
        numbers = self._order[self._ends[key] : self._ends[key + 1]]
        return _as_block(self._frame.iloc[numbers], numbers)


class DealtCandidates:
    """Candidates that `deal` wrote to a folder."""

    def __init__(self, folder: Path, rows: list[int]) -> None:
        self.folder, self.rows = folder, rows

    def block(self, key: int) -> Block:
        """The rows of a block.

        Raises:
            ValueError: if they cannot be read, or not all are there.
        """
        pa, path = arrow(), _dealt_file(self.folder, key)
        tables = []
        try:
            with pa.OSFile(str(path)) as file:
                while file.tell() < file.size():
                    with pa.ipc.open_stream(file) as stream:
                        tables.append(stream.read_all())
            frame = as_frame(pa.concat_tables(tables, promote_options="permissive"))
            found = f"it has {len(frame)} rows, not {self.rows[key]}"
        except (OSError, ValueError) as error:
            frame, found = None, str(error)
        if frame is None or len(frame) != self.rows[key]:
            raise ValueError(
                f"the candidates in {str(path)!r} are damaged ({found}): delete the folder {str(self.folder)!r}, and "
                f"the same call deals them anew; what is scored stays"
            )
        return _as_block(frame.drop(columns=_ROW), frame[_ROW].to_numpy())


def deal(parts: Iterator[pd.DataFrame], folder: Path) -> list[int]:
    """Writes the rows of each block to a file of its own.

    Args:
        parts: the rows, in parts.
        folder: to which they are written.

    Returns:
        The rows of each block.
    """
    pa = arrow()
    rows, first, held = np.zeros(BLOCKS, dtype=int), 0, []
    for part in parts:
        held.append(as_table(part.assign(**{_ROW: np.arange(first, first + len(part))}), "the candidates"))
        first += len(part)
        if sum(table.nbytes for table in held) >= _BYTES_HELD:
            rows += _append(pa.concat_tables(held, promote_options="permissive"), folder)
            held = []
    if held:
        rows += _append(pa.concat_tables(held, promote_options="permissive"), folder)
    return rows.tolist()


def _append(table: Any, folder: Path) -> np.ndarray:
    """Appends each row to the file of its block, as one Arrow stream behind the others; returns how many to each."""
    pa = arrow()
    order, ends = _by_block(table["qid"].to_pandas())
    table = table.take(order)
    for key in np.flatnonzero(np.diff(ends)).tolist():
        with _dealt_file(folder, key).open("ab") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(ends[key], ends[key + 1] - ends[key]))
    return np.diff(ends)


def sample(parts: Iterator[pd.DataFrame], queries: int) -> tuple[list[int], pd.DataFrame]:
    """The rows of each block, and all rows of some queries: those with the smallest digests, which are a random choice.

    Args:
        parts: the candidates.
        queries: how many to choose.
    """
    rows, chosen = np.zeros(BLOCKS, dtype=int), pd.DataFrame({"qid": []})
    for part in parts:
        rows += np.diff(_by_block(part["qid"])[1])
        both = pd.concat([chosen, part]) if len(chosen) else part
        smallest = sorted(both["qid"].unique(), key=_digest)[:queries]
        chosen = both[both["qid"].isin(smallest)]
    return rows.tolist(), chosen


def _digest(qid: str) -> int:
    return int.from_bytes(blake2b(qid.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _by_block(qids: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """`(R,)` the rows block by block, each block's in their order, and `(BLOCKS + 1,)` where blocks end among them."""
    codes, distinct = pd.factorize(qids)
    blocks = np.array([_digest(qid) % BLOCKS for qid in distinct], dtype=int)[codes]
    return np.argsort(blocks, kind="stable"), np.concatenate([[0], np.bincount(blocks, minlength=BLOCKS).cumsum()])


def _as_block(frame: pd.DataFrame, numbers: np.ndarray) -> Block:
    frame = frame.reset_index(drop=True)
    if "score" in frame.columns and "rank" not in frame.columns:
        frame = pt.model.add_ranks(frame)
    # Of the rows of a query the first is the last to be set.
    return Block(frame, dict(zip(frame["qid"].iloc[::-1], numbers[::-1].tolist(), strict=True)))


def _dealt_file(folder: Path, key: int) -> Path:
    return folder / f"{key:04}.arrow"


def _files(run: str | Path) -> list[Path]:
    path = Path(run)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"run={str(run)!r} does not exist: give a frame, a TREC run or a folder of Parquet files"
        )
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"run={str(run)!r} is a folder without Parquet files (*.parquet)")
    return files


def _parquet_parts(path: Path) -> Iterator[pd.DataFrame]:
    pa, parquet = arrow(), arrow("parquet")
    try:
        with parquet.ParquetFile(path) as file:
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            rows = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * file.metadata.num_rows // max(1, size)))
            for batch in file.iter_batches(rows):
                yield as_frame(pa.Table.from_batches([batch]))
    except ValueError as error:  # as all of pyarrow's complaints about contents are
        raise ValueError(f"{str(path)!r} is no Parquet file: {error}") from None
