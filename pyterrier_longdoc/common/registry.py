"""Classes that a saved model names: each registers itself where it is defined, also a user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

C = TypeVar("C")


def register(classes: dict[str, type[C]], kind: str, name: str, cls: type[C]) -> None:
    """Add a class to the classes of a kind; a new definition, as in a notebook, replaces the old one."""
    old_class = classes.get(name, cls)
    if (old_class.__module__, old_class.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two {kind} are named {name!r}: {old_class.__qualname__} and {cls.__qualname__}")
    classes[name] = cls


def defined_in(cls: Any) -> dict[str, str]:
    """Return the module of a class or function, for use beside its name; nothing for this package's."""
    return {} if str(cls.__module__).startswith("pyterrier_longdoc.") else {"module": cls.__module__}


def look_up(classes: Mapping[str, C], problem: str, name: object, module: object = None) -> C:
    """Return the class of a name; the error begins with `problem`.

    The error names the module that defined the class. It is never imported, as a model may be anybody's.
    """
    if isinstance(name, str) and name in classes:
        return classes[name]
    advice = f"import the module {module!r}, which defined it, and load again"
    if module in (None, "__main__"):
        advice = "define it here, as the script or notebook did" if module else f"known are {', '.join(classes)}"
    raise ValueError(f"{problem} {name!r}: {advice}")
