"""The memory for texts: two threads may use it at the same time."""

from __future__ import annotations

import numpy as np

from pyterrier_longdoc.common.caches import EmbeddingCache

from ..support.threads import meanwhile

VECTOR = np.ones(4, np.float32)


class Key:
    """A key that lets another thread empty the cache when it is looked up for the `at`th time."""

    def __init__(self, cache: EmbeddingCache, at: int) -> None:
        self.cache, self.at, self.others = cache, at, []

    def __hash__(self) -> int:
        self.at -= 1
        if self.at == 0:
            self.others.append(meanwhile(self.cache.clear))
        return 7


def test_an_entry_can_be_removed_by_another_thread_while_it_is_read():
    cache = EmbeddingCache()
    key = Key(cache, at=0)
    cache.put(key, VECTOR)
    cache.put("a later one", VECTOR)
    key.at = 2  # it is read, then marked as used
    assert cache.get(key).tolist() == VECTOR.tolist()
    key.others[0].join()
    assert len(cache) == 0


def test_an_entry_removed_by_another_thread_is_counted_once():
    cache = EmbeddingCache(max_bytes=3 * VECTOR.nbytes)
    cache.put("first", VECTOR)
    key = Key(cache, at=2)  # it is looked for, then written
    cache.put(key, VECTOR)
    key.others[0].join()
    assert len(cache) == 0
    for name in "abcd":
        cache.put(name, VECTOR)
    assert len(cache) == 3
