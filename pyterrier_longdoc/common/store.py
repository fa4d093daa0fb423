"""Values on disk by key, so that another run need not compute or pay for them again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

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

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __len__(self) -> int:
        return sum(count for (count,) in self._select("SELECT count(*) FROM store"))

    def get_many(self, keys: Iterable[Key], read: Callable[[Any], Any] = lambda value: value) -> dict[Key, Any]:
        """Return the stored values of these keys, converted by `read`; an error of `read` means a damaged value."""
        wanted, rows = list(keys), []
        for start in range(0, len(wanted), _LOOKUP):
            batch = wanted[start : start + _LOOKUP]
            marks = ",".join("?" * len(batch))
            rows += self._select(f"SELECT key, value FROM store WHERE key IN ({marks})", batch)
        with self._undamaged():
            return {key: read(json.loads(value)) for key, value in rows}

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
                connection.execute(_SCHEMA)
                yield connection
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"cache {str(self.path)!r} cannot be used ({error}): use a file written by this package, or a new one "
                f"in a writable folder with free disk space"
            ) from error
