"""Values on disk by key, so that another run need not compute or pay for them again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .caches import MakeArrays

Key = str | bytes
"""A hash of everything a value depends on, as hexadecimal digits or bytes."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS store (key BLOB PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_LOOKUP = 500
"""Number of keys per query; SQLite allows at least 999."""


class Store:
    """A SQLite file of JSON values by key.

    Several threads and processes can use the same file, and stored values survive if the process is killed. The first
    value of a key is kept. Floats are restored exactly. The file is opened for every use, so that the object can be
    pickled and used after a fork and need not be closed.

    Args:
        path: the file; it is created with its folder when the first value is stored.
    """

    table: ClassVar[str] = "store"
    columns: ClassVar[str] = "key, value"
    schema: ClassVar[tuple[str, ...]] = (_SCHEMA,)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __len__(self) -> int:
        return sum(count for (count,) in self._select(f"SELECT count(*) FROM {self.table}"))

    def get_many(self, keys: Iterable[Key], read: Callable[[Any], Any] = lambda value: value) -> dict[Key, Any]:
        """Return the stored values of these keys, converted by `read`; an error of `read` means a damaged value."""
        rows = list(self._rows(list(keys)))
        with self._undamaged():
            return {key: read(json.loads(value)) for key, value in rows}

    def _rows(self, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(keys), _LOOKUP):
            batch = keys[start : start + _LOOKUP]
            marks = ",".join("?" * len(batch))
            yield from self._select(f"SELECT {self.columns} FROM {self.table} WHERE key IN ({marks})", batch)

    def put_many(self, items: Mapping[Key, Any]) -> None:
        """Store JSON-serializable values; after an interruption, all of them or none are stored."""
        rows = [(key, json.dumps(value)) for key, value in items.items()]
        with self._connected() as connection:
            connection.executemany("INSERT OR IGNORE INTO store VALUES (?, ?)", rows)

    def _select(self, query: str, keys: Sequence[Key] = ()) -> list[Any]:
        if not self.path.exists():
            return []
        with self._connected() as connection:
            return connection.execute(query, keys).fetchall()

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"cache {str(self.path)!r} is damaged: delete it and repeat the call to create it again ({error!r})"
            ) from error

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # No write-ahead log, because it does not work on the network drives of clusters.
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                for statement in self.schema:
                    connection.execute(statement)
                yield connection
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"cache {str(self.path)!r} cannot be used ({error}): use a file written by this package, or a new one "
                f"in a writable folder with free disk space"
            ) from error


class ArrayStore(Store):
    """A SQLite file of `(T, E)` fp16 arrays by key, of limited size; the oldest arrays are removed first.

    Args:
        path: the file; it is created with its folder when the first array is stored.
        max_bytes: the maximum total size of the arrays; the space of removed arrays is reused.
    """

    table = "arrays"
    columns = "key, value, size"
    schema = (
        "CREATE TABLE IF NOT EXISTS arrays (number INTEGER PRIMARY KEY, key BLOB UNIQUE, size INTEGER, value BLOB)",
        "CREATE INDEX IF NOT EXISTS sizes ON arrays (number, size)",  # avoids reading the arrays for their sizes
    )

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        super().__init__(path)
        self.max_bytes = max_bytes

    def get_or_compute(self, keys: Sequence[bytes], make: MakeArrays, *, width: int) -> list[np.ndarray]:
        """Return the fp16 arrays of distinct keys; `make` computes those not in the file."""
        rows = list(self._rows(keys))
        with self._undamaged():
            arrays = {key: np.frombuffer(value, np.float16, size // 2).reshape(-1, width) for key, value, size in rows}
        missing = [i for i, key in enumerate(keys) if key not in arrays]
        if missing:
            new = {keys[i]: array.astype(np.float16) for i, array in zip(missing, make(missing), strict=True)}
            rows = [(key, a.nbytes, a.tobytes()) for key, a in new.items() if a.nbytes <= self.max_bytes]
            with self._connected() as connection:
                connection.executemany("INSERT OR IGNORE INTO arrays (key, size, value) VALUES (?, ?, ?)", rows)
                (total,) = connection.execute("SELECT sum(size) FROM arrays").fetchone()
                if (total or 0) > self.max_bytes:
                    newest = "SELECT number, sum(size) OVER (ORDER BY number DESC) AS total FROM arrays"
                    old = f"SELECT number FROM ({newest}) WHERE total > ?"
                    connection.execute(f"DELETE FROM arrays WHERE number IN ({old})", [self.max_bytes])
            arrays |= new
        return [arrays[key].copy() for key in keys]  # torch needs writable arrays
