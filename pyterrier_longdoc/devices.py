"""Where and in which precision to compute."""

from __future__ import annotations

import functools
import time

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


@functools.cache
def fastest_dtype(device: torch.device) -> str:
    """The precision in which a device multiplies matrices fastest, measured once: "float32" or "bfloat16".

    CPUs with AMX and recent GPUs are several times faster in bfloat16; other CPUs are slower in it.
    """
    seconds = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.randn(512, 512, device=device).to(_DTYPES[name])
        seconds[name] = min(_multiply_seconds(matrix) for _ in range(3))
    return "bfloat16" if seconds["bfloat16"] * 1.5 < seconds["float32"] else "float32"


def _multiply_seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    # Reading a value waits for a GPU to finish.
    (matrix @ matrix)[0, 0].item()
    return time.perf_counter() - start
