"""Files that are replaced as a whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when all has gone well and it is complete on disk.

    Args:
        path: its folder is made if need be.
        only_writer: no other process writes it, so that what a kill left half-written is written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part" if only_writer else f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere folders cannot be opened
            _flush(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path, mode: int) -> None:
    """Waits until a file, or a folder's list of files, is on disk and not only in memory."""
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
