"""Classes that a saved model names: each registers itself where it is defined, users' own as well.

Of code that is not this package's own only the name is known, so that nothing that depends on it may be taken again
without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

C = TypeVar("C")

OWN_CODE = "own code"
"""In a description: the names of a user's classes and functions. Two descriptions with them are never the same."""

VOUCH = (
    "Or let the model's class vouch for the code by a method of its own, def describe(self): return "
    "{**super().describe(), 'version': 1}, with another version whenever the code is another one"
)


def register(known: dict[str, type[C]], kind: str, name: str, cls: type[C]) -> None:
    """Adds a class to the known ones of a kind; one that is defined anew, as in a notebook, replaces the old one.

    Raises:
        TypeError: if another class has that name.
    """
    old = known.get(name, cls)
    if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two {kind} are named {name!r}: {old.__qualname__} and {cls.__qualname__}")
    known[name] = cls


def defined_in(cls: Any) -> dict[str, str]:
    """What stands beside the name of a class or function: its module, unless it is this package's own."""
    return {} if str(cls.__module__).startswith("pyterrier_longdoc.") else {"module": cls.__module__}


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


def own_code(thing: Any, *parts: Any) -> dict[str, list[str]]:
    """What a description says of code that this package does not define; nothing if there is none.

    Args:
        thing: what is described; a class with a method `describe` of its own vouches for itself and its parts.
        parts: arguments that decide about its results.
    """
    describe = getattr(type(thing), "describe", None)
    if describe is not None and defined_in(describe):
        return {}
    names = list(dict.fromkeys([*_own_names(thing), *(name for part in parts for name in _own_names(part))]))
    return {OWN_CODE: names} if names else {}


def _own_names(value: Any) -> Iterator[str]:
    if isinstance(value, partial):
        yield from _own_names(value.func)
    elif is_ours(type(value)):
        if defined_in(type(value)):
            yield type(value).__qualname__
        elif is_dataclass(value) and not hasattr(value, "describe"):  # else it says so itself
            for f in fields(value):
                yield from _own_names(getattr(value, f.name))
    elif callable(value):
        thing = value if hasattr(value, "__qualname__") else type(value)
        if defined_in(thing):
            yield thing.__qualname__


def is_ours(cls: type) -> bool:
    """Whether a class is this package's, or made of one that is."""
    return any(not defined_in(base) for base in cls.__mro__)


def own_code_in(told: Any) -> list[str]:
    """The names of a user's classes and functions in a description, its parts included."""
    if isinstance(told, list):
        return [name for each in told for name in own_code_in(each)]
    if not isinstance(told, dict):
        return []
    below = [name for key, value in told.items() if key != OWN_CODE for name in own_code_in(value)]
    return list(dict.fromkeys([*told.get(OWN_CODE, []), *below]))
