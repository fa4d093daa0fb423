"""Signals of programs with Java: Python handles Ctrl-C and the end of a job, and Ray leaves Java its own signal.

This module is imported when Java starts, so it only imports PyTerrier.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

import pyterrier as pt

_ENDS = [getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)]
"""The signals on which Java shuts down, while threads of torch are running."""

_RAY_SWITCH = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""The environment variable, read when `ray` is imported, that prevents Ray's crash handlers."""


class JavaBesideRay(pt.java.JavaInitializer):
    """Called by PyTerrier before it starts Java, so that Ray, if it connects later, does not replace Java's SIGSEGV.

    Java uses this signal internally. Ray replaces its handler by its own, and by that of `faulthandler` unless this is
    already enabled.
    """

    def pre_init(self, jnius_config: Any) -> None:
        """Do what Ray would do after Java has started."""
        if not faulthandler.is_enabled():
            with suppress(AttributeError, OSError, RuntimeError):  # Ray's call also fails if stderr is not a file
                faulthandler.enable(all_threads=False)
        if "ray" not in sys.modules:  # otherwise it is too late, which `java_loses_signal` must detect
            os.environ.setdefault(_RAY_SWITCH, "1")


def java_loses_signal() -> bool:
    """Return whether Java has started and Ray would replace its SIGSEGV handler by connecting now."""
    return pt.java.started() and os.environ.get(_RAY_SWITCH, "").lower() not in ("1", "true")


def take_back_signals() -> None:
    """Install Python's or the user's handlers again if Java has replaced them; called at the start of long loops.

    Does nothing outside the main thread, because other threads cannot install handlers.
    """
    if not pt.java.started() or threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDS:
        handler = signal.getsignal(number)
        if handler is not None:  # None: not installed by Python
            signal.signal(number, handler)
