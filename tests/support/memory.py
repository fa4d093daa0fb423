"""Memory of this process, as Linux tells it, and where weights lie in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

ALIGNMENT = 64
"""Bytes of which the address of a weight is a multiple, as torch's own allocator has it on a CPU."""


def growth(run: Callable[[], Any]) -> float:
    """MB by which it grows at most while `run` runs."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def status(name: str) -> float:
    """The MB of a line of the process's status: "VmRSS" what it has, "VmHWM" the most it has had."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024


def misplaced(module: nn.Module) -> list[str]:
    """Names of weights at an odd address, or in the mapped file of a checkpoint."""
    files = _mapped()
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}
    return [name for name, place in places.items() if place % ALIGNMENT or any(place in span for span in files)]


def _mapped() -> list[range]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    spans = [line.split(maxsplit=1)[0].split("-") for line in lines if ".safetensors" in line]
    return [range(int(first, 16), int(end, 16)) for first, end in spans]
