"""Identify an index by the files written when it was built, without Java."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyterrier as pt

_TERRIERS = ("index.created", "num.Documents", "num.Tokens", "index.meta.key-names", "index.meta.value-lengths")


def is_java(value: Any) -> bool:
    """Return whether a value is a Java object."""
    return any((cls.__module__, cls.__name__) == ("jnius", "JavaClass") for cls in type(value).__mro__)


def is_terriers(value: Any) -> bool:
    """Return whether a value is a Terrier index: a `TerrierIndex`, or a Java `Index` or `IndexRef`."""
    if is_java(value):
        return type(value).__name__.startswith(("org.terrier.structures.Index", "org.terrier.querying.IndexRef"))
    return isinstance(value, pt.terrier.TerrierIndex)


def is_from_terrier(text_loader: Any) -> bool:
    """Return whether texts come from a Terrier index."""
    return is_terriers(text_loader) or isinstance(text_loader, pt.terrier.TerrierTextLoader)


def terriers_properties(index: Any) -> dict[str, str] | None:
    """Return the properties of a Terrier index that identify it; None for an index in memory or a sum of indices."""
    if isinstance(index, pt.terrier.TerrierIndex):
        index = index.index_obj() if index.path is pt.Artifact.NO_PATH else index.path
    path = Path(index.toString().removeprefix("concurrent:") if is_java(index) else index)
    file = path if path.suffix == ".properties" else path / "data.properties"
    if not file.is_file():
        return None
    lines = (line.partition("=") for line in file.read_text(encoding="latin-1").splitlines())
    found = {name: value for name, _, value in lines}
    return {name: found.get(name, "") for name in _TERRIERS}
