"""Replies on disk: a run that was killed goes on without paying twice, a finished one can be replayed offline."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from .backends.base import Reply
from .prompts import Message

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    settings TEXT NOT NULL,
    text TEXT NOT NULL,
    input_tokens INTEGER,
    output_tokens INTEGER,
    created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)
"""


def reply_key(model: str, settings: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """What a reply depends on, as a SHA-256 in hexadecimal digits.

    Raises:
        ValueError: if a setting cannot be written as JSON.
    """
    try:
        content = json.dumps([model, dict(settings), list(messages)], sort_keys=True, ensure_ascii=True)
    except TypeError as error:
        raise ValueError(f"the settings {settings!r} of {model} cannot be a cache key: {error}") from error
    return hashlib.sha256(content.encode()).hexdigest()


class ReplayCache:
    """A sqlite file of replies, keyed by model, settings and messages.

    Prompts are not stored, only their hashes; nor are addresses and keys. Several threads and processes may use one
    file. A reply is on disk before its ranking is used.

    Args:
        path: the file; it is made with its folder when the first reply is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"ReplayCache({str(self.path)!r})"

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        with self._connected() as connection:
            return int(connection.execute("SELECT count(*) FROM replies").fetchone()[0])

    def get(self, key: str) -> Reply | None:
        """The stored reply, or None."""
        if not self.path.exists():
            return None
        with self._connected() as connection:
            found = connection.execute(
                "SELECT text, input_tokens, output_tokens FROM replies WHERE key = ?", (key,)
            ).fetchone()
        return None if found is None else Reply(*found)

    def put(self, key: str, model: str, settings: Mapping[str, Any], reply: Reply) -> None:
        """Stores a reply; the first one stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = (key, model, json.dumps(dict(settings), sort_keys=True))
        with self._connected() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO replies (key, model, settings, text, input_tokens, output_tokens) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, reply.text, reply.input_tokens, reply.output_tokens),
            )

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # One connection per use costs a fraction of a millisecond and needs no care with threads, forks and pickling.
        with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            connection.execute(_SCHEMA)
            yield connection
