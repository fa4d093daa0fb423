"""Values on disk by key, so that a second run need not compute or pay for them again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

Key = str | bytes
"""A hash of all that a value depends on, in hexadecimal digits or bytes."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS store (key BLOB PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_LOOKUP = 500
"""Keys in one query; SQLite takes at least 999."""


class Store:
    """A SQLite file of JSON values by key.

    Several threads and processes may use one file at the same time, and a kill loses no stored value. The first value
    of a key stays. Floats come back bit for bit. Every use opens the file anew, so that there is nothing to close, and
    an object can be pickled and used after a fork.

    Args:
        path: the file; it is made with its folder when the first value is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __len__(self) -> int:
        return sum(count for (count,) in self._select("SELECT count(*) FROM store"))

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """Return the stored values among these keys."""
        key_list, values = list(keys), dict[Key, Any]()
        for start in range(0, len(key_list), _LOOKUP):
            batch = key_list[start : start + _LOOKUP]
            marks = ",".join("?" * len(batch))
            rows = self._select(f"SELECT key, value FROM store WHERE key IN ({marks})", batch)
            values |= {key: json.loads(value) for key, value in rows}
        return values

    def put_many(self, items: Mapping[Key, Any]) -> None:
        """Store JSON-able values; after an interruption all of them or none."""
        rows = [(key, json.dumps(value)) for key, value in items.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connected() as connection:
            connection.executemany("INSERT OR IGNORE INTO store VALUES (?, ?)", rows)

    def values(self) -> Iterator[Any]:
        """Yield all values."""
        return (json.loads(value) for (value,) in self._select("SELECT value FROM store"))

    def _select(self, query: str, keys: Sequence[Key] = ()) -> list[Any]:
        if not self.path.exists():
            return []
        with self._connected() as connection:
            return connection.execute(query, keys).fetchall()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # No write-ahead log: it does not work on the network drives of clusters.
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute(_SCHEMA)
                yield connection
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"cache {str(self.path)!r} cannot be used ({error}): give a file that this package made, or the name "
                f"of a new one in a folder that can be written to"
            ) from error
