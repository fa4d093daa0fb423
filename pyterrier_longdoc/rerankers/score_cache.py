"""Scores on disk: a second run reads what the first has scored, and an interrupted run goes on where it was."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..common.coverage import Reading, Scored
from ..common.documents import Text, as_document
from ..common.registry import own_code_in
from ..modelling.scorer import LongDocScorer
from ..modelling.texts import numbered

FORMAT = 3
"""Part of every key; raise it when scores of the same weights and texts change."""

_READING = tuple(f.name for f in fields(Reading))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS scores (
    key BLOB PRIMARY KEY,
    score REAL NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in _READING)}
) WITHOUT ROWID
"""
_LOOKUP = 500
"""Keys in one query; SQLite takes at least 999."""


@dataclass(frozen=True)
class CachedScore:
    """A score, and what was read of the text for it."""

    score: float
    reading: Reading


class ScoreCache:
    """A SQLite file of scores, by what they depend on: weights, settings, query and text.

    Texts are not stored, only hashes. Several processes may use one file; an entry is never overwritten.

    Args:
        path: the file; it is made with its folder when the first score is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        with self._connected() as connection:
            return int(connection.execute("SELECT count(*) FROM scores").fetchone()[0])

    def get(self, keys: Sequence[bytes]) -> dict[bytes, CachedScore]:
        """The stored scores among these keys."""
        if not self.path.exists():
            return {}
        found = {}
        with self._connected() as connection:
            for start in range(0, len(keys), _LOOKUP):
                some = keys[start : start + _LOOKUP]
                marks = ",".join("?" * len(some))
                query = f"SELECT key, score, {', '.join(_READING)} FROM scores WHERE key IN ({marks})"
                for key, score, *counts in connection.execute(query, some):
                    found[key] = CachedScore(score, Reading(*counts))
        return found

    def put(self, entries: dict[bytes, CachedScore]) -> None:
        """Stores scores, all of them or, if it is interrupted, none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [(key, entry.score, *asdict(entry.reading).values()) for key, entry in entries.items()]
        marks = ",".join("?" * (2 + len(_READING)))
        with self._connected() as connection:
            connection.executemany(f"INSERT OR IGNORE INTO scores VALUES ({marks})", rows)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute(_SCHEMA)
                yield connection
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"score_cache={str(self.path)!r} cannot be used ({error}): give a file that this package made, or the "
                f"name of a new one in a folder that can be written to"
            ) from error


def score_with_cache(
    cache: ScoreCache,
    scorer: LongDocScorer,
    identity: dict[str, Any],
    queries: Sequence[str],
    texts: Sequence[Text],
    *,
    bar: Any = None,
) -> Scored:
    """As `scorer.score`; pairs that are in the cache are not encoded, and new ones are stored block by block.

    Args:
        cache: read and written.
        scorer: the model.
        identity: all that its scores depend on besides query and text, JSON-able.
        queries: R queries.
        texts: R texts.
        bar: see `LongDocScorer.score`; it counts what is not in the cache.

    Returns:
        Scores, and what was read of the texts, cached ones included.

    Raises:
        FloatingPointError: if a score is not finite; it is not stored.
        ValueError: if the file is no cache or cannot be written.
    """
    keys, known = look_up_pairs(cache, identity, queries, texts)
    new = [row for row, key in enumerate(keys) if key not in known]

    def store(rows: list[list[int]], scores: np.ndarray, readings: Sequence[Reading]) -> None:
        if np.isfinite(scores).all():  # else the run ends with an error
            found = zip(rows, scores, readings, strict=True)
            block = {keys[new[own[0]]]: CachedScore(float(score), reading) for own, score, reading in found}
            cache.put(block)
            known.update(block)

    fresh = scorer.score([queries[row] for row in new], [texts[row] for row in new], bar=bar, on_block=store)
    census, done = scorer.census(), fresh.coverage
    census.coverage.tokens_encoded, census.coverage.tokens_computed = done.tokens_encoded, done.tokens_computed
    census.coverage.windows_cut = done.windows_cut
    rows: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    found = [known[key] for key in rows]
    first = [own[0] for own in rows.values()]
    asked, query_of_row = numbered(queries)
    query_ids = scorer.read_queries(asked, census)
    census.add(
        [queries[row] for row in first],
        [texts[row] for row in first],
        [query_ids[query_of_row[row]] for row in first],
        [entry.reading for entry in found],
    )
    scored = Scored(len(keys), census.coverage)
    scored.add(rows.values(), np.array([entry.score for entry in found]))
    return scored.checked()


def look_up_pairs(
    cache: ScoreCache, identity: dict[str, Any], queries: Sequence[str], texts: Sequence[Text]
) -> tuple[list[bytes], dict[bytes, CachedScore]]:
    """The key of each of R pairs, and what is in the cache of these; for the arguments see `score_with_cache`.

    Of scores that depend on a user's own code none counts.
    """
    prefix = blake2b(json.dumps([FORMAT, identity], sort_keys=True).encode(), digest_size=32).digest()
    keys = [pair_key(prefix, query, text) for query, text in zip(queries, texts, strict=True)]
    return keys, {} if own_code_in(identity) else cache.get(list(dict.fromkeys(keys)))


def pair_key(prefix: bytes, query: str, text: Text) -> bytes:
    """The key of a pair: its query and text hashed behind the model's fingerprint."""
    document = as_document(text)
    content: Any = blake2b(prefix, digest_size=20)
    for part in (query, document.repeated, document.text):
        written = part.encode("utf-8", "surrogatepass")
        content.update(len(written).to_bytes(8, "little"))
        content.update(written)
    return bytes(content.digest())
