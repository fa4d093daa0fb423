"""Python functions in processes of their own, which may be killed."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def start(function: Callable[[], None]) -> int:
    """Runs a function in a copy of this process; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        import torch

        # Threads do not survive a fork.
        torch.set_num_threads(1)
        function()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as a second pytest
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int, *, timeout: float = 120.0) -> int:
    """Its exit code, negative if a signal killed it."""
    for _ in range(int(timeout / 0.02)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    kill(child)
    raise TimeoutError(f"process {child} did not end within {timeout} seconds")


def kill(child: int) -> None:
    """`kill -9`."""
    os.kill(child, signal.SIGKILL)
