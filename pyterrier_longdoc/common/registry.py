"""Classes that a saved model names: each registers itself where it is defined, users' own as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

C = TypeVar("C")


def register(known: dict[str, type[C]], kind: str, name: str, cls: type[C]) -> None:
    """Adds a class to the known ones of a kind; one that is defined anew, as in a notebook, replaces the old one.

    Raises:
        TypeError: if another class has that name.
    """
    old = known.get(name, cls)
    if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two {kind} are named {name!r}: {old.__qualname__} and {cls.__qualname__}")
    known[name] = cls


def defined_in(cls: type) -> dict[str, str]:
    """What stands beside a class's name in a saved model: its module, unless it is this package's own."""
    return {} if cls.__module__.startswith("pyterrier_longdoc.") else {"module": cls.__module__}


def look_up(known: Mapping[str, C], what: str, name: object, module: object = None) -> C:
    """The class of that name.

    Args:
        known: the classes by name.
        what: begins the error's message, e.g. `"unknown head"`.
        name: which one.
        module: where it was defined when the model was saved; it is told, never imported, as a model may be anybody's.

    Raises:
        ValueError: if there is no such class; the message says which module to import, or lists the known ones.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    if module is None:
        raise ValueError(f"{what} {name!r}; known are {', '.join(known)}")
    if module == "__main__":
        raise ValueError(
            f"{what} {name!r}, which a script or notebook defined: define it here as well, or move it to a module"
        )
    raise ValueError(f"{what} {name!r}, which the module {module!r} defined: import that first, then load again")
