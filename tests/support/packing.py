"""A kernel for windows of unequal length that runs anywhere, for tests and benchmarks of passes without padding."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import nn


def attend_in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """Attention as a `Kernel` computes it: neighbors of equal length make a batch, which needs no mask."""
    assert query.shape == key.shape == value.shape
    assert {states.stride(-1) for states in (query, key, value)} == {1}
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert torch.equal(starts, ends)
    lengths = starts.diff().tolist()
    assert (starts[0], starts[-1], longest, longest_key) == (0, len(query), max(lengths), max(lengths))
    parts, start = [], 0
    for length, group in groupby(lengths):
        shape = (len(list(group)), length)
        end = start + shape[0] * length
        q, k, v = (row[start:end].unflatten(0, shape).transpose(1, 2) for row in (query, key, value))
        position = torch.arange(length, device=query.device)
        apart = position - position.unsqueeze(1)
        band = None if window == (-1, -1) else (apart >= -window[0]) & (apart <= window[1])
        states = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)
        parts.append(states.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)
