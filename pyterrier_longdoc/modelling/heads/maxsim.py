"""Late interaction: the sum of each query token's maximum over the document's tokens.

Shapes: B documents, N windows, Q query tokens.
"""

from __future__ import annotations

import torch

from ...common.arguments import check_arguments
from ..inputs import Encoded
from .base import Head, WarmStart


class MaxSimHead(Head, name="maxsim"):
    """`sum_q max_t q.t` over the tokens of the whole document, or of its best window; it has no weights.

    Khattab & Zaharia 2020, equation 3. A window's vector has the maximum of each query token in it, 0 at padding.

    Args:
        hidden_size: H, of no use here.
        aggregation: `"document"`, or `"max"` for the best window alone.
    """

    tunable = ("aggregation",)

    def __init__(self, hidden_size: int, *, aggregation: str = "document") -> None:
        super().__init__(hidden_size, dropout=0.0)
        check_arguments("str", choices=("document", "max"), aggregation=aggregation)
        del self.final
        self.aggregation = aggregation

    def forward(self, encoded: Encoded) -> torch.Tensor:
        maxima = _maxima(encoded)
        if self.aggregation == "document":
            return _sum(maxima.amax(1)).float()
        return _sum(maxima).amax(1).float()

    def token_windows(self, encoded: Encoded) -> torch.Tensor:
        """Return the `(B, Q)` window that counts for each query token."""
        maxima = _maxima(encoded)
        if self.aggregation == "document":
            return maxima.argmax(1)
        return _sum(maxima).argmax(1, keepdim=True).expand(-1, maxima.shape[2])

    def warm_start(self, start: WarmStart) -> bool:
        """Take over nothing; scores make sense if the projection is the checkpoint's."""
        return start.compares_tokens


def _maxima(encoded: Encoded) -> torch.Tensor:
    return encoded.cls.masked_fill(~encoded.mask.unsqueeze(-1), -torch.inf)  # (B, N, Q)


def _sum(maxima: torch.Tensor) -> torch.Tensor:
    """Sum over query tokens in float64: in fp32 the padding beside longer queries might change the last digit."""
    return maxima.sum(-1, dtype=torch.float64)
