"""Libraries that only some features need."""

from __future__ import annotations

import importlib
from typing import Any


def required(name: str) -> Any:
    """Imports a library of the extra `analysis`.

    Raises:
        ImportError: if it is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is missing: pip install 'pyterrier-longdoc[analysis]'") from error
