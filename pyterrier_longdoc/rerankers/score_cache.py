"""Scores on disk: a second run reads the scores of the first, and an interrupted run can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ..common.coverage import Scored
from ..common.frames import Document, Question
from ..common.key import NoKeyError
from ..common.key import key as key_of
from ..common.store import Store
from ..common.warnings import warn_once
from ..modelling.model import Model

CACHE_FORMAT = 5
"""Part of every key; increase it when the entries change."""


def score_with_cache(
    reranker: Any, model: Model, queries: Sequence[Question], texts: Sequence[Document], bar: Any
) -> Scored:
    """Score R pairs as `model.score`; those in the file are not encoded, and new ones are stored block by block.

    The file contains hashes, no texts; several processes can use it. Neither coverage nor bar count stored pairs.
    Scores of a reranker without a key are not stored.
    """
    path = reranker.score_cache
    try:
        scored_by = key_of(reranker)
    except NoKeyError as error:
        warn_once(reranker, f"score_cache={str(path)!r} is not used: {error}.", UserWarning)
        return model.score(queries, texts, bar=bar)
    store, keys = Store(path), keys_of_pairs(scored_by, queries, texts)
    stored = store.get_many(dict.fromkeys(keys))
    new = [row for row, key in enumerate(keys) if key not in stored]

    def put(rows: list[list[int]], scores: np.ndarray) -> None:
        if np.isfinite(scores).all():  # otherwise the run ends with an error
            store.put_many({keys[new[group[0]]]: score for group, score in zip(rows, scores.tolist(), strict=True)})

    computed = model.score([queries[row] for row in new], [texts[row] for row in new], bar=bar, on_block=put)
    scores = np.array([stored.get(key, np.nan) for key in keys])
    scores[new] = computed.scores
    return Scored(scores, computed.coverage)


def keys_of_pairs(scored_by: str, queries: Sequence[Question], texts: Sequence[Document]) -> list[bytes]:
    """Return the key of each row's score; a query's own instruction is a part of it."""
    base = blake2b(f"{CACHE_FORMAT} {scored_by}".encode(), digest_size=16)
    keys = []
    for query, text in zip(queries, texts, strict=True):
        instruction, digest = [] if query.instruction is None else [query.instruction], base.copy()
        for part in (query.text, text.text, text.repeated, *instruction):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
        keys.append(digest.digest())
    return keys
