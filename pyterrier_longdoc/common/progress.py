"""Progress bars: one line for each unit of work (a transformer, a run, a fold, an epoch), whatever works within it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock
from typing import Any

import pyterrier as pt

LOG_SECONDS = 30.0
"""How often a line is written anew where it is no screen: a log file keeps each of its states."""

_CLEARING = Lock()
"""Held by who keeps lines clear of warnings."""

_LINE: ContextVar[_Line | None] = ContextVar("line", default=None)
"""The line that is being drawn."""


@contextmanager
def one_line(name: str, unit: str = "run", *, shown: bool) -> Iterator[None]:
    """A line for a unit of work, in which its transformers show how far they are, one after the other.

    Within the line of a larger unit it is no second one: its name is added to that one's for as long as it lasts.

    Args:
        name: what it begins with.
        unit: what it is, in the singular.
        shown: where there is no larger unit, False shows nothing, and changes nothing for bars of what works within.
    """
    line = _LINE.get()
    if line is not None:
        with line.named(name):
            yield
    elif shown:
        with _new_line(name, unit):
            yield
    else:
        yield


@contextmanager
def work_bar(name: str, unit: str, *, shown: bool, total: int | None = None, done: int = 0) -> Iterator[Any]:
    """A bar for the work of a transformer or a function; None where nothing is shown.

    What works within this work shows nothing, unless `aside` lets it.

    Args:
        name: of who works; in the line of a larger unit stands the name of that unit.
        unit: in which the work is counted.
        shown: whether to show a bar where there is no line of a larger unit.
        total: how much there is to do; None if the bar's `reset` will tell a number so large that it is abbreviated.
        done: how much of it was done earlier.
    """
    line = _LINE.get()
    if (line is None and not shown) or (line is not None and line.busy):
        yield None
        return
    # The mean rate: that of the last passes depends on how long their windows are.
    with (
        _new_line(name, unit) if line is None else nullcontext(line) as own,
        nullcontext() if own is None else own.work(unit, total, done) as bar,
    ):
        yield bar


@contextmanager
def counting(name: str, unit: str, total: int, *, shown: bool, done: int = 0) -> Iterator[Callable[..., Any]]:
    """As `work_bar`: what to call for each part that is done, also where nothing is shown."""
    with work_bar(name, unit, shown=shown, total=total, done=done) as bar:
        yield (lambda number=1: None) if bar is None else bar.update


@contextmanager
def aside(name: str) -> Iterator[None]:
    """Lets something else show its work in the line of the present work, which then goes on where it was."""
    line = _LINE.get()
    with nullcontext() if line is None else line.interrupted(name):
        yield


class _Line:
    """A bar, and who draws in it."""

    def __init__(self, bar: Any, name: str) -> None:
        self.bar, self.names, self.busy, self.works = bar, [name], False, 0
        self._unit, self._start = bar.unit, bar.start_t

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.names.append(name)
        self._describe()
        try:
            yield
        finally:
            self.names.pop()
            self._describe()

    @contextmanager
    def work(self, unit: str, total: int | None, done: int) -> Iterator[Any]:
        bar = self.bar
        bar.unit, bar.unit_scale, bar.postfix, bar.initial = unit, total is None, None, 0
        if total is not None:
            bar.reset(total=max(1, total))
            bar.n = bar.initial = done
        self.busy, self.works = True, self.works + 1
        try:
            yield bar
        finally:
            self.busy = False

    @contextmanager
    def interrupted(self, name: str) -> Iterator[None]:
        bar, works, busy = self.bar, self.works, self.busy
        state = {key: getattr(bar, key) for key in ("n", "initial", "start_t", "unit", "unit_scale", "postfix")}
        total, self.busy = bar.total, False
        try:
            with self.named(name):
                yield
        finally:
            self.works, self.busy = works, busy
            vars(bar).update(state, initial=0)
            bar.reset(total=total)
            vars(bar).update(state)
            bar.refresh()

    def end(self) -> None:
        """All is done: the line keeps the figures of its one work, or shows how long all of them have taken."""
        bar = self.bar
        if self.works != 1:
            bar.unit, bar.unit_scale, bar.postfix, bar.initial = self._unit, False, None, 0
            bar.reset(total=1)
            bar.start_t = self._start
            bar.update(1)

    def _describe(self) -> None:
        self.bar.set_description(", ".join(self.names), refresh=False)


@contextmanager
def _new_line(name: str, unit: str) -> Iterator[_Line | None]:
    """A line; None where `TQDM_DISABLE` forbids bars."""
    # Bars above each other need a terminal that moves its cursor up; notebooks and log files do not.
    with pt.tqdm(total=1, desc=name, unit=unit, smoothing=0, **_place()) as bar, _clear_of_warnings():
        if bar.disable:
            yield None
            return
        line = _Line(bar, name)
        token = _LINE.set(line)
        try:
            yield line
        finally:
            _LINE.reset(token)
        line.end()


def _place() -> dict[str, Any]:
    """Where a line is drawn, and how often."""
    if type(sys.stderr).__module__.startswith("ipykernel"):
        return {"file": sys.stdout}  # notebooks show the other one as an error
    return {} if sys.stderr.isatty() else {"mininterval": LOG_SECONDS}


@contextmanager
def _clear_of_warnings() -> Iterator[None]:
    """A warning does not stand behind half a line: lines are cleared before, and drawn again below."""
    # Of lines in several threads the first does it for all: undone in another order than done, one would stay.
    if not _CLEARING.acquire(blocking=False):
        yield
        return
    usual = warnings.showwarning

    def show(*args: Any, **options: Any) -> None:
        with pt.tqdm.external_write_mode(sys.stderr):
            usual(*args, **options)
            sys.stderr.flush()  # notebooks keep no order of their own between two streams

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = usual
        _CLEARING.release()
