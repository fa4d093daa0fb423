"""Work that waits for servers, done by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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


Rounds = Generator[Sequence[Callable[[], Any]], list[Any], Result]
"""A job that yields tasks that do not depend on each other, and is sent their results."""


def in_rounds(
    jobs: Sequence[Rounds[Result]],
    concurrency: int,
    *,
    on_task: Callable[[int], Any] = lambda job: None,
    on_done: Callable[[int], Any] = lambda job: None,
) -> list[Result]:
    """Does the tasks of all jobs, `concurrency` at a time, in threads; the jobs themselves run in this thread.

    So many jobs are open at a time that the threads have work, in their order. At the first error, and at Ctrl-C, no
    further task starts, and those under way are waited for, as their replies are paid for. `on_task` is called after
    each task and `on_done` after each job, with the job's number. The results have the order of the jobs; the first
    error of any is raised.
    """
    errors: list[BaseException] = []
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        crew: _Crew[Result] = _Crew(pool, errors, jobs, on_done)
        waiting = iter(range(len(jobs)))
        try:
            while len(crew.results) < len(jobs):
                while len(crew.rounds) < concurrency and (job := next(waiting, None)) is not None:
                    crew.go_on(job, None)
                if crew.rounds:
                    job = crew.wait()
                    on_task(job)
                    crew.settle(job)
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too
            errors.append(error)
            crew.cancel()
            raise errors[0]  # noqa: B904 - others were cancelled because of it
    return [crew.results[job] for job in range(len(jobs))]


class _Crew(Generic[Result]):
    """The open jobs of `in_rounds`: the tasks of each one's present round, and the results of those that are done."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        errors: list[BaseException],
        jobs: Sequence[Rounds[Result]],
        on_done: Callable[[int], Any],
    ) -> None:
        self.results: dict[int, Result] = {}
        self.rounds: dict[int, list[Future[Any]]] = {}
        self._pool, self._errors, self._jobs, self._on_done = pool, errors, jobs, on_done
        self._left: dict[int, int] = {}
        self._finished: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()

    def go_on(self, job: int, answers: list[Any] | None) -> None:
        """Sends a job its results, and starts its next round; rounds without tasks are answered at once."""
        try:
            tasks = next(self._jobs[job]) if answers is None else self._jobs[job].send(answers)
            while not tasks:
                tasks = self._jobs[job].send([])
        except StopIteration as end:
            self.rounds.pop(job, None)
            self.results[job] = end.value
            self._on_done(job)
            return
        self._left[job] = len(tasks)
        self.rounds[job] = [self._pool.submit(self._checked, task) for task in tasks]
        for future in self.rounds[job]:
            future.add_done_callback(lambda future: self._finished.put((job, future)))

    def wait(self) -> int:
        """Waits for the next task to be done, and returns its job."""
        job, future = self._finished.get()
        future.result()
        return job

    def settle(self, job: int) -> None:
        """A task of a job is done; with the last one of its round it goes on."""
        self._left[job] -= 1
        if not self._left[job]:
            self.go_on(job, [future.result() for future in self.rounds[job]])

    def cancel(self) -> None:
        """No task that is not under way is started."""
        for futures in self.rounds.values():
            for future in futures:
                future.cancel()

    def _checked(self, task: Callable[[], Any]) -> Any:
        if self._errors:
            raise CancelledError
        try:
            return task()
        except BaseException as error:
            self._errors.append(error)
            raise
