"""What models remember of texts, within bounds on memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

CACHED_BYTES = 256 * 2**20
"""Most memory for remembered embeddings of one encoder; the least recently used ones go first."""

Content = tuple[OrderedDict[Hashable, np.ndarray], int]
"""Arrays by key, the least recently used first, and how many bytes they count."""

_CACHES: weakref.WeakSet[EmbeddingCache] = weakref.WeakSet()


class EmbeddingCache:
    """Remembers embeddings, or the states or ids of all tokens of a text, within a bound; a copy starts empty.

    Args:
        max_bytes: of the arrays together.
        entry_bytes: what an entry counts besides its array; matters where arrays are small.
    """

    def __init__(self, max_bytes: int = CACHED_BYTES, entry_bytes: int = 0) -> None:
        _CACHES.add(self)
        self.max_bytes = max_bytes
        self.entry_bytes = entry_bytes
        self._vectors: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingCache, (self.max_bytes, self.entry_bytes)

    def __len__(self) -> int:
        return len(self._vectors)

    def get(self, key: Hashable) -> np.ndarray | None:
        """The `(H,)` embedding or `(T, H)` states that were put under this key, if they are still there."""
        vector = self._vectors.get(key)
        if vector is not None:
            self._vectors.move_to_end(key)
        return vector

    def clear(self) -> None:
        """Forgets everything."""
        self._vectors.clear()
        self._bytes = 0

    def put(self, key: Hashable, vector: np.ndarray) -> None:
        """Remembers an `(H,)` embedding or `(T, H)` states; not what alone exceeds the bound."""
        if key not in self._vectors and self._size(vector) <= self.max_bytes:
            # A row of a batch would keep the whole batch alive.
            self._vectors[key] = vector.copy()
            self._bytes += self._size(vector)
        while self._bytes > self.max_bytes:
            _, oldest = self._vectors.popitem(last=False)
            self._bytes -= self._size(oldest)

    def through(
        self,
        setting: Hashable,
        sequences: Sequence[np.ndarray],
        make: Callable[[list[np.ndarray]], Iterable[np.ndarray]],
    ) -> list[np.ndarray]:
        """What is made of distinct token sequences: what is remembered, and the rest made anew and remembered.

        Args:
            setting: all else that it depends on.
            sequences: arrays of token ids.
            make: makes the arrays of those that are not remembered.
        """
        keys = [(setting, sequence.tobytes()) for sequence in sequences]
        found: list[Any] = list(map(self.get, keys))
        new = [i for i, array in enumerate(found) if array is None]
        if new:
            for i, array in zip(new, make([sequences[i] for i in new]), strict=True):
                self.put(keys[i], array)
                found[i] = array
        return found

    def swap(self, content: Content | None = None) -> Content:
        """Takes other content in place of its own, which it returns; None for nothing."""
        own = self._vectors, self._bytes
        self._vectors, self._bytes = (OrderedDict(), 0) if content is None else content
        return own

    def _size(self, vector: np.ndarray) -> int:
        return vector.nbytes + self.entry_bytes


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Within it all loaded models start from nothing, as in a first run; afterwards they remember what they did before.

    Whoever enters it sees to it that nothing is remembered of weights that have changed since.
    """
    caches = list(_CACHES)
    before = [cache.swap() for cache in caches]
    try:
        yield
    finally:
        for cache, content in zip(caches, before, strict=True):
            cache.swap(content)


def forget_embeddings() -> None:
    """Empties what all loaded models remember, tokens included, so that a measurement starts from nothing."""
    for cache in list(_CACHES):
        cache.clear()
