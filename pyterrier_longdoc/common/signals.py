"""Signals of a program that uses Java: Python answers Ctrl-C and the end of a job, Ray leaves Java its own signal.

Java's start imports this module, so that it imports nothing but PyTerrier.
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
"""The signals that Java answers by itself: it shuts down, under the threads of torch."""

_RAY_SWITCH = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""The environment variable, read when `ray` is imported, with which Ray installs no handlers of crashes."""


class JavaBesideRay(pt.java.JavaInitializer):
    """What PyTerrier calls before it starts Java: Ray, which may connect later, then leaves SIGSEGV to Java.

    Java uses this signal for its own work. Ray replaces the handler by its own, and by that of `faulthandler` if this
    is not on yet.
    """

    def pre_init(self, jnius_config: Any) -> None:
        """Do what Ray would do after Java's start."""
        if not faulthandler.is_enabled():
            with suppress(AttributeError, OSError, RuntimeError):  # without a file as stderr Ray's call fails, too
                faulthandler.enable(all_threads=False)
        if "ray" not in sys.modules:  # else it is too late, which `java_loses_signal` must see
            os.environ.setdefault(_RAY_SWITCH, "1")


def java_loses_signal() -> bool:
    """Return whether Java is there and Ray, if it connects now, replaces its handler of SIGSEGV."""
    return pt.java.started() and os.environ.get(_RAY_SWITCH, "").lower() not in ("1", "true")


def take_back_signals() -> None:
    """Install Python's handlers again if Java has replaced them; call it where a long loop begins.

    These are the user's own handlers where there are any. Does nothing in other threads, which cannot install handlers.
    """
    if not pt.java.started() or threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDS:
        handler = signal.getsignal(number)
        if handler is not None:  # None: installed by other code than Python's before it started
            signal.signal(number, handler)
