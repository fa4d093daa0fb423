"""Work that waits for servers, done by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Together = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Does tasks that do not depend on each other, and returns their results in their order."""


def in_parallel(
    work: Callable[[Item, Together], Result],
    items: Sequence[Item],
    concurrency: int,
    *,
    on_task: Callable[[], Any] = lambda: None,
    on_done: Callable[[Item, Result], Any] = lambda item, result: None,
) -> list[Result]:
    """Return `work(item, together)` for each item; what is given to `together` is done in `concurrency` threads.

    As many items are worked on at a time. `on_task` is called after each task and `on_done` after each item, by one
    thread at a time. At the first error, which is raised, and at Ctrl-C no further task starts, and those under way are
    waited for, as their replies are paid for.
    """
    errors: list[BaseException] = []
    lock = threading.Lock()

    def checked(do: Callable[[], Any]) -> Any:
        if errors:
            raise CancelledError
        try:
            return do()
        except BaseException as error:
            errors.append(error)
            raise

    def finish(task: Callable[[], Any]) -> Any:
        result = checked(task)
        with lock:
            on_task()
        return result

    with ThreadPoolExecutor(concurrency) as of_tasks, ThreadPoolExecutor(concurrency) as of_items:

        def together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
            return list(of_tasks.map(finish, tasks))

        def run(item: Item) -> Result:
            result = checked(lambda: work(item, together))
            with lock:
                on_done(item, result)
            return result

        try:
            return list(of_items.map(run, items))
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too
            errors.append(error)
            raise errors[0]  # noqa: B904 - others were cancelled because of it
