"""How transformers show themselves: in a notebook and in PyTerrier's drawings."""

from __future__ import annotations

import re
from typing import Any

from .arguments import arguments_of, changed_names

HELP_URL = "https://github.com/terrierteam/pyterrier_longdoc"


def described(value: Any) -> str:
    """A pipeline, function or argument in words that are the same in another process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def changed_arguments(transformer: Any, hidden: tuple[str, ...]) -> list[str]:
    """`name=value` of the constructor arguments that differ from their defaults, `hidden` ones left out."""
    names = changed_names(transformer, arguments_of(transformer).keys() - set(hidden))
    return [f"{name}={getattr(transformer, name)!r}" for name in names]


class Presented:
    """What rerankers and judges have in common in how they show themselves."""

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        return {"label": type(self).__name__, "help_url": HELP_URL}

    def subtransformers(self) -> dict[str, Any]:
        """None: a text loader given as argument is no step of its own."""
        return {}


class WithBackbone(Presented):
    """The same for transformers that are named by their backbone."""

    backbone: Any

    def __repr__(self) -> str:
        shown = changed_arguments(self, ("backbone", "verbose", "text_loader"))
        return f"{type(self).__name__}({', '.join([repr(str(self.backbone)), *shown])})"
