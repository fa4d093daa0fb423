"""The presentation of transformers in notebooks and schematics."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyterrier as pt

from .arguments import Without
from .citations import Cited

HIDDEN = ("verbose", "text_loader")
"""Arguments that are hidden in the repr of a reranker, because they do not affect its scores."""


def described(value: Any) -> str:
    """Return the repr of a pipeline, function or argument, the same in every process."""
    return re.sub(r"(?: at |=)0x[0-9a-fA-F]+", "", repr(value))


def percent(share: float, digits: int = 1) -> str:
    """Format a share from 0 to 1 in percent; only 1 becomes 100% and only 0 becomes 0%.

    Example:
        >>> [percent(share) for share in (1, 0.9996, 0.125, 0.0004, 0)]
        ['100.0%', '>99.9%', '12.5%', '<0.1%', '0.0%']
    """
    text, step = f"{share:.{digits}%}", 0.1 ** (digits + 2)
    if share < 1 and text == f"{1:.{digits}%}":
        return f">{1 - step:.{digits}%}"
    return f"<{step:.{digits}%}" if share > 0 and text == f"{0:.{digits}%}" else text


def changes(value: Any, base: Any = None, *, hidden: Collection[str] = ()) -> list[str]:
    """Return `name=value` for dataclass fields that differ from those of `base` (default: from their defaults)."""
    found = []
    for f in (f for f in fields(value) if f.name not in hidden):
        default: Any = f.default if f.default_factory is MISSING else f.default_factory()
        text = _in_short(getattr(value, f.name))
        if text != _in_short(default if base is None else getattr(base, f.name)):
            found.append(f"{f.name}={text}")
    return found


def _in_short(value: Any) -> str:
    if isinstance(value, Mapping):
        value = dict(value)
    return described(str(value) if isinstance(value, Path) else value)


_FIRST = (
    "backbone", "window_size", "size", "stride", "max_doc_len", "max_query_len", "text_field", "text_loader",
    "batch_size", "device", "dtype", "verbose", "training",
)  # fmt: skip
"""The arguments that most people set, which come first."""


def _entries(doc: str) -> dict[str, str]:
    """Return the entries of the section `Args:`, by the name of the argument."""
    entries: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(doc.partition("\nArgs:\n")[2].partition("\n\n")[0]).splitlines():
        if name and line.startswith(" "):
            entries[name] += f"\n{line}"
        else:
            name = line.partition(":")[0].partition("(")[0].strip()
            entries[name] = line
    return entries


class ReprMixin:
    """Base class of dataclasses with a repr of the fields that differ from their defaults.

    Their docstrings also describe inherited arguments, unless they have entries of their own for them.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        doc = inspect.cleandoc(cls.__doc__ or "")  # none with -OO
        own = _entries(doc)
        entries = dict(own)
        for base in filter(is_dataclass, cls.__bases__):
            for name, entry in _entries(inspect.getdoc(base) or "").items():
                if not isinstance(inspect.getattr_static(cls, name, None), Without):
                    entries.setdefault(name, entry)
        if not doc or len(entries) == len(own) or "__init__" in vars(cls):
            return
        before, _, section = doc.partition("\nArgs:\n")
        places = {name: place for place, name in enumerate(_FIRST)}
        ordered = sorted(entries, key=lambda name: places.get(name, len(places)))
        arguments = textwrap.indent("\n".join(entries[name] for name in ordered), "    ")
        parts = (before.strip(), section.partition("\n\n")[2].strip(), f"Args:\n{arguments}")
        cls.__doc__ = "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(changes(self))})"


class NotebookMixin(ReprMixin, Cited):
    """Base class of transformers with repr, schematic and citation."""

    # PyTerrier's own is the hash of the repr, which `fit` and new arguments change: a dictionary would lose its keys.
    __hash__ = object.__hash__

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """Return the schematic for PyTerrier."""
        return {"label": type(self).__name__, "help_url": None}  # without help_url, PyTerrier looks for a page online

    def _repr_html_(self) -> str | None:
        """Return the repr and PyTerrier's schematic, which is the same for all models of a class."""
        drawing: str | None = pt.Transformer._repr_html_(self)  # type: ignore[arg-type]
        return None if drawing is None else f"<code>{escape(repr(self))}</code>{drawing}"

    def subtransformers(self) -> dict[str, Any]:
        """Return no transformers, because a text loader in an argument is not a step of a pipeline."""
        return {}
