"""Where and in which precision to compute."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | None) -> torch.device:
    """The named device; None for a GPU if there is one, else the CPU.

    Raises:
        ValueError: for an unknown name, or a GPU where torch sees none.
    """
    check_device(device)
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
