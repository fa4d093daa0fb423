"""Progress bars: plain lines of tqdm, only where `verbose` asks for them; `TQDM_DISABLE=1` hides them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyterrier as pt

from .signals import take_back_signals

_OPEN: ContextVar[bool] = ContextVar("open", default=False)
"""Whether a bar is open: the next one is nested in it."""


@contextmanager
def work_bar(name: str, unit: str, total: int | None = None, *, shown: bool, done: int = 0) -> Iterator[Any]:
    """Yield a tqdm bar, which is silent unless `shown`; a bar within another's work vanishes at its end.

    Without a total, which the bar's `reset` may set later, numbers are abbreviated.
    """
    take_back_signals()
    options = {"unit_scale": total is None, "leave": not _OPEN.get(), "smoothing": 0}  # the mean rate
    if not shown:  # an explicit `disable=False` would overrule TQDM_DISABLE
        options["disable"] = True
    token = _OPEN.set(_OPEN.get() or shown)
    try:
        with pt.tqdm(total=total, initial=done, desc=name, unit=unit, **options) as bar:
            yield bar
    finally:
        _OPEN.reset(token)
