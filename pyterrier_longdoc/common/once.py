"""A folder that several processes want, on one machine or on many, and that one of them makes."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BEAT = 10.0
"""Seconds after which who makes a folder shows again that it is alive."""

_LOST = 180.0
"""Seconds without such a sign after which it is taken for dead: network file systems show changes a minute late."""

_POLL = 0.2


def made_once(folder: Path, make: Callable[[Path], None], on_wait: Callable[[str], None] = lambda owner: None) -> None:
    """Returns when the folder is there and complete: one process makes it, the others wait for that one.

    Renaming makes it complete at once, which needs no locks of the file system. A lock file only spares the others the
    same work: if who holds it dies, somebody else takes over, at once on its machine and after three minutes on others.

    Args:
        folder: its parent is there.
        make: fills another folder, which takes its place.
        on_wait: is told once who makes it, if that is another process.
    """
    lock, told = folder.with_name(f".{folder.name}.lock"), False
    seen: tuple[float, str] | None = None  # the last sign of life, and who gave it
    since = time.monotonic()
    while not folder.is_dir():
        if _take(lock):
            _make(folder, make, lock)
            continue
        sign = _sign_of_life(lock)
        if sign is None:  # it was released
            continue
        if sign != seen:
            seen, since = sign, time.monotonic()
        if not told:
            told = True
            on_wait(sign[1])
        if _is_dead(sign[1]) or time.monotonic() - since > _LOST:
            lock.unlink(missing_ok=True)
        else:
            time.sleep(_POLL)


def _take(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(f"{socket.gethostname()} {os.getpid()}")
    return True


def _make(folder: Path, make: Callable[[Path], None], lock: Path) -> None:
    part = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with _beating(lock):
            if not folder.is_dir():
                part.mkdir()
                make(part)
                part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process took this one for dead and was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
        lock.unlink(missing_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.part"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _beating(lock: Path) -> Iterator[None]:
    """Gives a sign of life every few seconds."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT):
            with suppress(FileNotFoundError):  # another process took this one for dead
                os.utime(lock)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sign_of_life(lock: Path) -> tuple[float, str] | None:
    try:
        return lock.stat().st_mtime, lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _is_dead(owner: str) -> bool:
    """Whether it is a process of this machine that is no more."""
    host, _, process = owner.partition(" ")
    if host != socket.gethostname() or not process or os.name != "posix":
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        pass
    return False
