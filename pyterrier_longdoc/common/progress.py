"""Progress bars with tqdm, shown only if `verbose` is set; `TQDM_DISABLE=1` hides all of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyterrier as pt

_ENDS = [getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)]
"""The signals on which Java shuts down, while threads of torch are running."""


@contextmanager
def work_bar(name: str, unit: str, total: int | None = None, *, shown: bool, done: int = 0) -> Iterator[Any]:
    """Yield a tqdm bar, which is hidden unless `shown`; a nested bar disappears at its end.

    All long work begins here, so this also lets Python handle Ctrl-C and the end of a job again. Without a total, which
    can be set later by `reset`, numbers are abbreviated.
    """
    _take_back_signals()
    options = {"unit_scale": total is None, "smoothing": 0}  # 0 shows the mean rate
    if not shown:  # an explicit `disable=False` would override TQDM_DISABLE
        options["disable"] = True
    with pt.tqdm(total=total, initial=done, desc=name, unit=unit, **options) as bar:
        bar.leave = getattr(bar, "pos", 0) == 0  # tqdm's `leave=None` would also remove outer bars of a notebook
        yield bar


def _take_back_signals() -> None:
    """Install Python's or the user's handlers again, because Java replaces them when it starts."""
    if not pt.java.started() or threading.current_thread() is not threading.main_thread():
        return  # other threads cannot install handlers
    for number in _ENDS:
        handler = signal.getsignal(number)
        if handler is not None:  # None: not installed by Python
            signal.signal(number, handler)
