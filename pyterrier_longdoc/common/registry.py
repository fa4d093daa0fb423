"""Registry of the classes that saved models refer to; classes register themselves when they are defined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

C = TypeVar("C")

CLASSES: dict[str, dict[str, type[Any]]] = {"windows": {}, "preselect": {}, "layout": {}, "template": {}}
"""The dataclasses that saved models can have as values of these arguments, by name."""


def register(classes: dict[str, type[C]], kind: str, name: str, cls: type[C]) -> None:
    """Register a class of a kind; defining it again, e.g. in a notebook, replaces the earlier definition."""
    old_class = classes.get(name, cls)
    if (old_class.__module__, old_class.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two {kind} are named {name!r}, {old_class.__qualname__} and {cls.__qualname__}: rename one")
    classes[name] = cls


def defined_in(cls: Any) -> dict[str, str]:
    """Return the module of a class or function, to be stored with its name; empty for this package."""
    return {} if str(cls.__module__).startswith("pyterrier_longdoc.") else {"module": cls.__module__}


def look_up(classes: Mapping[str, C], problem: str, name: object, module: object = None) -> C:
    """Return the class with this name, or raise ValueError that begins with `problem`.

    The error names the module that defined the class. It is never imported, because a model can come from anybody.
    """
    if isinstance(name, str) and name in classes:
        return classes[name]
    advice = f"import the module {module!r}, which defined it, and load again"
    if module in (None, "__main__"):
        advice = "define it as in the original script or notebook" if module else f"use one of {', '.join(classes)}"
    raise ValueError(f"{problem} {name!r}: {advice}")


def to_config(value: Any) -> dict[str, Any]:
    """Return the class and the fields of a dataclass, JSON-able, for `from_config`."""
    return {"type": type(value).__name__, **defined_in(type(value)), **asdict(value)}


def from_config(name: str, config: Mapping[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Return the class and the fields that `to_config` described; ValueError for an unknown class."""
    fields = dict(config)
    return look_up(CLASSES[name], f"unknown {name}", fields.pop("type", None), fields.pop("module", None)), fields
