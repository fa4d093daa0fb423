"""Libraries that only some features need."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(name: str, extra: str, complaint: str) -> Any:
    """Imports a library of one of this package's extras.

    Args:
        name: of the module.
        extra: that installs it.
        complaint: what the message says before the command.

    Raises:
        ImportError: if it is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{complaint}: pip install 'pyterrier-longdoc[{extra}]'") from error
