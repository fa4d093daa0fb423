"""Several queries in flight, and an orderly stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Lock:
    """A lock that can be pickled and copied: the copy is a new, open lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


def in_parallel(
    work: Callable[[Job, Callable[[], None]], Result], jobs: Sequence[Job], concurrency: int
) -> list[Result]:
    """Does `work(job, check)` for each job, `concurrency` at a time, in threads.

    At the first error, and at Ctrl-C, no further job starts and every running one ends at its next `check()`: a
    request that is under way is paid for, so its reply is waited for.

    Returns:
        The results in the order of the jobs.

    Raises:
        BaseException: the first error of any job, or KeyboardInterrupt.
    """
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise CancelledError

    def run(job: Job) -> Result:
        check()
        try:
            return work(job, check)
        except BaseException:
            # Here, not in the waiting thread: that one may wake up after this one has begun the next job.
            stopped.set()
            raise

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            for future in as_completed(futures):
                if not isinstance(future.exception(), CancelledError):  # of another's error
                    future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
