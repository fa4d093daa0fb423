"""PARADE: window vectors are aggregated into one document vector, which is scored.

Li et al., "PARADE: Passage Representation Aggregation for Document Reranking", section 3.2, and Boytsov et al.
2025, section 3. Shapes: B documents, N windows, H hidden size. `p_i` are the window vectors, `d` the document vector.
"""

from __future__ import annotations

import torch
from torch import nn

from ..batching import Encoded
from .base import Head, masked_mean


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
