"""Late interaction: the sum of each query token's maximum. Shapes: B documents, N windows, Q query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..inputs import Encoded
from .base import Head, WarmStart


@dataclass(frozen=True, eq=False)
class MaxSimStart(WarmStart):
    """See the base class; `trained` is whether the projection is the checkpoint's."""

    trained: bool = False


class MaxSimHead(Head, name="maxsim"):
    """`sum_q max_t q.t` over the tokens of the whole document, or of its best window; it has no weights.

    Khattab & Zaharia 2020, equation 3. A window's vector has each query token's maximum in the window, 0 at padding.

    Args:
        aggregation: `"document"`, or `"max"` for only the best window.
    """

    tunable = ("aggregation",)

    def __init__(self, hidden_size: int, *, aggregation: str = "document") -> None:
        super().__init__(hidden_size, dropout=0.0)
        del self.final
        self.aggregation = aggregation

    def forward(self, encoded: Encoded) -> torch.Tensor:
        maxima = _maxima(encoded)
        return (maxima.amax(1).sum(-1) if self.aggregation == "document" else maxima.sum(-1).amax(1)).float()

    def token_windows(self, encoded: Encoded) -> torch.Tensor:
        """Return the `(B, Q)` window whose maximum is used for each query token."""
        maxima = _maxima(encoded)
        by_token = maxima if self.aggregation == "document" else maxima.sum(-1, keepdim=True).expand_as(maxima)
        return by_token.argmax(1)

    def ready_from(self, start: WarmStart) -> bool:
        """Return whether the projection is the checkpoint's."""
        return isinstance(start, MaxSimStart) and start.trained

    def warm_start(self, start: WarmStart) -> None:
        """Copy nothing: it has no weights."""


def _maxima(encoded: Encoded) -> torch.Tensor:
    # In float64, because sums in fp32 might depend on the padding up to longer queries.
    return encoded.cls.double().masked_fill(~encoded.mask.unsqueeze(-1), -torch.inf)  # (B, N, Q)
