"""Encoders shared by all bi-encoders of a process, and the embeddings they have already made."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from .backbones import Backbone, load_backbone
from .embedding_settings import EmbeddingSettings, embedding_settings
from .packaged import encoder_folder

CACHED_BYTES = 256 * 2**20
"""Most memory for remembered embeddings of one encoder; the least recently used ones go first."""

_CACHES: weakref.WeakSet[EmbeddingCache] = weakref.WeakSet()


class EmbeddingCache:
    """Remembers embeddings, or the states of all tokens of a text, within a bound on their memory.

    Args:
        max_bytes: of the vectors together.
    """

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        _CACHES.add(self)
        self.max_bytes = max_bytes
        self._vectors: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._bytes = 0

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
        """Remembers an `(H,)` embedding or `(T, H)` states."""
        if key in self._vectors:
            return
        # A row of a batch would keep the whole batch alive.
        self._vectors[key] = vector.copy()
        self._bytes += vector.nbytes
        while self._bytes > self.max_bytes:
            _, oldest = self._vectors.popitem(last=False)
            self._bytes -= oldest.nbytes


class SharedEncoder:
    """A loaded encoder, whose weights never change, with its remembered embeddings.

    Args:
        backbone: the loaded encoder.
        settings: how it was trained to embed.
    """

    def __init__(self, backbone: Backbone, settings: EmbeddingSettings) -> None:
        self.backbone = backbone
        self.settings = settings
        self.cache = EmbeddingCache()


_LOADED: weakref.WeakValueDictionary[tuple[str, bool], SharedEncoder] = weakref.WeakValueDictionary()


def shared_encoder(name: str, *, trust_remote_code: bool = False) -> SharedEncoder:
    """The encoder of this name, loaded once for all transformers that use it at the same time.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        trust_remote_code: run modelling code that the checkpoint brings along.
    """
    name = encoder_folder(name)
    key = (name, trust_remote_code)
    encoder = _LOADED.get(key)
    if encoder is None:
        encoder = SharedEncoder(load_backbone(name, trust_remote_code=trust_remote_code), embedding_settings(name))
        _LOADED[key] = encoder
    return encoder


def forget_embeddings() -> None:
    """Empties what all loaded encoders remember, so that a measurement starts from nothing."""
    for cache in list(_CACHES):
        cache.clear()
