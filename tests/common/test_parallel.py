"""Threads that wait for servers: results in order, and an end at the first error."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from pyterrier_longdoc.common.parallel import in_parallel
from pyterrier_longdoc.common.servers import BackendError


def in_rounds(sizes, together):
    """Asks in rounds of these sizes, and returns what it was told."""
    return [together([partial(pair, number, task) for task in range(size)]) for number, size in enumerate(sizes)]


def pair(number, task):
    return number, task


@pytest.mark.parametrize("concurrency", [1, 3])
def test_rounds_return_results_in_order(concurrency):
    tasks, ended, items = [], [], [[2, 0, 3], [], [0], [1]]
    found = in_parallel(
        in_rounds, items, concurrency, on_task=lambda: tasks.append(1), on_done=lambda *done: ended.append(done)
    )
    assert found[0] == [[(0, 0), (0, 1)], [], [(2, 0), (2, 1), (2, 2)]]
    assert found[1:] == [[], [[]], [[(0, 0)]]]
    assert len(tasks) == 6
    assert sorted(ended) == sorted(zip(items, found, strict=True))


def test_tasks_of_one_round_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=10)
    assert len(in_parallel(lambda item, together: together([barrier.wait] * 3), ["one"], 3)[0]) == 3


def test_the_number_of_concurrent_tasks_is_limited():
    running, most = [], []

    def task():
        running.append(1)
        most.append(len(running))
        time.sleep(0.001)
        running.pop()

    in_parallel(lambda item, together: together([task] * 5), range(6), 3)
    assert max(most) <= 3


def test_after_an_error_no_task_starts_and_the_first_error_is_raised():
    started = []

    def task(number):
        started.append(number)
        if number == 1:
            raise BackendError("outage")

    def work(item, together):
        return together([partial(task, number) for number in range(50)])

    with pytest.raises(BackendError, match="outage"):
        in_parallel(work, range(20), 1)
    assert started == [0, 1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_outside_of_tasks_ends_everything(error):
    def wrong(item, together):
        together([lambda: 1])
        raise error("no such document")

    with pytest.raises(error, match="no such document"):
        in_parallel(wrong, range(5), 2)


def test_the_first_error_does_not_contain_a_later_one():
    def work(item, together):
        if item == "late":
            time.sleep(0.2)
        raise BackendError(item)

    with pytest.raises(BackendError, match="first") as caught:
        in_parallel(work, ["late", "first"], 2)
    assert caught.value.__context__ is None
