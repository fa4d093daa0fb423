"""Where and in which precision to compute."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CPU_SIZE, _GPU_SIZE = 512, 4096
"""Rows of the matrices that are multiplied to compare precisions: a GPU takes as long to start as for small ones."""

_WORTHWHILE = 1.5
"""So many times faster must bfloat16 be to be worth its rounding."""


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


def resolve_devices(device: str | Sequence[str] | None) -> list[torch.device]:
    """The named devices; None for the current GPU and all others of its model if there are any, else the CPU.

    Where several processes train or score together (`WORLD_SIZE`), each has one GPU, and None is that one.

    Raises:
        ValueError: for an unknown name, no name, several names in one of several processes, or a GPU where torch sees
            none.
    """
    check_devices(device)
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device is None and torch.cuda.is_available():
        return _gpu_of_this_process() if together else _equal_gpus()
    names = device_names(device)
    if together and len(names) > 1:
        raise ValueError(f"device={names!r}: one of several processes has one GPU: leave device=None")
    return list(map(resolve_device, names))


def _gpu_of_this_process() -> list[torch.device]:
    return [torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())]


def _equal_gpus() -> list[torch.device]:
    """The current one first; one of another model, a small one for the screen perhaps, would hold the others up."""
    current = torch.cuda.current_device()
    model = torch.cuda.get_device_name(current)
    others = (n for n in range(torch.cuda.device_count()) if n != current and torch.cuda.get_device_name(n) == model)
    return [torch.device("cuda", number) for number in (current, *others)]


def device_names(device: Any) -> list[Any]:
    """What `device=` names, one device or a list of them, as a list."""
    return list(device) if isinstance(device, list | tuple) else [device]


def check_devices(device: Any, several: bool = True) -> None:
    """As `check_device`, also for a list of devices, if the model can work on several."""
    names = device_names(device)
    if not names:
        raise ValueError("device=[] names no device: leave device=None to take what there is")
    if not several and len(names) > 1:
        raise ValueError(f"device={device!r}: this model, or its backend=, works on one device at a time: name one")
    for each in names:
        check_device(each)
    if len({torch.device(each or "cpu").type for each in names}) > 1:
        raise ValueError(f"device={device!r}: devices that share the work must be of one kind")


def check_device(device: Any) -> None:
    """Raises ValueError if torch knows no device of this name; whether it is there shows when it is used."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is unknown to torch; use 'cpu', 'cuda', 'cuda:1', 'mps', ...") from error


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The named precision; None for the one in which the device is fastest.

    Raises:
        ValueError: for an unknown name.
    """
    check_dtype(dtype)
    return _DTYPES[fastest_dtype(device) if dtype is None else dtype]


def check_dtype(dtype: str | None) -> None:
    """Raises ValueError for the name of an unknown precision."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a precision, as it is given to a model."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def fastest_dtype(device: torch.device) -> str:
    """The precision in which a device multiplies matrices fastest, measured once: "float32" or "bfloat16".

    CPUs with AMX and recent GPUs are several times faster in bfloat16; other CPUs are slower in it.
    """
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    try:
        seconds = {name: _multiply_seconds(size, _DTYPES[name], device) for name in ("float32", "bfloat16")}
    except (RuntimeError, TypeError):
        return "float32"  # some devices have no bfloat16 at all
    chosen = "bfloat16" if seconds["bfloat16"] * _WORTHWHILE < seconds["float32"] else "float32"
    logger.info(
        "%s: models compute in %s, unless dtype= says otherwise (a matrix product takes %.2g ms in float32, %.2g ms in "
        "bfloat16)",
        *(device, chosen, 1e3 * seconds["float32"], 1e3 * seconds["bfloat16"]),
    )
    return chosen


def _multiply_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The least of a few attempts, of which the first also sets things up."""
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        # Reading a value waits for a GPU to finish.
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
