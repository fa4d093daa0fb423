"""Two threads, in an order that the test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE = 60.0
"""Seconds to wait for the other thread, which comes at once unless the test fails."""

BLOCKED = 0.3
"""Seconds after which a thread counts as held up by a lock."""


class Interleaved:
    """Lets one thread stop at a place until another one has done its work.

    A thread stops where `stop` is called in it, the first time; all other calls go on at once.
    """

    def __init__(self) -> None:
        self._stopped, self._goes_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            assert self._goes_on.wait(PATIENCE)

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """The results of two works: the second begins and ends while the first is stopped."""
        with ThreadPoolExecutor(1) as pool:
            try:
                result = pool.submit(first)
                assert self._stopped.wait(PATIENCE)
                other = second()
            finally:
                self._goes_on.set()
            return result.result(), other

    def before(self, monkeypatch: Any, owner: Any, name: str) -> Interleaved:
        """This, with a stop before a function is called."""
        original = getattr(owner, name)

        def stopping(*args: Any, **kwargs: Any) -> Any:
            self.stop()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, stopping)
        return self


def meanwhile(work: Callable[[], Any]) -> threading.Thread:
    """A thread that has done its work, or waits for a lock."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(BLOCKED)
    return thread
