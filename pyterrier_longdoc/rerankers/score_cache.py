"""Scores on disk: a second run reads what the first has scored, and an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.coverage import Coverage, Reading, check_finite
from ..modelling.checkpoint import Weights
from ..modelling.devices import resolve_dtype
from ..modelling.embed import BiEncoderScorer
from ..modelling.scorer import LongDocScorer
from ..modelling.texts import as_json
from ..modelling.windows import windows_to_config
from .biencoder import BiEncoder

FORMAT = 1
"""Part of every key; raise it when scores of the same weights and texts change."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS scores (
    key BLOB PRIMARY KEY,
    score REAL NOT NULL,
    tokens INTEGER NOT NULL,
    tokens_read INTEGER NOT NULL,
    windows INTEGER NOT NULL
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
                query = f"SELECT key, score, tokens, tokens_read, windows FROM scores WHERE key IN ({marks})"
                for key, score, *counts in connection.execute(query, some):
                    found[key] = CachedScore(score, Reading(*counts))
        return found

    def put(self, entries: dict[bytes, CachedScore]) -> None:
        """Stores scores, all of them or, if it is interrupted, none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [(key, entry.score, *asdict(entry.reading).values()) for key, entry in entries.items()]
        with self._connected() as connection:
            connection.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?, ?, ?, ?)", rows)

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


def fingerprint(weights: Weights, dtype: torch.dtype) -> bytes:
    """A hash of all that a score depends on besides query and text: weights, tokenizer, settings, precision."""
    scorer = weights.scorer
    settings = {
        "format": FORMAT,
        "head": weights.head,
        "windows": windows_to_config(scorer.windows),
        "reading": scorer.reading(),
        "encoder": weights.backbone.describe(),
        "dtype": str(dtype),
        "device": scorer.device.type,
        "runtime": scorer.encoder.runtime.name,
    }
    if scorer.preselect is not None:
        settings["preselect"] = scorer.preselect.identity()
    return _digest(settings, scorer)


def model_fingerprint(model: Any) -> bytes:
    """The same for a transformer: a reranker, or a bi-encoder."""
    if isinstance(model, BiEncoder):
        scorer = model.load_scorer()
        dtype = resolve_dtype(model.dtype, scorer.device)
        return _digest({**scorer.describe(), "dtype": str(dtype), "device": scorer.device.type}, scorer)
    weights = model._load_weights()
    return fingerprint(weights, model._precision(weights.scorer))


def _digest(settings: dict[str, Any], scorer: LongDocScorer | BiEncoderScorer) -> bytes:
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=32)
    tokenizer = as_json(scorer.tokenizer)
    if tokenizer is None:
        raise ValueError(
            "scores of this model cannot be kept, because a step of its tokenizer is written in Python, of which it "
            "cannot be told whether it stays the same: leave score_cache out"
        )
    digest.update(tokenizer.encode())
    for name, value in sorted(scorer.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def score_with_cache(
    cache: ScoreCache,
    weights: Weights,
    queries: Sequence[str],
    texts: Sequence[str],
    *,
    dtype: torch.dtype,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, Coverage]:
    """As `scorer.score`; pairs that are in the cache are not encoded, and new ones are stored block by block.

    Args:
        cache: read and written.
        weights: the model.
        queries: R queries.
        texts: R texts.
        dtype: precision of the encoder.
        on_rows: called with the number of rows that are done, for a progress bar.

    Returns:
        `(R,)` float64 scores, and what was read of the texts, cached ones included.

    Raises:
        FloatingPointError: if a score is not finite; it is not stored.
        ValueError: if the file is no cache or cannot be written.
    """
    prefix = fingerprint(weights, dtype)
    keys = [pair_key(prefix, query, text) for query, text in zip(queries, texts, strict=True)]
    known = cache.get(list(dict.fromkeys(keys)))
    new = [row for row, key in enumerate(keys) if key not in known]
    if on_rows is not None and len(new) < len(keys):
        on_rows(len(keys) - len(new))
    scorer = weights.scorer
    for rows, scores, readings in scorer.stream(
        [queries[row] for row in new], [texts[row] for row in new], dtype=dtype, on_rows=on_rows
    ):
        block = {
            keys[new[same[0]]]: CachedScore(float(score), reading)
            for same, score, reading in zip(rows, scores, readings, strict=True)
        }
        checked = np.zeros(len(keys))
        checked[[new[same[0]] for same in rows]] = scores
        check_finite(checked)
        cache.put(block)
        known.update(block)
    coverage = Coverage(dtype=scorer.coverage.dtype)
    coverage.add_encoded(scorer.coverage.tokens_encoded, scorer.coverage.tokens_computed)
    coverage.add_queries(scorer.query_lengths(list(dict.fromkeys(queries))), scorer.max_query_len)
    per_text = dict(zip(texts, keys, strict=True)).values() if scorer.preselect is None else dict.fromkeys(keys)
    for key in per_text:
        coverage.add(known[key].reading)
    return np.array([known[key].score for key in keys]), coverage


def pair_key(prefix: bytes, query: str, text: str) -> bytes:
    """The key of a pair: its query and text hashed behind the model's fingerprint."""
    first, second = query.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")
    content: Any = hashlib.blake2b(prefix + len(first).to_bytes(8, "little"), digest_size=20)
    content.update(first)
    content.update(second)
    return bytes(content.digest())
