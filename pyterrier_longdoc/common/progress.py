"""Progress bars with tqdm, shown only if `verbose` is set; `TQDM_DISABLE=1` hides all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyterrier as pt

from .signals import take_back_signals

_OPEN: ContextVar[bool] = ContextVar("open", default=False)
"""Whether a bar is open, so that the next one is nested in it."""


@contextmanager
def work_bar(name: str, unit: str, total: int | None = None, *, shown: bool, done: int = 0) -> Iterator[Any]:
    """Yield a tqdm bar, which is hidden unless `shown`; a nested bar disappears at its end.

    Without a total, which can be set later by `reset`, numbers are abbreviated.
    """
    take_back_signals()
    options = {"unit_scale": total is None, "leave": not _OPEN.get(), "smoothing": 0}  # 0 shows the mean rate
    if not shown:  # an explicit `disable=False` would override TQDM_DISABLE
        options["disable"] = True
    token = _OPEN.set(_OPEN.get() or shown)
    try:
        with pt.tqdm(total=total, initial=done, desc=name, unit=unit, **options) as bar:
            yield bar
    finally:
        _OPEN.reset(token)
