"""Base of the heads that look at tokens: what they ask of the encoder and what they can tell of their scores.

Shapes: B documents, N windows, V windows of all documents, Q query tokens, T window tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from ..batching import Encoded, Matches
from .base import Head, WarmStart


class TokenHead(Head):
    """Base of heads that look at matches of query and document tokens; they have no dropout, as in CEDR.

    Args:
        hidden_size: H.
        width: of the vector that the last layer scores.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(hidden_size, dropout=0.0)
        self.final = nn.Linear(width, 1)
        nn.init.xavier_uniform_(self.final.weight)

    def match(self, query: torch.Tensor, document: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        """Matches the token states of one layer, which becomes one channel.

        Args:
            query: `(V, Q, H)` fp32.
            document: `(V, T, H)` fp32.
            same: `(V, Q, T)` bool, whether the two tokens are the same word piece.

        Returns:
            `(V, Q, T)`.
        """
        raise NotImplementedError

    def query_contributions(self, encoded: Encoded) -> torch.Tensor | None:
        """`(B, Q)` what each query token adds to the score; None where that cannot be told apart."""
        return None

    def warm_start(self, start: WarmStart) -> bool:
        """Nothing fits: the last layer scores features that the checkpoint knows nothing of."""
        return False

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        scores = []
        for n in range(encoded.mask.shape[1]):
            alone = Encoded(
                cls=encoded.cls[:, n : n + 1],
                mask=torch.ones_like(encoded.mask[:, :1]),
                matches=matches_of(encoded).of_window(n),
            )
            scores.append(self(alone))
        return torch.stack(scores, 1).masked_fill(~encoded.mask, float("nan"))


def matches_of(encoded: Encoded) -> Matches:
    """The matches that a token head asked for.

    Raises:
        ValueError: if the encoder was not told to make them.
    """
    if encoded.matches is None:
        raise ValueError("this head needs matches of query and document tokens, but the encoder made none")
    return encoded.matches
