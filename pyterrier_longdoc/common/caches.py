"""The memory of models for texts, within bounds."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

CACHED_BYTES = 256 * 2**20
"""Most memory for remembered embeddings of one encoder; the least recently used ones go first."""

MakeArrays = Callable[[list[np.ndarray]], Iterable[np.ndarray]]
"""Makes the arrays of token sequences, in order."""

_CACHES: weakref.WeakSet[EmbeddingCache] = weakref.WeakSet()


class EmbeddingCache:
    """Remembers embeddings, or the states or ids of all tokens of a text, within a bound; a copy starts empty.

    Several threads may use it. An entry counts `entry_bytes` besides its array, which matters where arrays are small.
    """

    def __init__(self, max_bytes: int = CACHED_BYTES, entry_bytes: int = 0) -> None:
        _CACHES.add(self)
        self.max_bytes = max_bytes
        self.entry_bytes = entry_bytes
        self._vectors: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingCache, (self.max_bytes, self.entry_bytes)

    def __len__(self) -> int:
        return len(self._vectors)

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return the `(H,)` embedding or `(T, H)` states of this key, if they are still in memory."""
        with self._lock:
            vector = self._vectors.get(key)
            if vector is not None:
                self._vectors.move_to_end(key)
            return vector

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._vectors.clear()
            self._bytes = 0

    def put(self, key: Hashable, vector: np.ndarray) -> None:
        """Remember an `(H,)` embedding or `(T, H)` states, unless it alone exceeds the bound."""
        with self._lock:
            if key not in self._vectors and self._size(vector) <= self.max_bytes:
                # A row of a batch would keep the whole batch alive.
                self._vectors[key] = vector.copy()
                self._bytes += self._size(vector)
            while self._bytes > self.max_bytes:
                _, oldest = self._vectors.popitem(last=False)
                self._bytes -= self._size(oldest)

    def through(self, setting: Hashable, sequences: Sequence[np.ndarray], make: MakeArrays) -> list[np.ndarray]:
        """Return the arrays of distinct token sequences and a setting; `make` makes those not in memory."""
        keys = [(setting, sequence.tobytes()) for sequence in sequences]
        arrays: list[Any] = list(map(self.get, keys))
        missing = [i for i, array in enumerate(arrays) if array is None]
        if missing:
            for i, array in zip(missing, make([sequences[i] for i in missing]), strict=True):
                self.put(keys[i], array)
                arrays[i] = array
        return arrays

    def _size(self, vector: np.ndarray) -> int:
        return vector.nbytes + self.entry_bytes


def forget_embeddings() -> None:
    """Empty the memory of all loaded models, tokens included, so that a measurement starts without."""
    for cache in list(_CACHES):
        cache.clear()
