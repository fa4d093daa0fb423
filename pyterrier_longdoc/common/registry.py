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
    """Add a class to the known ones of a kind; one that is defined anew, as in a notebook, replaces the old one."""
    old = known.get(name, cls)
    if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two {kind} are named {name!r}: {old.__qualname__} and {cls.__qualname__}")
    known[name] = cls


def defined_in(cls: Any) -> dict[str, str]:
    """Return what stands beside the name of a class or function: its module, unless it is this package's own."""
    return {} if str(cls.__module__).startswith("pyterrier_longdoc.") else {"module": cls.__module__}


def look_up(known: Mapping[str, C], what: str, name: object, module: object = None) -> C:
    """Return the class of that name, for which `what` stands in the error.

    The module that defined it when the model was saved is named, never imported, as a model may be anybody's.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    advice = f"import the module {module!r}, which defined it, and load again"
    if module in (None, "__main__"):
        advice = "define it here, as the script or notebook did" if module else f"known are {', '.join(known)}"
    raise ValueError(f"{what} {name!r}: {advice}")


def own_code(thing: Any, *parts: Any) -> dict[str, list[str]]:
    """Return what a description of a thing and its arguments says of code that is not this package's.

    A class with a method `describe` of its own vouches for itself and its parts.
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
    """Return whether a class is this package's, or made of one that is."""
    return any(not defined_in(base) for base in cls.__mro__)


def own_code_in(told: Any) -> list[str]:
    """Return the names of a user's classes and functions in a description, its parts included."""
    if isinstance(told, list):
        return [name for each in told for name in own_code_in(each)]
    if not isinstance(told, dict):
        return []
    below = [name for key, value in told.items() if key != OWN_CODE for name in own_code_in(value)]
    return list(dict.fromkeys([*told.get(OWN_CODE, []), *below]))
