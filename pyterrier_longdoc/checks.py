"""Checks of sizes that users give."""

from __future__ import annotations

from numbers import Integral


def check_positive(**sizes: int | None) -> None:
    """Raises ValueError, naming it, for any size that is not None or a whole number of at least 1."""
    for name, value in sizes.items():
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be a whole number")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_given(**sizes: int | None) -> None:
    """As `check_positive`, and None is refused too."""
    for name, value in sizes.items():
        if value is None:
            raise ValueError(f"{name}=None must be a whole number")
    check_positive(**sizes)
