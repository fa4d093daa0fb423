"""MORES+, experimental: a decoder reads the query and looks at all windows at once, which were encoded apart.

L. Gao, J. Callan, "Long Document Re-ranking with Modular Re-ranker", SIGIR 2022, as far as it is known: their code is
incomplete, and in Boytsov et al. 2025 (appendix, "Miscellaneous models") a reimplementation did not beat BM25. In that
one, windows of different documents got mixed up wherever a batch held more than one; here each document has its own
memory. Shapes: B documents, Q tokens of a query with its special tokens, D tokens of all windows of a document with
their special tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from .architectures import quiet
from .backbones import Backbone, Representation, check_folder, load_tokenizer
from .batching import Encoded, PairLayout
from .heads.base import Head
from .reports import RawExplanation
from .scorer import LongDocScorer
from .states import StateEncoder
from .steps import TOKEN_BLOCK_CHARACTERS
from .windows import Windows

DEFAULT_BART = "facebook/bart-base"


class ExperimentalWarning(UserWarning):
    """A model is used of which no published result could be confirmed."""


@dataclass(eq=False)
class EncoderDecoder(Backbone):
    """BART taken apart.

    Attributes:
        decoder: without its table of word embeddings, which it shares with the encoder.
    """

    decoder: Any = field(kw_only=True)


def load_encoder_decoder(name: str) -> EncoderDecoder:
    """Loads BART in fp32.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Raises:
        ValueError: if it is no BART, or weights are missing.
    """
    check_folder(name)
    config = AutoConfig.from_pretrained(name)
    if config.model_type != "bart":
        raise ValueError(f"checkpoint {name!r} is of type {config.model_type!r}; MORES+ needs 'bart'")
    with quiet():
        model, report = AutoModel.from_pretrained(
            name, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {missing[:3]}")
    return _take_apart(model, load_tokenizer(name))


def build_encoder_decoder(description: dict[str, Any], tokenizer: Any) -> EncoderDecoder:
    """The modules that `EncoderDecoder.describe` described, with random weights, for strict loading afterwards."""
    fields = dict(description["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.float32
    return _take_apart(AutoModel.from_config(config), tokenizer)


def _take_apart(model: Any, tokenizer: Any) -> EncoderDecoder:
    decoder = model.decoder
    decoder.embed_tokens = None
    return EncoderDecoder(model.encoder, tokenizer, None, None, "cls", decoder=decoder)


@dataclass(frozen=True, eq=False)
class Memory(Encoded):
    """One vector per document, and what it was made of.

    Attributes:
        queries: B arrays of token ids.
        windows: for each document the `(T, H)` states of its windows.
    """

    queries: Sequence[np.ndarray] = ()
    windows: Sequence[Sequence[torch.Tensor]] = ()


class MoresScorer(LongDocScorer):
    """Scores (query, text) pairs: windows encoded apart, a decoder over the query, the final layer.

    The decoder's attention within the query is bidirectional. Its state at the query's last token goes through a
    dense layer with tanh, as in BART's classifiers. States of windows are remembered while it scores, within a bound
    on their memory (`states.cache`), until the weights change.

    Args:
        backbone: the loaded encoder and decoder.

    All other arguments: see `LongDocScorer`.
    """

    build_backbone = staticmethod(build_encoder_decoder)

    def __init__(self, backbone: EncoderDecoder, windows: Windows, head: Head, **reading: Any) -> None:
        self._text_layout = backbone.text_layout()[0]
        super().__init__(backbone, windows, head, **reading)
        self.decoder = backbone.decoder
        width = backbone.hidden_size
        self.representation = Representation(nn.Linear(width, width), nn.Tanh(), dropout=0.1)
        self.states = StateEncoder()

    def _capacity(self, max_query_len: int, layout: PairLayout) -> int | None:
        if self._max_length is None:
            return None
        room = self._max_length - self._text_layout.specials
        return room if max_query_len <= room else room - max_query_len

    def block_characters(self) -> int:
        """See the base class."""
        return TOKEN_BLOCK_CHARACTERS

    def _encode_windows(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        on_share: Callable[[float], None] | None,
    ) -> Encoded:
        flat = [window for group in windows for window in group]
        layout = self._text_layout.fixed(0, self.windows.largest) if self.pad_query else self._text_layout
        states = iter(self.states(self.encoder, nn.Identity(), flat, layout))
        of_document = [[next(states) for _ in group] for group in windows]
        vectors = self._decode(query_ids, of_document, on_share)
        mask = torch.ones(len(windows), 1, dtype=torch.bool, device=vectors.device)
        return Memory(vectors.unsqueeze(1), mask, queries=query_ids, windows=of_document)

    def _explain(self, encoded: Encoded) -> list[RawExplanation]:
        if not isinstance(encoded, Memory):
            raise TypeError("only documents that this scorer has encoded can be explained")
        pairs = [
            (query, [window]) for query, group in zip(encoded.queries, encoded.windows, strict=True) for window in group
        ]
        vectors = self._decode([query for query, _ in pairs], [group for _, group in pairs], None).unsqueeze(1)
        scores = iter(self.head(Encoded(vectors, torch.ones_like(vectors[..., 0], dtype=torch.bool))).tolist())
        return [RawExplanation([next(scores) for _ in group], None, None) for group in encoded.windows]

    def _decode(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[torch.Tensor]],
        on_share: Callable[[float], None] | None,
    ) -> torch.Tensor:
        """`(B, H)` vectors in fp32, made in batches of memories of like length."""
        memories = [torch.cat(list(group)) for group in windows]
        order = sorted(range(len(memories)), key=lambda i: len(memories[i]))
        vectors = []
        for rows in self.encoder.passes([len(memories[i]) for i in order], torch.tensor(order)):
            chosen = rows.tolist()
            vectors.append(self._decode_batch([query_ids[i] for i in chosen], [memories[i] for i in chosen]))
            if on_share is not None:
                on_share(len(chosen) / len(order))
        return torch.cat(vectors)[torch.tensor(order, device=self.device).argsort()]

    def _decode_batch(self, query_ids: list[np.ndarray], memories: list[torch.Tensor]) -> torch.Tensor:
        empty = np.zeros(0, dtype=np.int32)
        batch = self._text_layout.collate([empty] * len(query_ids), [[query] for query in query_ids], self.device)
        memory = nn.utils.rnn.pad_sequence(memories, batch_first=True)  # (B, D, H)
        lengths = torch.tensor([len(m) for m in memories], device=self.device)
        seen = torch.arange(memory.shape[1], device=self.device) < lengths.unsqueeze(1)  # (B, D)
        states = self.decoder(
            inputs_embeds=self.encoder.backbone.embed_tokens(batch.input_ids),
            attention_mask=_bidirectional(batch.attention_mask),
            encoder_hidden_states=memory,
            encoder_attention_mask=seen.long(),
            use_cache=False,
        ).last_hidden_state  # (B, Q, H)
        last = states[torch.arange(len(states), device=self.device), batch.lengths - 1]
        return self.representation(last).float()


def _bidirectional(mask: torch.Tensor) -> torch.Tensor:
    """`(B, 1, Q, Q)` to add to attention logits: every real token sees every real token; a decoder's own is causal."""
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return hidden[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
