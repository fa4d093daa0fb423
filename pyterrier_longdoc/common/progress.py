"""Progress bars: one line for a transformer or, in an experiment, for a run of a system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyterrier as pt

_LINE: ContextVar[Any] = ContextVar("line", default=None)
"""The line of the run that is being made."""


@contextmanager
def line_of_run(name: str, *, shown: bool) -> Iterator[None]:
    """A line for a run, in which its transformers show how far they are, one after the other.

    Args:
        name: what it begins with.
        shown: False shows nothing, and changes nothing for transformers with bars of their own.
    """
    if not shown:
        yield
        return
    # Bars above each other need a terminal that moves its cursor up; notebooks and log files do not.
    with pt.tqdm(total=1, desc=name, unit="run", smoothing=0) as bar:
        token = _LINE.set(bar)
        try:
            yield
        finally:
            _LINE.reset(token)
        bar.update(bar.total - bar.n)


@contextmanager
def work_bar(name: str, unit: str, *, shown: bool) -> Iterator[Any]:
    """A bar for the work of a transformer, whose total is set by its `reset`; None where nothing is shown.

    Args:
        name: of the transformer; in the line of a run stands the name of the run.
        unit: in which the work is counted.
        shown: whether to show a bar where there is no line of a run.
    """
    line = _LINE.get()
    if line is not None:
        line.unit, line.unit_scale = unit, True
        yield line
    elif shown:
        # The mean rate: that of the last passes depends on how long their windows are.
        with pt.tqdm(desc=name, unit=unit, unit_scale=True, smoothing=0) as bar:
            yield bar
    else:
        yield None
