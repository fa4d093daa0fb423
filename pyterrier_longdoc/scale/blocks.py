"""Finished blocks: a Parquet file each, written as a whole, its rows query by query."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.files import replacing
from .tables import arrow, as_frame, as_table

_ABOUT = b"longdoc"
"""The key in a file's metadata with the job and, for each query, its first row in the input and its number of rows."""

_ROWS_OF_GROUP = 2048  # of a file, which are read at once: a merge holds as many of each block


class BlockFolder:
    """The finished blocks of a job.

    Args:
        folder: where they are; it is made with the first block.
        job: what all of them must have been made by.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job

    def file(self, key: int) -> Path:
        """The file of a block."""
        return self.folder / f"{key:04}.parquet"

    def write(self, key: int, result: pd.DataFrame, first_rows: dict[str, int]) -> None:
        """Writes a finished block: queries in the order of the input, the rows of each in the order of the result.

        Args:
            key: of the block.
            result: its rows, with `qid`.
            first_rows: of each query its first row in the input.

        Raises:
            OSError: if there is no space left, among others; no part of the block is left.
            ValueError: for a column that Parquet cannot hold.
        """
        first = result["qid"].map(first_rows).to_numpy(dtype=int)
        numbers, counts = np.unique(first, return_counts=True)
        about = {"job": self.job, "queries": np.stack([numbers, counts], axis=1).tolist()}
        table = as_table(result.iloc[np.argsort(first, kind="stable")], "the results")
        table = table.replace_schema_metadata({**table.schema.metadata, _ABOUT: json.dumps(about)})
        try:
            with replacing(self.file(key)) as part:
                arrow("parquet").write_table(
                    table, part, row_group_size=_ROWS_OF_GROUP, compression="zstd", write_page_checksum=True
                )
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"no space is left for block {key}; the blocks that are finished stay, and the same call goes on from "
                f"there when there is room again",
                str(self.folder),
            ) from error

    def finished(self, keys: Iterable[int]) -> list[int]:
        """Those of the blocks that are there.

        Raises:
            ValueError: for files that are no blocks of the job, or cannot be read; the message names them.
        """
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        foreign = sorted(name for name in names if not re.fullmatch(r"\d{4}\.parquet|\..*\.part", name))
        if foreign:
            raise ValueError(f"{str(self.folder)!r} has files that are no blocks: move away {', '.join(foreign[:5])}")
        found, broken = [key for key in keys if self.file(key).name in names], []
        for key in found:
            try:
                self.queries(key)
            except ValueError as error:
                broken.append(str(error))
        if broken:
            raise ValueError(
                f"{len(broken)} finished block(s) cannot be used. Delete these files, and the same call scores their "
                f"queries anew; all others stay: {'; '.join(broken)}"
            )
        return found

    def unfinished(self, keys: Iterable[int]) -> list[int]:
        """Those of the blocks that are not there; raises as `finished`."""
        wanted = list(keys)
        return sorted(set(wanted) - set(self.finished(wanted)))

    def sweep(self, keys: Iterable[int]) -> None:
        """Removes what processes that were killed have left of unfinished blocks."""
        names = {self.file(key).name for key in keys}
        for path in self.folder.glob(".*.part"):
            if path.name[1:].partition(".parquet")[0] + ".parquet" in names:
                path.unlink(missing_ok=True)

    def queries(self, key: int) -> list[tuple[int, int]]:
        """The first row in the input, and the number of rows, of each query of a block.

        Raises:
            ValueError: if the file cannot be read, or is of another job.
        """
        with self._opened(key) as file:
            about = json.loads((file.schema_arrow.metadata or {}).get(_ABOUT, b'{"job": null}'))
        if about["job"] != self.job:
            raise ValueError(f"{self.file(key)} (of another job)")
        return [(row, count) for row, count in about["queries"]]

    def frame(self, key: int) -> pd.DataFrame:
        """All rows of a block."""
        return pd.concat(self._groups(key, None))

    def by_query(self, key: int, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """These columns of the rows of a block, query by query; little of it is in memory."""
        groups, held = self._groups(key, columns), pd.DataFrame()
        for _, count in self.queries(key):
            while len(held) < count:
                held = pd.concat([held, next(groups)]) if len(held) else next(groups)
            yield held.iloc[:count]
            held = held.iloc[count:]

    def _groups(self, key: int, columns: Sequence[str] | None) -> Iterator[pd.DataFrame]:
        # Opened for each: a process may have no more than 1,024 open files on many systems.
        group, groups = 0, 1
        while group < groups:
            with self._opened(key) as file:
                groups = file.num_row_groups
                table = file.read_row_group(group, columns=columns) if groups else file.read(columns)
            yield as_frame(table)
            group += 1

    @contextmanager
    def _opened(self, key: int) -> Iterator[Any]:
        try:
            with arrow("parquet").ParquetFile(self.file(key), page_checksum_verification=True) as file:
                yield file
        except (OSError, ValueError) as error:  # as all of pyarrow's complaints are
            raise ValueError(f"{self.file(key)} ({error})") from error
