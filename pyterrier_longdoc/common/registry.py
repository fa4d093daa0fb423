"""Classes that a saved model names: each registers itself where it is defined, also a user's.

Of foreign code only the name is known, so results that depend on it are never reused silently.
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
    "{**super().describe(), 'version': 1}, with another version whenever the code is another one; PairScorer and "
    "CallableBackend vouch by name="
)


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


def own_code(owner: Any, *parts: Any) -> dict[str, list[str]]:
    """Return the part of a description that names the user code in an object and its arguments.

    A class with a method `describe` of its own vouches for itself and its parts.
    """
    describe = getattr(type(owner), "describe", None)
    if describe is not None and defined_in(describe):
        return {}
    names = list(dict.fromkeys([*_own_names(owner), *(name for part in parts for name in _own_names(part))]))
    return {OWN_CODE: names} if names else {}


def _own_names(value: Any) -> Iterator[str]:
    if isinstance(value, partial):
        yield from _own_names(value.func)
    elif is_ours(type(value)):
        if defined_in(type(value)):
            yield type(value).__qualname__
        elif is_dataclass(value) and not hasattr(value, "describe"):  # `describe` names it otherwise
            for f in fields(value):
                if f.name != "tokenizer":  # callable, but no code of a user
                    yield from _own_names(getattr(value, f.name))
    elif callable(value):
        function = value if hasattr(value, "__qualname__") else type(value)
        if defined_in(function):
            yield function.__qualname__


def is_ours(cls: type) -> bool:
    """Return whether a class is this package's, or a subclass of one."""
    return any(not defined_in(base) for base in cls.__mro__)


def own_code_in(description: Any) -> list[str]:
    """Return the names of a user's classes and functions in a description, its parts included."""
    if isinstance(description, list):
        return [name for part in description for name in own_code_in(part)]
    if not isinstance(description, dict):
        return []
    inner = [name for key, value in description.items() if key != OWN_CODE for name in own_code_in(value)]
    return list(dict.fromkeys([*description.get(OWN_CODE, []), *inner]))
