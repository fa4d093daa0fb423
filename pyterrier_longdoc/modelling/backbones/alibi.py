"""BERT with linear attention biases instead of position embeddings: JINA-v2 and MosaicBERT without remote code.

Both families are BERT with ALiBi (Press et al. 2022, in its symmetric form: the bias of query i and key j is
`-slope * |i - j|`) and a gated feed-forward layer (Shazeer 2020); their checkpoints differ in the names and
arrangement of the same weights. `AlibiBert` has one arrangement; `weights_of` converts published ones to it.

Sources: JINA embeddings 2 (Günther et al. 2023), MosaicBERT (Portes et al. 2023).
Shapes: V inputs, T tokens, H hidden size, A attention heads, I width of the feed-forward layer.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

BIAS_ELEMENTS = 2**25
"""The maximum size of an attention bias in elements, 128 MB in fp32; for longer inputs, it is computed in slices."""


@dataclass(frozen=True)
class AlibiConfig:
    """Sizes of an `AlibiBert`; entries are named as in Hugging Face's BERT configuration.

    Args:
        max_position_embeddings: the longest input in training. Longer inputs do not fail.
        qk_norm: normalize queries and keys, and the sum around the attention a second time (JINA's models for code and
            its rerankers).
    """

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    type_vocab_size: int = 2
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int = 0
    qk_norm: bool = False

    model_type: ClassVar[str] = "alibi-bert"

    @classmethod
    def from_published(cls, config_json: Mapping[str, Any], *, qk_norm: bool) -> AlibiConfig:
        """Return the configuration of a JINA-v2 or MosaicBERT checkpoint from its config.json."""
        kind = config_json.get("feed_forward_type", "geglu")
        if kind != "geglu":
            raise ValueError(
                f"feed_forward_type={kind!r} is not supported; use the checkpoint's own code (trust_remote_code=True)"
            )
        field_names = {f.name for f in fields(cls)}
        values = {name: value for name, value in config_json.items() if name in field_names}
        # MosaicBERT keeps BERT's 512 positions in its configuration; the ALiBi size is that of its training.
        longest = max(config_json.get("max_position_embeddings", 0), config_json.get("alibi_starting_size", 0))
        return cls(**{**values, "max_position_embeddings": longest or cls.max_position_embeddings, "qk_norm": qk_norm})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; `AlibiConfig(**...)` without `model_type` restores them."""
        return {**asdict(self), "model_type": self.model_type}


class AlibiBert(nn.Module):
    """The encoder; called like a Hugging Face model, without pooler or head."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.apply(self._initialize)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings."""
        return self.word_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Return `last_hidden_state (V, T, H)` for `(V, T)` ids; by default no padding and types 0."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        states = self.dropout(self.norm(self.word_embeddings(input_ids) + self.type_embeddings(types)))
        bias = AlibiBias(self.config.num_attention_heads, input_ids, attention_mask)
        for layer in self.layers:
            states = layer(states, bias)
        return SimpleNamespace(last_hidden_state=states)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Layer(nn.Module):
    """Attention, then the gated feed-forward layer; each adds its input and normalizes the sum."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = _norm(config) if config.qk_norm else None
        self.up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: torch.Tensor, bias: AlibiBias) -> torch.Tensor:
        """Return the next layer's `(V, T, H)` states."""
        attended = self.attention(states, bias)
        if self.attention_norm is not None:
            attended = self.attention_norm(states + attended)
        gate, values = self.up(attended).chunk(2, dim=-1)  # (V, T, I) each
        return self.norm(attended + self.down(self.dropout(nn.functional.gelu(gate) * values)))


