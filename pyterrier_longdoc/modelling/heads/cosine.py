"""The cosine of a document's vector and the query's. Shapes: B documents, H width of a vector."""

from __future__ import annotations

import torch
from torch import nn

from ..inputs import Encoded
from .base import Head, WarmStart


class CosineHead(Head, name="cosine"):
    """`cos(q, d)` of one vector each; it has no weights.

    In training, cosines are divided by the temperature, because losses over differences of scores need a wider range.

    Args:
        hidden_size: H.
        temperature: the divisor in training.
    """

    needs = "query"
    tunable = ("temperature",)

    def __init__(self, hidden_size: int, *, temperature: float = 0.05) -> None:
        super().__init__(hidden_size, dropout=0.0)
        del self.final
        self.temperature = temperature

    def forward(self, encoded: Encoded) -> torch.Tensor:
        cosines = nn.functional.cosine_similarity(encoded.cls[:, 0], encoded.query.states[:, 0], dim=-1)
        return cosines / self.temperature if self.training else cosines

    def ready_from(self, start: WarmStart) -> bool:
        """Return True: whether scores make sense depends on the encoder alone."""
        return True

    def warm_start(self, start: WarmStart) -> None:
        """Copy nothing: it has no weights."""
