"""Work that waits for servers, done by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Job, Callable[[], None]], Result],
    jobs: Sequence[Job],
    concurrency: int,
    *,
    on_step: Callable[[], Any] = lambda: None,
    on_done: Callable[[], Any] = lambda: None,
) -> list[Result]:
    """Does `work(job, step)` for each job, `concurrency` at a time, in threads.

    At the first error, and at Ctrl-C, every job ends at its next `step()`, the first of which comes before anything is
    asked: a request that is under way is paid for, so its reply is waited for. `on_step` is called at each step and
    `on_done` after each job, by one thread at a time. The results have the order of the jobs; the first error of any
    is raised.
    """
    errors: list[BaseException] = []
    lock = threading.Lock()

    def step() -> None:
        if errors:
            raise CancelledError
        with lock:
            on_step()

    def run(job: Job) -> Result:
        try:
            result = work(job, step)
        except BaseException as error:
            errors.append(error)
            raise
        with lock:
            on_done()
        return result

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            return list(pool.map(run, jobs))
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too
            errors.append(error)
            raise errors[0]  # noqa: B904 - others were cancelled because of it
