"""Scores on disk: a second run reads the scores of the first, and an interrupted run can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ..common.coverage import PairCoverage, Scored
from ..common.frames import Instructed, Question, Text, as_document, words_of_query
from ..common.key import NoKeyError
from ..common.key import key as key_of
from ..common.store import Key, Store
from ..common.warnings import warn_once
from ..modelling.model import Model

CACHE_FORMAT = 4
"""Part of every key; increase it when the entries change."""


def score_with_cache(
    reranker: Any, model: Model, queries: Sequence[Question], texts: Sequence[Text], bar: Any
) -> Scored:
    """Score R pairs as `model.score`; those in the file are not encoded, and new ones are stored block by block.

    The file contains hashes, no texts; several processes can use it. The coverage also counts stored pairs; the bar
    does not. Scores of a reranker without a key are not stored.
    """
    path = reranker.score_cache
    try:
        scored_by = key_of(reranker)
    except NoKeyError as error:
        warn_once(reranker, f"score_cache={str(path)!r} is not used: {error}.", UserWarning)
        return model.score(queries, texts, bar=bar)
    # Entries of the cache also contain the account of what was read.
    account = model.settings.windows_argument, model.settings.max_windows
    store, keys = Store(path), keys_of_pairs(key_of([scored_by, account]), queries, texts)
    entries: dict[Key, tuple[float, PairCoverage]] = {
        key: (score, PairCoverage("", *reading))  # the query is not stored
        for key, (score, *reading) in store.get_many(dict.fromkeys(keys)).items()
    }
    new = [row for row, key in enumerate(keys) if key not in entries]

    def put(rows: list[list[int]], scores: np.ndarray, readings: Sequence[PairCoverage]) -> None:
        if np.isfinite(scores).all():  # otherwise the run ends with an error
            places = [keys[new[group[0]]] for group in rows]
            block: dict[Key, Any] = dict(zip(places, zip(scores.tolist(), readings, strict=True), strict=True))
            store.put_many({key: [score, *astuple(reading)[1:]] for key, (score, reading) in block.items()})
            entries.update(block)

    fresh = model.score([queries[row] for row in new], [texts[row] for row in new], bar=bar, on_block=put).coverage
    coverage = model.new_coverage()
    for name in ("tokens_encoded", "tokens_computed", "longest_input"):
        setattr(coverage, name, getattr(fresh, name))
    words = map(words_of_query, queries)
    rows = {key: replace(entries[key][1], query=query) for key, query in zip(keys, words, strict=True)}
    coverage.add(rows.values())
    scored = Scored(len(keys), coverage)
    scored.scores[:] = [entries[key][0] for key in keys]
    return scored.checked()


def keys_of_pairs(scored_by: str, queries: Sequence[Question], texts: Sequence[Text]) -> list[bytes]:
    """Return the key of each row's score; a query's own instruction is a part of it."""
    base = blake2b(f"{CACHE_FORMAT} {scored_by}".encode(), digest_size=16)
    keys = []
    for query, text in zip(queries, texts, strict=True):
        document, digest = as_document(text), base.copy()
        instruction = [query.instruction] if isinstance(query, Instructed) else []
        for part in (words_of_query(query), document.text, document.repeated, *instruction):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
        keys.append(digest.digest())
    return keys
