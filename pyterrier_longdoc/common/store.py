"""Values on disk by key, so that another run need not compute or pay for them again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .files import full_path, undamaged

Key = str | bytes
"""A hash of everything a value depends on, as hexadecimal digits or bytes."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS store (key BLOB PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_LOOKUP = 500
"""Number of keys per query; SQLite allows at least 999."""

_DIGEST = 16
"""Length of the digest before a value."""


class Store:
    """A SQLite file of JSON values by key.

    Several threads and processes can use the same file, and stored values survive if the process is killed. The first
    value of a key is kept. Floats are restored exactly. The file is opened for every use, so that the object can be
    pickled and used after a fork and need not be closed.

    Args:
        path: the file; it is created with its folder when the first value is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(full_path(path))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __len__(self) -> int:
        return sum(count for (count,) in self._select("SELECT count(*) FROM store"))

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """Return the stored values of these keys; ValueError if one of them was changed in the file."""
        wanted, rows = list(keys), []
        for start in range(0, len(wanted), _LOOKUP):
            batch = wanted[start : start + _LOOKUP]
            marks = ",".join("?" * len(batch))
            rows += self._select(f"SELECT key, value FROM store WHERE key IN ({marks})", batch)
        with undamaged(self.path, "delete it and repeat the call to create it again"):
            if any(text != _with_digest(key, text[_DIGEST:]) for key, text in rows):
                raise LookupError("a value is not as it was stored")
            return {key: json.loads(text[_DIGEST:]) for key, text in rows}

    def put_many(self, items: Mapping[Key, Any]) -> None:
        """Store JSON-serializable values; after an interruption, all of them or none are stored."""
        rows = [(key, _with_digest(key, json.dumps(value))) for key, value in items.items()]
        with self._connected() as connection:
            connection.executemany("INSERT OR IGNORE INTO store VALUES (?, ?)", rows)

    def _select(self, query: str, keys: Sequence[Key] = ()) -> list[Any]:
        if not self.path.exists():
            return []
        with self._connected() as connection:
            return connection.execute(query, keys).fetchall()

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


def _with_digest(key: Key, text: str) -> str:
    """Return a value, as JSON, after a digest of it and its key, because SQLite does not notice changes."""
    content = (key.encode() if isinstance(key, str) else key) + text.encode()
    return blake2b(content, digest_size=_DIGEST // 2).hexdigest() + text
