"""Classes that a saved model names: each registers itself where it is defined, users' own as well."""

from __future__ import annotations

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
