"""Files that are replaced as a whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when all has gone well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
