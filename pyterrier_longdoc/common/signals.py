"""Ctrl-C and the end of a job, which Python answers also after Java has started."""

from __future__ import annotations

import signal
import threading

import pyterrier as pt

_ENDS = [getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)]
"""The signals that Java answers by itself: it shuts down, under the threads of torch."""


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
