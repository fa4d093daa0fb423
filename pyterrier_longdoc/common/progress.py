"""Progress bars with tqdm, shown only if `verbose` is set; `TQDM_DISABLE=1` hides all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyterrier as pt

from .signals import take_back_signals


@contextmanager
def work_bar(name: str, unit: str, total: int | None = None, *, shown: bool, done: int = 0) -> Iterator[Any]:
    """Yield a tqdm bar, which is hidden unless `shown`; a nested bar disappears at its end.

    Without a total, which can be set later by `reset`, numbers are abbreviated.
    """
    take_back_signals()
    options = {"unit_scale": total is None, "smoothing": 0}  # 0 shows the mean rate
    if not shown:  # an explicit `disable=False` would override TQDM_DISABLE
        options["disable"] = True
    with pt.tqdm(total=total, initial=done, desc=name, unit=unit, **options) as bar:
        bar.leave = getattr(bar, "pos", 0) == 0  # tqdm's `leave=None` would also remove outer bars of a notebook
        yield bar
