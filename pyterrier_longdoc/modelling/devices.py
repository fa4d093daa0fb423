"""Devices and precisions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FASTEST = "fastest"
"""The value of `dtype=` for the precision in which a device is fastest."""

DTYPES = (*_PRECISIONS, FASTEST)
"""The values of `dtype=` other than None."""


def check_device(device: str | None) -> None:
    """Raise ValueError for what is no device."""
    try:
        torch.device(device or "cpu")
    except (RuntimeError, TypeError):
        rule = "'cuda' for a GPU, 'cuda:1' for the second one, 'cpu', or None for a GPU if there is one"
        raise ValueError(f"device={device!r} must be {rule}") from None


def resolve_device(device: str | None) -> torch.device:
    """Return the named device; for None, a GPU if there is one, else the CPU.

    If several processes train or score together (`WORLD_SIZE`), each has one GPU, and None is this GPU. ValueError
    for a GPU if torch has none.
    """
    if device is None and torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    resolved = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}: torch {torch.__version__} finds no GPU. Omit device to use the CPU, "
            f"or install torch with CUDA and the driver"
        )
    return resolved


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """Return the named precision; for None, bfloat16 on a GPU that has it, else float32; `"fastest"` also on a CPU."""
    if dtype == FASTEST or (dtype is None and device.type != "cpu"):
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return _PRECISIONS[dtype or "float32"]


def current_dtype(device: torch.device) -> torch.dtype:
    """Return the current precision of matrix products: that of autocast if it is on, else float32."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make new modules in float32, also after `torch.set_default_dtype(torch.float64)`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_own_memory(model: nn.Module) -> None:
    """Copy weights on the CPU to separate memory, one after the other, so that only one is in memory twice.

    transformers and safetensors leave them in the mapped file: they change if it is overwritten, and at addresses that
    are not multiples of 64 bytes, matrix products may be computed in another order.
    """
    for tensor in (*model.parameters(), *model.buffers()):  # each once, so that tied weights stay tied
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for matrix products in bfloat16: emulation is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch before 2.5 lacks these functions.
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in checks)
