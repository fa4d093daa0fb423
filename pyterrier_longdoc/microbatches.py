"""Many windows through the encoder: each distinct one once, and few at a time as padded tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from .batching import PairLayout
from .encoder import WindowEncoder

MICRO_TOKENS = 2**18
"""Tokens, padding included, that are laid out as tensors at a time, about 17 bytes each. Sixteen times a pass of the
largest default size, so that cutting the sorted windows here costs next to nothing."""


def encode_distinct(
    encoder: WindowEncoder,
    layout: PairLayout,
    queries: Sequence[np.ndarray],
    windows: Sequence[np.ndarray],
    *,
    on_share: Callable[[float], None] | None = None,
) -> torch.Tensor:
    """One vector for each (query, window); without gradients, equal ones are encoded once.

    Windows are laid out in order of length over all documents, so that the memory for padded inputs is bounded
    whatever the longest window: one long sentence among 20,000 short ones does not make them all long.

    Args:
        encoder: the encoder.
        layout: how a query and a window become an input.
        queries: V arrays of token ids; those of one query should be one object, by which they are told apart.
        windows: V arrays of token ids, at least one.
        on_share: called after each pass with its share of the work, for a progress bar.

    Returns:
        `(V, H)` in fp32.
    """
    place, chosen = _distinct(queries, windows)
    device = next(encoder.parameters()).device
    order: list[int] = []
    vectors = []
    for part in micro_batches([layout.length(len(queries[i]), len(windows[i])) for i in chosen]):
        inputs = [chosen[number] for number in part]
        batch = layout.collate([queries[i] for i in inputs], [[windows[i]] for i in inputs], device)
        vectors.append(encoder(batch, _scaled(on_share, len(part) / len(chosen))).cls[:, 0])
        order += part
    restore = torch.tensor(order).argsort()
    return torch.cat(vectors)[restore[place].to(device)]


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divides inputs of these lengths, in ascending order, into parts of at most `MICRO_TOKENS` when padded."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[i] > MICRO_TOKENS:
            yield part
            part = []
        part.append(i)
    yield part


def _distinct(queries: Sequence[np.ndarray], windows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """For each input its number among the distinct ones, and the first input of each number."""
    if torch.is_grad_enabled():
        # Dropout makes equal inputs differ.
        every = list(range(len(windows)))
        return every, every
    numbers: dict[tuple[int, bytes], int] = {}
    place: list[int] = []
    chosen: list[int] = []
    for i, (query, window) in enumerate(zip(queries, windows, strict=True)):
        number = numbers.setdefault((id(query), window.tobytes()), len(numbers))
        if number == len(chosen):
            chosen.append(i)
        place.append(number)
    return place, chosen


def _scaled(on_share: Callable[[float], None] | None, part: float) -> Callable[[float], None] | None:
    return None if on_share is None else lambda share: on_share(share * part)
