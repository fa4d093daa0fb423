"""In-memory cache of embeddings, and of the tokens of their texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np

CACHED_BYTES = 256 * 2**20
"""Maximum size of the cache of one encoder; the least recently used embeddings are removed first."""


class Sized(Protocol):
    """A value of known size: `(H,)` embeddings, `(T, H)` states, or a tokenized text."""

    @property
    def nbytes(self) -> int:
        """The size in memory."""


MakeValues = Callable[[list[int]], Iterable[Any]]
"""Computes the values of keys, given by their indices in a list, in order."""


class EmbeddingCache:
    """A thread-safe cache of limited size for the embeddings, token states and tokens of texts. A copy starts empty."""

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        self.max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Sized] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingCache, (self.max_bytes,)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Any:
        """Return the value of this key, or None if it is not cached."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def put(self, key: Hashable, value: Sized) -> None:
        """Store a value, unless it exceeds the maximum size."""
        with self._lock:
            if key not in self._values and value.nbytes <= self.max_bytes:
                # Copied, because a row of a batch would keep the whole batch in memory.
                self._values[key] = value.copy() if isinstance(value, np.ndarray) else value
                self._bytes += value.nbytes
            while self._bytes > self.max_bytes:
                _, oldest = self._values.popitem(last=False)
                self._bytes -= oldest.nbytes

    def get_or_compute(self, keys: Sequence[Hashable], make: MakeValues) -> list[Any]:
        """Return the values of distinct keys; `make` computes those not in the cache."""
        values: list[Any] = list(map(self.get, keys))
        missing = [i for i, value in enumerate(values) if value is None]
        if missing:
            for i, value in zip(missing, make(missing), strict=True):
                self.put(keys[i], value)
                values[i] = value
        return values
