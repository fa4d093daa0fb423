"""Refuse unknown names and suggest similar ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

_ELSEWHERE = {"max_length": "window_size", "model_name": "backbone", "model_name_or_path": "backbone"}
"""Names of arguments in sentence-transformers and transformers."""


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a suggestion of the most similar name for the end of a message; "" if none is similar.

    Example:
        >>> did_you_mean("batchsize", ["batch_size", "device"]), did_you_mean("colour", ["batch_size", "device"])
        ("; did you mean 'batch_size'?", '')
    """
    meant = get_close_matches(_ELSEWHERE.get(name, name), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {meant[0]!r}?" if meant else ""


class ChecksNames:
    """A dataclass that refuses unknown arguments and attributes that look like misspelt arguments."""

    def __new__(cls, *_: Any, **arguments: Any) -> Any:
        """Create an object; raise TypeError if a dataclass lacks one of the arguments."""
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if "__dataclass_fields__" in vars(owner):
            names = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
            for name in (name for name in arguments if name not in names):
                hint = did_you_mean(name, names)
                if not hint and owner is not cls:
                    hint = f"; is {cls.__name__} decorated with @dataclass?"
                raise TypeError(f"{cls.__name__} has no argument {name!r}{hint}")
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        arguments = getattr(type(self), "__dataclass_fields__", {})
        if not (name.startswith("_") or name in self.__dict__ or name in arguments or hasattr(type(self), name)):
            # Subclasses can have other attributes: only names that are very similar to an argument are refused.
            meant = did_you_mean(name, arguments, cutoff=0.8)
            if meant:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{meant}")
        super().__setattr__(name, value)
