"""Collections of things with names, such as the papers' models and protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeVar

Thing = TypeVar("Thing")


class Named(Mapping[str, Thing]):
    """Things by name; an unknown name is answered by all that are known.

    Args:
        entries: the things.
    """

    kind: ClassVar[str]
    """What they are called in messages."""

    def __init__(self, entries: Mapping[str, Thing]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Thing:
        if name not in self._entries:
            raise KeyError(f"no {self.kind} is named {name!r}; known are {', '.join(self._entries)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
