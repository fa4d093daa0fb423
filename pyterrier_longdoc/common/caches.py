"""In-memory cache of embeddings."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

CACHED_BYTES = 256 * 2**20
"""Maximum size of the cache of one encoder; the least recently used embeddings are removed first."""

MakeArrays = Callable[[list[int]], Iterable[np.ndarray]]
"""Computes the arrays of keys, given by their indices in a list, in order."""

_CACHES: weakref.WeakSet[EmbeddingCache] = weakref.WeakSet()


class EmbeddingCache:
    """A thread-safe cache of limited size for embeddings or the token states of texts. A copy starts empty."""

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        _CACHES.add(self)
        self.max_bytes = max_bytes
        self._vectors: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingCache, (self.max_bytes,)

    def __len__(self) -> int:
        return len(self._vectors)

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return the `(H,)` embedding or `(T, H)` states of this key, or None if they are not cached."""
        with self._lock:
            vector = self._vectors.get(key)
            if vector is not None:
                self._vectors.move_to_end(key)
            return vector

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._vectors.clear()
            self._bytes = 0

    def put(self, key: Hashable, vector: np.ndarray) -> None:
        """Store an `(H,)` embedding or `(T, H)` states, unless they exceed the maximum size."""
        with self._lock:
            if key not in self._vectors and vector.nbytes <= self.max_bytes:
                # Copied, because a row of a batch would keep the whole batch in memory.
                self._vectors[key] = vector.copy()
                self._bytes += vector.nbytes
            while self._bytes > self.max_bytes:
                _, oldest = self._vectors.popitem(last=False)
                self._bytes -= oldest.nbytes

    def get_or_compute(self, keys: Sequence[Hashable], make: MakeArrays) -> list[np.ndarray]:
        """Return the arrays of distinct keys; `make` computes those not in the cache."""
        arrays: list[Any] = list(map(self.get, keys))
        missing = [i for i, array in enumerate(arrays) if array is None]
        if missing:
            for i, array in zip(missing, make(missing), strict=True):
                self.put(keys[i], array)
                arrays[i] = array
        return arrays


def forget_embeddings() -> None:
    """Empty the caches of all loaded models, e.g. before a measurement."""
    for cache in list(_CACHES):
        cache.clear()
