"""Warnings that name the user's line, once for a transformer, or for a system with all its runs, batches and copies."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from .frames import TruncationWarning

NOT_THE_USERS = ("pyterrier", "torch", "contextlib")
"""What the names of modules begin with that stand between the user's line and the place where something is noticed."""

Told = set[tuple[Any, ...]]
"""What somebody was warned of."""


class _System(NamedTuple):
    name: str | None
    told: Told


_SYSTEM: ContextVar[_System | None] = ContextVar("system", default=None)
"""The system that is run."""

_HEARD: ContextVar[bool] = ContextVar("heard", default=True)
"""Whether somebody is to be warned."""


@contextmanager
def one_system(name: str | None, told: Told) -> Iterator[None]:
    """Whatever transformers run in here are one system; within another system nothing changes.

    Args:
        name: of the system; None where its transformers name themselves.
        told: of what was warned before; grows.
    """
    token = _SYSTEM.set(_SYSTEM.get() or _System(name, told))
    try:
        yield
    finally:
        _SYSTEM.reset(token)


@contextmanager
def unheard() -> Iterator[None]:
    """What would be told in here is left to be told by a later run."""
    token = _HEARD.set(False)
    try:
        yield
    finally:
        _HEARD.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package and PyTerrier that led here, whether by a pipeline or an experiment."""
    if not _HEARD.get():
        return
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def is_news(told: Told, *notice: Any) -> bool:
    """Whether neither a transformer nor the system that is run has warned of something; from now on both have.

    Args:
        told: of what the transformer has warned.
        notice: of what it would warn.
    """
    if not _HEARD.get():
        return False
    system = _SYSTEM.get()
    known = [told] if system is None else [told, system.told]
    news = not any(notice in each for each in known)
    for each in known:
        each.add(notice)
    return news


def warn_of_cuts(transformer: Any, told: Told, causes: Iterable[str], what: str) -> None:
    """Warns in a system's name of text that was not read, once for each of the arguments that cut it.

    Args:
        transformer: what has cut it.
        told: of what it has warned.
        causes: the arguments.
        what: says how much was not read.
    """
    system = _SYSTEM.get()
    name = None if system is None else system.name
    news = [is_news(told, TruncationWarning, name, cause) for cause in causes]
    if any(news):
        who = repr(transformer) if name is None else f"{name!r}: {transformer!r}"
        warn(f"{who}{what} (see .coverage).", TruncationWarning)
