"""Memory of this process, as Linux tells it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak() -> float:
    """The most MB that it has had, Python and weights included."""
    return _status("VmHWM")


def present() -> float:
    """The MB that it has."""
    return _status("VmRSS")


def growth(run: Callable[[], Any]) -> float:
    """MB by which it grows at most while `run` runs."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = present()
    run()
    return peak() - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024
