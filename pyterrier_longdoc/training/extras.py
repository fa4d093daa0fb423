"""Libraries that only some trainings need."""

from __future__ import annotations

from typing import Any

from ..common.files import import_extra


def required(name: str, purpose: str) -> Any:
    """Imports a library of the extra `train`.

    Raises:
        ImportError: if it is missing; the message says how to install it.
    """
    return import_extra(name, "train", f"{purpose} needs {name}")
