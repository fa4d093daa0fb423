"""PARADE: window vectors are aggregated into one document vector, which is scored.

Li et al., "PARADE: Passage Representation Aggregation for Document Reranking", section 3.2, and Boytsov et al.
2025, section 3 and equation 1. Shapes: B documents, N windows, H hidden size, A aggregator's hidden size. `p_i`
are the window vectors, `m` the mask of real windows, `d` the document vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

from ..batching import Encoded
from .base import Head, WarmStart, masked_mean


class ParadeAvgHead(Head, name="parade-avg"):
    """`d = mean_i p_i` (PARADE Avg)."""

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score(masked_mean(encoded.cls, encoded.mask))


class ParadeMaxHead(Head, name="parade-max"):
    """`d = max_i p_i`, feature by feature (PARADE Max)."""

    def forward(self, encoded: Encoded) -> torch.Tensor:
        vectors = encoded.cls.masked_fill(~encoded.mask.unsqueeze(-1), float("-inf"))
        return self.score(vectors.amax(1))


class ParadeAttnHead(Head, name="parade-attn"):
    """`a = softmax_i(p_i . c)`, `d = sum_i a_i p_i` (PARADE Attn, as in the PARADE paper).

    The attention vector `c` starts at zero, where PARADE Attn is PARADE Avg, so that a head on top of a trained
    cross-encoder ranks sensibly from the start. Differs from PARADE, which draws `c` from N(0, 0.02).
    """

    def __init__(self, hidden_size: int, *, dropout: float = 0.1) -> None:
        super().__init__(hidden_size, dropout=dropout)
        self.attention = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, encoded: Encoded) -> torch.Tensor:
        weights = self.window_weights(encoded).unsqueeze(-1)  # (B, N, 1)
        return self.score((weights * encoded.cls).sum(1))

    def window_weights(self, encoded: Encoded) -> torch.Tensor:
        """`(B, N)` softmax over real windows; 0 where there is none."""
        logits = encoded.cls @ self.attention
        return logits.masked_fill(~encoded.mask, float("-inf")).softmax(1)


class ParadeElementwiseAttnHead(Head, name="parade-attn-elementwise"):
    """`A = softmax_i(W p_i + b)` for each feature by itself, `d = sum_i A_i * p_i`.

    This is what Boytsov et al. 2025 measured as PARADE Attn. `W` starts at zero, where it is PARADE Avg.
    """

    def __init__(self, hidden_size: int, *, dropout: float = 0.1) -> None:
        super().__init__(hidden_size, dropout=dropout)
        self.attention = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.attention.weight)
        nn.init.zeros_(self.attention.bias)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score((self._attend(encoded) * encoded.cls).sum(1))

    def window_weights(self, encoded: Encoded) -> torch.Tensor:
        """`(B, N)` weights averaged over the H features; 0 where there is no window."""
        return self._attend(encoded).mean(-1)

    def _attend(self, encoded: Encoded) -> torch.Tensor:
        logits = self.attention(encoded.cls)  # (B, N, H)
        return logits.masked_fill(~encoded.mask.unsqueeze(-1), float("-inf")).softmax(1)


class ParadeTransformerHead(Head, name="parade-transformer"):
    """A small transformer over `[c, s, p_1 ... p_N, s]`, read at `c` (Boytsov et al. 2025, equation 1).

    `c` and `s` are learnable and start as the word embeddings of `[CLS]` and `[SEP]`. With `separators=False` the
    sequence is `[c, p_1 ... p_N]`, as in the PARADE paper. The layers start at random (RAND-L2): the head must be
    trained before its scores mean anything.

    Args:
        hidden_size: H; also the aggregator's.
        layers: transformer layers; 2 in both papers.
        attention_heads: 12 in PARADE, and what Boytsov et al. ran (their text says 4); fewer where 12 does not
            divide H.
        separators: whether `s` stands before and after the windows.
        positions: add position and segment embeddings and a layer norm, as both BERT and Boytsov et al. do. Without
            them the aggregation does not depend on the order of the windows.
        max_positions: the longest sequence, N + 3, that the position embeddings can number; BERT's 512.
        dropout: in the aggregator and before the final layer.

    Raises:
        ValueError: if `attention_heads` does not divide H, or (when scoring) a document has too many windows.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        layers: int = 2,
        attention_heads: int | None = None,
        separators: bool = True,
        positions: bool = True,
        max_positions: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(hidden_size, dropout=dropout)
        if attention_heads is None:
            attention_heads = next(n for n in range(12, 0, -1) if hidden_size % n == 0)
        if hidden_size % attention_heads:
            raise ValueError(f"attention_heads={attention_heads} does not divide the hidden size {hidden_size}")
        self.separators = separators
        self.positions = positions
        self.max_positions = max_positions
        self.aggregator: Any = _random_aggregator(hidden_size, layers, attention_heads, max_positions, dropout)
        if not positions:
            self.aggregator.embeddings = _WindowVectorsAsTheyAre()
        self.cls_vector = nn.Parameter(torch.randn(hidden_size) / hidden_size**0.5)
        if separators:
            self.sep_vector = nn.Parameter(torch.randn(hidden_size) / hidden_size**0.5)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        vectors, mask, types = self._sequence(encoded)
        if self.positions and vectors.shape[1] > self.max_positions:
            raise ValueError(
                f"a document has {encoded.mask.shape[1]} windows, but the aggregator takes "
                f"{self.max_positions - (3 if self.separators else 1)}: raise stride, or set max_windows or max_doc_len"
            )
        states = self.aggregator(
            inputs_embeds=vectors, attention_mask=mask.long(), token_type_ids=types
        ).last_hidden_state  # (B, N + 3, A)
        return self.score(states[:, 0])

    def warm_start(self, start: WarmStart) -> bool:
        if start.cls_embedding.shape == self.cls_vector.shape:
            with torch.no_grad():
                self.cls_vector.copy_(start.cls_embedding)
                if self.separators:
                    self.sep_vector.copy_(start.sep_embedding)
        # The last layer of a cross-encoder knows nothing of what random layers put out.
        return False

    def _sequence(self, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        documents = len(encoded.cls)
        cls = self.cls_vector.expand(documents, 1, -1)
        one = encoded.mask.new_ones(documents, 1)
        windows = encoded.mask.long()
        if not self.separators:
            types = torch.cat([torch.zeros_like(one, dtype=torch.long), torch.ones_like(windows)], 1)
            return torch.cat([cls, encoded.cls], 1), torch.cat([one, encoded.mask], 1), types
        sep = self.sep_vector.expand(documents, 1, -1)
        # The last separator comes right after a document's own last window: its position must not depend on how
        # many windows other documents of the batch have.
        count = windows.sum(1)  # (B,)
        body = torch.cat([encoded.cls, sep.new_zeros(documents, 1, sep.shape[-1])], 1)
        is_sep = torch.arange(body.shape[1], device=body.device) == count.unsqueeze(1)  # (B, N + 1)
        body = torch.where(is_sep.unsqueeze(-1), sep, body)
        real = torch.cat([encoded.mask, ~one], 1) | is_sep
        types = torch.cat([torch.zeros(documents, 2, dtype=torch.long, device=body.device), (~is_sep).long()], 1)
        return torch.cat([cls, sep, body], 1), torch.cat([one, one, real], 1), types


class _WindowVectorsAsTheyAre(nn.Module):
    """Stands in for an aggregator's embedding module where windows get neither positions nor segments."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        return inputs_embeds


def _random_aggregator(hidden_size: int, layers: int, attention_heads: int, max_positions: int, dropout: float) -> Any:
    config = BertConfig(
        vocab_size=1,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=attention_heads,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=max_positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    aggregator = BertModel(config, add_pooling_layer=False)
    # The aggregator reads vectors, not words.
    aggregator.embeddings.word_embeddings = None
    return aggregator