class Attention(nn.Module):
    """Multi-head attention with a bias, its output projection, and the normalized sum with its input."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.query_norm = _norm(config) if config.qk_norm else nn.Identity()
        self.key_norm = _norm(config) if config.qk_norm else nn.Identity()
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = _norm(config)
        self.attention_dropout = config.attention_probs_dropout_prob
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: torch.Tensor, bias: AlibiBias) -> torch.Tensor:
        """Return `(V, T, H)` states of `(V, T, H)` states."""
        query, key, value = self.query_key_value(states).chunk(3, dim=-1)
        dropout = self.attention_dropout if self.training else 0.0
        query, key, value = (self._split(x) for x in (self.query_norm(query), self.key_norm(key), value))
        attended = bias.attend(query, key, value, dropout)  # (V, A, T, H/A)
        return self.norm(states + self.dropout(self.out(attended.transpose(1, 2).flatten(2))))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AlibiBias:
    """The attention bias of a batch of `(V, T)` ids and A heads, in slices so that long inputs fit into memory."""

    def __init__(self, heads: int, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        count, self.length = input_ids.shape
        self.slopes = torch.tensor(alibi_slopes(heads), device=input_ids.device)
        self.positions = torch.arange(self.length, device=input_ids.device)
        self.padding = None if mask is None else ~mask.bool()[:, None, None]  # (V, 1, 1, T)
        rows = BIAS_ELEMENTS // (heads * self.length * (1 if mask is None else count))
        self.step = min(max(1, rows), self.length)
        # A single slice is computed once for all layers.
        self.whole = self.rows(0, self.length) if self.step == self.length else None

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return the `(V or 1, A, end - start, T)` bias of some queries for all keys; minus infinity at padding."""
        distance = (self.positions[start:end, None] - self.positions).abs()
        bias = -self.slopes[None, :, None, None] * distance
        return bias if self.padding is None else bias.masked_fill(self.padding, -math.inf)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Return the `(V, A, T, H/A)` attended values."""
        slices = []
        for start in range(0, self.length, self.step):
            end = min(start + self.step, self.length)
            bias = self.rows(start, end) if self.whole is None else self.whole
            bias = bias.to(query.dtype)
            slices.append(nn.functional.scaled_dot_product_attention(query[:, :, start:end], key, value, bias, dropout))
        return torch.cat(slices, dim=2)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of n heads: `2^(-8 i / n)` for a power of two n, else of the one below and odd ones of 2n.

    Example:
        >>> alibi_slopes(3)
        [0.0625, 0.00390625, 0.25]
    """
    n = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    odd_slopes = [2.0 ** (-8 * i / (2 * n)) for i in range(1, 2 * n, 2)]
    return slopes + odd_slopes[: heads - n]


def is_published_layout(config_json: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a JINA-v2 or MosaicBERT checkpoint."""
    if config_json.get("model_type") != "bert":
        return False
    return config_json.get("position_embedding_type") == "alibi" or "alibi_starting_size" in config_json


_NAMES = {
    "embeddings.word_embeddings": "word_embeddings",
    "embeddings.token_type_embeddings": "type_embeddings",
    "embeddings.LayerNorm": "norm",
    "attention.self.Wqkv": "attention.query_key_value",
    "attention.self.query": "attention.query_key_value/0",
    "attention.self.key": "attention.query_key_value/1",
    "attention.self.value": "attention.query_key_value/2",
    "attention.self.layer_norm_q": "attention.query_norm",
    "attention.self.layer_norm_k": "attention.key_norm",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "attention.norm",
    "layer_norm_1": "attention_norm",
    "layer_norm_2": "norm",
    "mlp.gated_layers": "up",
    "mlp.up_gated_layer": "up",
    "mlp.wo": "down",
    "mlp.down_layer": "down",
    "mlp.layernorm": "norm",
}
"""Maps the published name of a module, within its layer, to its name here and, after a slash, its part."""

_PUBLISHED = re.compile(r"(?:bert\.)?(?:encoder\.layer\.(\d+)\.)?(.+)\.(weight|bias)")
_NOT_OF_THE_ENCODER = ("cls.", "pooler.", "classifier.", "embeddings.position_ids", "embeddings.token_type_ids")


def weights_of(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of an `AlibiBert` from that of a published checkpoint, without heads and poolers.

    Supports JINA-v2 as published (`mlp.gated_layers`), JINA-v2 with normalized queries and keys (`mlp.up_gated_layer`)
    and MosaicBERT (`Wqkv`). Other weights keep their names, which strict loading refuses.
    """
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        if name.removeprefix("bert.").startswith(_NOT_OF_THE_ENCODER):
            continue
        match = _PUBLISHED.fullmatch(name)
        if match is None or match[2] not in _NAMES:
            parts[name][""] = tensor
            continue
        layer, module, kind = match.groups()
        if module == "mlp.up_gated_layer":
            # This layout has the gate second.
            tensor = tensor.roll(len(tensor) // 2, dims=0)
        prefix = "" if layer is None else f"layers.{layer}."
        target, _, part = _NAMES[module].partition("/")
        parts[f"{prefix}{target}.{kind}"][part] = tensor
    return {name: torch.cat([pieces[part] for part in sorted(pieces)]) for name, pieces in parts.items()}


def _norm(config: AlibiConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
