"""Encoders shared by all bi-encoders of a process, and the embeddings they have already made."""

from __future__ import annotations

import weakref

from torch import nn

from .backbones import Backbone, load_backbone
from .caches import EmbeddingCache
from .changes import WeightsWatch
from .embedding_settings import EmbeddingSettings, embedding_settings
from .packaged import encoder_folder
from .token_cache import TokenCache


class SharedEncoder:
    """A loaded encoder, which this package never trains, with its remembered embeddings and tokens.

    Args:
        backbone: the loaded encoder.
        settings: how it was trained to embed.
    """

    def __init__(self, backbone: Backbone, settings: EmbeddingSettings) -> None:
        self.backbone = backbone
        self.settings = settings
        self.cache = EmbeddingCache()
        self.tokens = TokenCache()
        self._weights = WeightsWatch()

    def begin(self, encoder: nn.Module) -> None:
        """At the start of a run: forgets the embeddings if someone has changed the weights.

        Args:
            encoder: what makes embeddings of this encoder's states.
        """
        if self._weights.changed(encoder, contents=True):
            self.cache.clear()


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
