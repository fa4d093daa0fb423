"""Trained models as small differences from their backbone.

A model trained with LoRA differs from its backbone, in each matrix, by a product `B A` of low rank. Stored so, with
the few weights that are not the backbone's, it takes one or two megabytes instead of ninety.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]

LARGEST_ERROR = 0.01
"""Most that a stored difference may deviate from the true one, relative to its norm."""

_B, _A = "::B", "::A"


def compress(state: Tensors, base: Tensors, *, rank: int) -> dict[str, torch.Tensor]:
    """The difference between two states, matrices as fp16 factors of low rank.

    Args:
        state: all weights of a trained model.
        base: those of them that it got from a checkpoint, as they were before training.
        rank: the highest rank of a difference; it is lower where that loses nothing.

    Returns:
        `name::B (m, r)` and `name::A (r, n)` of each changed matrix `(m, n)` of `base`, and what else has changed or
        is not in `base`, as fp16.

    Raises:
        ValueError: if a difference has a higher rank.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name not in base:
            stored[name] = _half(value)
        elif not torch.equal(value, base[name]):
            if value.ndim == 2:
                stored |= _factors(name, value.double() - base[name].double(), rank)
            else:
                stored[name] = _half(value)
    return stored


def restore(stored: Tensors, base: Tensors) -> dict[str, torch.Tensor]:
    """All weights of the model: those of `base`, changed by what `compress` gave."""
    state = dict(base)
    for name, value in stored.items():
        if name.endswith(_A):
            continue
        if name.endswith(_B):
            matrix = name.removesuffix(_B)
            if matrix not in base:
                raise ValueError(f"the adapter changes {matrix!r}, which the backbone has not")
            difference = value.float() @ stored[matrix + _A].float()
            state[matrix] = base[matrix] + difference
        else:
            state[name] = value.to(base[name].dtype) if name in base else value.float()
    return state


def fingerprint(weights: Tensors) -> str:
    """Tells whether two models have the same weights, wherever they are."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _factors(name: str, difference: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    kept = min(rank, int((s > s[0] * 1e-4).sum()))
    root = s[:kept].sqrt()
    b, a = _half(u[:, :kept] * root), _half(root[:, None] * v[:kept])
    error = float((b.double() @ a.double() - difference).norm() / difference.norm())
    if error > LARGEST_ERROR:
        raise ValueError(
            f"the difference of {name!r} from the backbone is not of rank {rank} ({error:.0%} would be lost): raise "
            f"rank, or save the whole model with save()"
        )
    return {name + _B: b, name + _A: a}


def _half(value: torch.Tensor) -> torch.Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()
