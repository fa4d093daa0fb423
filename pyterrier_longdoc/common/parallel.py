"""Work that waits for servers, done by several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Lock
from typing import Any, TypeVar

from .signals import take_back_signals

Item = TypeVar("Item")
Result = TypeVar("Result")

RunAll = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Does tasks that do not depend on each other, and returns their results in their order."""


def in_parallel(
    work: Callable[[Item, RunAll], Result],
    items: Sequence[Item],
    concurrency: int,
    *,
    on_task: Callable[[], Any] = lambda: None,
    on_done: Callable[[Item, Result], Any] = lambda item, result: None,
    stop: Event | None = None,
) -> list[Result]:
    """Return `work(item, run_all)` for each item; `run_all` does tasks in `concurrency` threads.

    As many items are in work at a time. `on_task` is called after each task and `on_done` after each item, by one
    thread at a time. After the first error, which is raised, and after Ctrl-C no task starts; tasks under way are
    waited for, as their replies are paid for. `stop`, which may end their pauses, is then set.
    """
    take_back_signals()
    errors: list[BaseException] = []
    lock, stop = Lock(), stop or Event()

    def unless_error(call: Callable[[], Any]) -> Any:
        if errors:
            raise CancelledError
        try:
            return call()
        except BaseException as error:
            errors.append(error)  # first, as others may fail because of `stop`
            stop.set()
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
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too
            errors.append(error)
            stop.set()
    # Outside "except": inside it this error would carry another one, which may hold a request and its key.
    raise errors[0]
