"""Run tasks that wait for servers in several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

RunAll = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs independent tasks and returns their results in order."""


def in_parallel(
    work: Callable[[Item, RunAll], Result],
    items: Sequence[Item],
    concurrency: int,
    *,
    on_task: Callable[[], Any] = lambda: None,
    on_done: Callable[[Item, Result], Any] = lambda item, result: None,
) -> list[Result]:
    """Return `work(item, run_all)` for each item; `run_all` runs tasks in `concurrency` threads.

    Processes up to `concurrency` items at a time. `on_task` is called after each task and `on_done` after each item, by
    one thread at a time. After an error or Ctrl-C, no further task starts; running tasks are finished, because their
    replies are paid for. Then the first error is raised.
    """
    errors: list[BaseException] = []
    lock = Lock()

    def unless_error(call: Callable[[], Any]) -> Any:
        if errors:
            raise CancelledError
        try:
            return call()
        except BaseException as error:
            errors.append(error)
            raise

    def finish(task: Callable[[], Any]) -> Any:
        result = unless_error(task)
        with lock:
            on_task()
        return result

    with ThreadPoolExecutor(concurrency) as of_tasks, ThreadPoolExecutor(concurrency) as of_items:

        def run_all(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
            return list(of_tasks.map(finish, tasks))

        def run(item: Item) -> Result:
            result = unless_error(lambda: work(item, run_all))
            with lock:
                on_done(item, result)
            return result

        try:
            return list(of_items.map(run, items))
        except BaseException as error:  # noqa: BLE001 - including Ctrl-C
            errors.append(error)
    # Not inside "except", where the error would contain another one, possibly with a request and its key.
    raise errors[0]
