"""Where and in which precision to compute."""

from __future__ import annotations

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | None) -> torch.device:
    """The named device; None for a GPU if there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def resolve_dtype(dtype: str | None) -> torch.dtype:
    """The named precision; None for float32.

    Raises:
        ValueError: for an unknown name.
    """
    if dtype is None:
        return torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]
