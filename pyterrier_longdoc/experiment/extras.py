"""Libraries that only some features need."""

from __future__ import annotations

from typing import Any

from ..common.files import import_extra


def required(name: str) -> Any:
    """Imports a library of the extra `analysis`.

    Raises:
        ImportError: if it is missing; the message says how to install it.
    """
    return import_extra(name, "analysis", f"{name} is missing")
