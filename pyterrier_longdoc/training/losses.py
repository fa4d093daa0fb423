"""Losses as pure functions of scores. Shapes: G queries, n negatives; column 0 holds the positive."""

from __future__ import annotations

import torch


def pairwise_margin(scores: torch.Tensor, *, margin: float = 1.0) -> torch.Tensor:
    """`sum max(0, margin - s+ + s-)` over queries and negatives (Boytsov et al. 2025, with one negative each).

    Args:
        scores: `(G, 1 + n)`, the positive's score first.
        margin: the gap at which a pair costs nothing.

    Returns:
        A scalar.
    """
    positive, negatives = scores[:, :1], scores[:, 1:]
    return (margin - positive + negatives).clamp(min=0).sum()
