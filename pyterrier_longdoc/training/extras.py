"""Libraries that only some trainings need."""

from __future__ import annotations

import importlib
from typing import Any


def required(name: str, purpose: str) -> Any:
    """Imports a library of the extra `train`.

    Raises:
        ImportError: if it is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {name}: pip install 'pyterrier-longdoc[train]'") from error
