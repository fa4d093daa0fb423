"""Transformers over vectors instead of words: PARADE's aggregators and LATEIR's interaction.

Shapes: B sequences, n vectors of one part, S vectors of the longest sequence, E width of the input vectors,
A width of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import BertConfig, BertModel

from .backbones.backbone import values_of
from .backbones.families import family_of
from .backbones.load import build_backbone, load_encoder


@dataclass(eq=False)
class VectorTransformer:
    """A transformer without its word embeddings, which are not used."""

    model: Any  # the transformer, without pooler and head
    special_embeddings: torch.Tensor | None  # `(2, E)` word embeddings of `[CLS]` and `[SEP]`, if it has them
    max_vectors: int | None  # the longest sequence; None without a limit
    width: int  # E

    @property
    def output_width(self) -> int:
        """A, the width of the states."""
        return int(self.model.config.hidden_size)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able configuration from which `vector_transformer` creates the same modules."""
        return values_of(self.model.config)


def vector_transformer(source: str | dict[str, Any]) -> VectorTransformer:
    """Load a checkpoint's layers, or create those of a configuration with random weights."""
    if isinstance(source, dict):
        backbone = build_backbone({"config": source, "cross_encoder": False}, None)
    else:
        backbone = load_encoder(source)
    if not backbone.family.is_plain:
        raise ValueError(
            f"a checkpoint of type {backbone.family.name!r} cannot aggregate vectors: choose an encoder that "
            f"attends to its whole input, such as BERT, RoBERTa, ELECTRA, DeBERTa or ModernBERT"
        )
    words, tokenizer = backbone.model.get_input_embeddings().weight.detach(), backbone.tokenizer
    special_embeddings = None
    if tokenizer is not None and None not in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        special_embeddings = words[[tokenizer.cls_token_id, tokenizer.sep_token_id]].clone()
    return VectorTransformer(_without_words(backbone.model), special_embeddings, backbone.longest_input, words.shape[1])


def random_transformer(
    width: int, layers: int, attention_heads: int, max_vectors: int, dropout: float
) -> VectorTransformer:
    """Create BERT layers with random weights over vectors of this width."""
    config = BertConfig(
        vocab_size=1,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=attention_heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_vectors,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertModel(config, add_pooling_layer=False)
    return VectorTransformer(_without_words(model), None, max_vectors, width)


def _without_words(model: Any) -> Any:
    words = model.get_input_embeddings()
    owner, name = next((m, name) for m in model.modules() for name, child in m.named_children() if child is words)
    setattr(owner, name, None)
    return model


def without_positions(model: Any) -> Any:
    """Return the same transformer without positions: the order of the vectors does not matter."""
    family = family_of(model.config)
    if family.positions != "learned":
        raise ValueError(
            f"positions=False is not possible with an aggregator of type {family.name!r}: its layers use them"
        )
    model.embeddings = _VectorsAsTheyAre()
    return model


def projection(width: int, output_width: int) -> nn.Module:
    """Return a linear layer from one width to another; the identity if they are equal."""
    if width == output_width:
        return nn.Identity()
    layer = nn.Linear(width, output_width)
    nn.init.xavier_uniform_(layer.weight)
    return layer


def random_vector(width: int) -> nn.Parameter:
    """Return a special vector with random values, N(0, 1) / sqrt(width) as in Boytsov et al. 2025."""
    return nn.Parameter(torch.randn(width) / width**0.5)


class Part(NamedTuple):
    """Some of the vectors of a sequence."""

    vectors: torch.Tensor  # `(B, n, E)`, or one `(E,)` for all
    mask: torch.Tensor  # `(B, n)` bool, or `(B, 1)`
    segment: int  # the segment of all vectors
    fixed: bool = False  # whether padding stays in place, as in the papers' fixed input layout


def join(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Concatenate the real vectors of all parts.

    Padding leaves no gap, unless it is the same in any batch: positions must not depend on the batch. Returns
    `(B, S, E)` vectors, a `(B, S)` mask and `(B, S)` segments.
    """
    vectors = torch.cat([p.vectors.expand(len(p.mask), 1, -1) if p.vectors.dim() == 1 else p.vectors for p in parts], 1)
    mask = torch.cat([part.mask for part in parts], 1)
    types = torch.cat([torch.full_like(part.mask, part.segment, dtype=torch.long) for part in parts], 1)
    occupied = torch.cat([part.mask | part.fixed for part in parts], 1)
    order = (~occupied).long().argsort(dim=1, stable=True)[:, : int(occupied.sum(1).max())]  # (B, S)
    index = order.unsqueeze(-1).expand(-1, -1, vectors.shape[-1])
    return vectors.gather(1, index), mask.gather(1, order), types.gather(1, order)


def first_state(model: Any, vectors: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """Return the `(B, A)` states of the first vectors."""
    inputs = {"inputs_embeds": vectors, "attention_mask": mask.long()}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = types
    return model(**inputs).last_hidden_state[:, 0]


class _VectorsAsTheyAre(nn.Module):
    """Replace an embedding module: vectors get neither positions nor segments."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        return inputs_embeds
