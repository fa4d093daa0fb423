"""Where and in which precision to compute."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..common.arguments import check_choice

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FASTEST = "fastest"
"""What `dtype=` is called that asks for the precision in which a device is best."""


def resolve_device(device: str | None) -> torch.device:
    """The named device; None for a GPU if there is one, else the CPU.

    Where several processes train or score together (`WORLD_SIZE`), each has one GPU, and None is that one.

    Raises:
        ValueError: for an unknown name, or a GPU where torch sees none.
    """
    check_device(device)
    if device is None and torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch sees no GPU here; use device='cpu', or None to take what there is")
    return chosen


def check_device(device: Any) -> None:
    """Raises ValueError if torch knows no device of this name; whether it is there shows when it is used."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is unknown to torch; use 'cpu', 'cuda', 'cuda:1', 'mps', ...") from error


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The named precision.

    Args:
        dtype: a name; None for float32 on a CPU, and for bfloat16 on a GPU that has it natively; `"fastest"` for what
            the device is best at.
        device: where models compute.

    Raises:
        ValueError: for an unknown name.
    """
    check_dtype(dtype)
    if dtype == FASTEST or (dtype is None and device.type != "cpu"):
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    return _DTYPES[dtype or "float32"]


def check_dtype(dtype: str | None) -> None:
    """Raises ValueError for the name of an unknown precision."""
    if dtype is not None:
        check_choice("dtype", dtype, (*_DTYPES, FASTEST))


def current_dtype(device: torch.device) -> torch.dtype:
    """The precision of matrix products at the moment: autocast's where it is on, else float32."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


def in_own_memory(model: nn.Module) -> None:
    """Moves weights on the CPU to memory of their own, one after the other, so that one more needs room meanwhile.

    transformers and safetensors leave them where the file is mapped to: there they change as it is overwritten, and at
    addresses that are not multiples of 64 bytes matrix products may be computed in another order.
    """
    for tensor in (*model.parameters(), *model.buffers()):  # each once, so that tied weights stay tied
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a precision, as it is given to a model."""
    return str(dtype).removeprefix("torch.")


def _has_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions that multiply matrices in bfloat16: no emulation, which is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Versions of torch that do not say so are older than 2.5.
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in asked)
