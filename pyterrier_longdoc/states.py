"""Token states of texts that are encoded apart from the query, and so can be remembered.

Shapes: V texts, T tokens of one text, H hidden size of the encoder, E width of what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .batching import PairLayout
from .caches import EmbeddingCache
from .changes import WeightsWatch
from .encoder import WindowEncoder
from .microbatches import micro_batches


class StateEncoder:
    """Encodes token sequences; in inference each distinct one once, as long as it is remembered.

    States are worth nothing after the weights that made them have been trained or loaded: whoever scores calls `begin`
    first, so that no such change goes unnoticed.

    Args:
        max_bytes: most memory for remembered states; the least recently used ones go first. None for the bound of
            embeddings.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.cache = EmbeddingCache() if max_bytes is None else EmbeddingCache(max_bytes)
        self._weights = WeightsWatch()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateEncoder:
        return StateEncoder(self.cache.max_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateEncoder, (self.cache.max_bytes,)

    def begin(self, encoder: WindowEncoder, project: nn.Module) -> None:
        """At the start of a run: forgets the states that other weights have made.

        Args:
            encoder: see `__call__`.
            project: the same.
        """
        self._forget_if_changed(encoder, project, contents=True)

    def __call__(
        self, encoder: WindowEncoder, project: nn.Module, sequences: Sequence[np.ndarray], layout: PairLayout
    ) -> list[torch.Tensor]:
        """States of sequences; equal ones are encoded once.

        Args:
            encoder: the encoder.
            project: what its states go through before they are kept.
            sequences: V arrays of token ids.
            layout: how a sequence becomes an input, as the window of a pair with an empty query.

        Returns:
            V tensors `(T, E)` in fp32, of the real tokens, special ones included; with their graph where gradients
            are on.
        """
        keys = [sequence.tobytes() for sequence in sequences]
        distinct = dict(zip(keys, sequences, strict=True))
        device = next(encoder.parameters()).device
        if torch.is_grad_enabled():
            self._weights.forget()  # training follows
            states = dict(zip(distinct, self._encode(encoder, project, list(distinct.values()), layout), strict=True))
            return [states[key] for key in keys]
        setting = (layout, _precision(device), encoder.training)
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(encoder, project, contents=not torch.is_inference_mode_enabled())
        known = {key: kept for key in distinct if (kept := self.cache.get((setting, key))) is not None}
        states = {key: torch.from_numpy(kept).to(device) for key, kept in known.items()}
        new = [key for key in distinct if key not in states]
        if new:
            made = self._encode(encoder, project, [distinct[key] for key in new], layout)
            for key, state in zip(new, made, strict=True):
                states[key] = state
                self.cache.put((setting, key), state.cpu().numpy())
        return [states[key] for key in keys]

    def _encode(
        self, encoder: WindowEncoder, project: nn.Module, sequences: list[np.ndarray], layout: PairLayout
    ) -> list[torch.Tensor]:
        empty = np.zeros(0, dtype=np.int32)
        device = next(encoder.parameters()).device
        made: dict[int, torch.Tensor] = {}
        for part in micro_batches([layout.length(0, len(sequence)) for sequence in sequences]):
            batch = layout.collate([empty] * len(part), [[sequences[i]] for i in part], device)
            made |= zip(part, (project(states).float() for states in encoder.token_states(batch)), strict=True)
        return [made[i] for i in range(len(sequences))]

    def _forget_if_changed(self, encoder: WindowEncoder, project: nn.Module, *, contents: bool) -> None:
        if self._weights.changed(encoder, project, contents=contents):
            self.cache.clear()


def by_length(
    encoder: WindowEncoder,
    lengths: Sequence[int],
    make: Callable[[list[int]], torch.Tensor],
    on_share: Callable[[float], None] | None,
) -> torch.Tensor:
    """`(V, E)` vectors of V inputs, made in batches of like length.

    Args:
        encoder: whose limits on a pass hold.
        lengths: V lengths in tokens.
        make: makes the `(B, E)` vectors of the inputs with these numbers.
        on_share: called after each batch with its share of the inputs, for a progress bar.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    vectors = []
    for rows in encoder.passes([lengths[i] for i in order], torch.tensor(order)):
        vectors.append(make(rows.tolist()))
        if on_share is not None:
            on_share(len(rows) / len(order))
    made = torch.cat(vectors)
    return made[torch.tensor(order, device=made.device).argsort()]


def _precision(device: torch.device) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled(device.type):
        return (torch.float32,)
    return (torch.get_autocast_dtype(device.type),)
