"""MORES+, experimental: windows are encoded separately, and a decoder over the query looks at all of them at once.

L. Gao, J. Callan, "Long Document Re-ranking with Modular Re-ranker", SIGIR 2022, as far as it is known: their code is
incomplete. The reimplementation of Boytsov et al. 2025 (appendix, "Miscellaneous models") did not beat BM25; it mixed
up windows of different documents in a batch. Here each document has its own memory.

Shapes: B documents, T tokens of a window, Q of a query, D of all windows of a document, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from ..common.coverage import Coverage
from ..common.hub import reachable
from .backbones.classifiers import Representation
from .backbones.load import Backbone, checkpoint_config, load_pretrained, load_tokenizer
from .inputs import NOTHING, Encoded, InputFormat, Pairs, Settings, to_dense
from .late_interaction import SeparateEncoder, padded_states

DEFAULT_BART = "facebook/bart-base"


class ExperimentalWarning(UserWarning):
    """A model is used although no published result of it could be confirmed."""


@dataclass(eq=False)
class EncoderDecoder(Backbone):
    """BART as encoder and decoder."""

    decoder: Any = field(kw_only=True)


def load_encoder_decoder(name: str) -> EncoderDecoder:
    """Load BART in fp32."""
    name = reachable(name)
    checkpoint_config(name)
    config = AutoConfig.from_pretrained(name)
    if config.model_type != "bart":
        raise ValueError(f"checkpoint {name!r} is of type {config.model_type!r}; MORES+ needs 'bart'")
    return _split_model(load_pretrained(AutoModel, name, config), load_tokenizer(name))


def build_encoder_decoder(description: dict[str, Any], tokenizer: Any) -> EncoderDecoder:
    """Return the modules that `EncoderDecoder.describe` described, with random weights."""
    fields = dict(description["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.float32
    return _split_model(AutoModel.from_config(config), tokenizer)


def _split_model(model: Any, tokenizer: Any) -> EncoderDecoder:
    decoder = model.decoder
    decoder.embed_tokens = None
    return EncoderDecoder(model.encoder, tokenizer, None, None, "cls", decoder=decoder)


@dataclass(frozen=True, eq=False)
class Memory(Encoded):
    """One vector per document; vectors of single windows are computed on demand."""

    encode_windows: Callable[[], Encoded] = field(kw_only=True)

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        return self.encode_windows().each_window()


class MoresEncoder(SeparateEncoder):
    """Encodes windows separately, then decodes the query with all of them in sight: one vector for each document.

    The decoder's attention within the query is bidirectional. Its state at the query's last token goes through a
    dense layer with tanh, as in BART's classifiers.
    """

    build_backbone = staticmethod(build_encoder_decoder)

    def __init__(self, backbone: EncoderDecoder) -> None:
        super().__init__(backbone)
        self.decoder = backbone.decoder
        width = backbone.hidden_size
        self.represent = Representation(nn.Linear(width, width), nn.Tanh(), dropout=0.1)

    def make_format(self, backbone: Backbone) -> InputFormat:
        text = replace(backbone.text_format()[0], longest=backbone.longest_input)
        return replace(text, query_format=text)

    def use(self, settings: Settings) -> None:
        super().use(settings)
        self.format = replace(self.format, query_format=self.input_format)  # no layout pads a query

    def forward(self, pairs: Pairs, *, coverage: Coverage | None = None, **_: Any) -> Memory:
        """Encode documents; their vectors are the only states."""
        query, windows = pairs.by_window()
        states, counts = self.states(windows, self.format, coverage), pairs.counts
        state_iterator = iter(states)
        memories = [torch.cat(list(islice(state_iterator, count))) for count in counts]
        vectors = self._decode([pairs.queries[number] for number in pairs.query], memories)
        window_queries = [pairs.queries[number] for number in query]
        return Memory(
            cls=vectors.unsqueeze(1),
            mask=torch.ones(len(vectors), 1, dtype=torch.bool, device=vectors.device),
            encode_windows=lambda: to_dense(self._decode(window_queries, states), counts),
        )

    def _decode(self, queries: Sequence[np.ndarray], memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `(B, H)` vectors in fp32."""

        def decode(numbers: list[int]) -> torch.Tensor:
            return self._decode_batch([queries[i] for i in numbers], [memories[i] for i in numbers])

        return self.batch_by_length(list(map(len, memories)), decode)

    def _decode_batch(self, queries: list[np.ndarray], memories: list[torch.Tensor]) -> torch.Tensor:
        batch = self.input_format.collate([NOTHING] * len(queries), [[query] for query in queries], self.device)
        memory, memory_mask = padded_states(memories)  # (B, D, H), (B, D)
        states = self.decoder(
            inputs_embeds=self.backbone.embed_tokens(batch.input_ids),
            attention_mask=_bidirectional(batch.attention_mask),
            encoder_hidden_states=memory,
            encoder_attention_mask=memory_mask.long(),
            use_cache=False,
        ).last_hidden_state  # (B, Q, H)
        last = states[torch.arange(len(states), device=self.device), batch.lengths - 1]
        return self.represent(last).float()


def _bidirectional(mask: torch.Tensor) -> torch.Tensor:
    """Return `(B, 1, Q, Q)` to add to attention logits, so that every real token sees every other real token."""
    penalty = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return penalty[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
