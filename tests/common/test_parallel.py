"""Threads that wait for servers: results in order, and an end at the first error."""

from __future__ import annotations

import threading

import pytest

from pyterrier_longdoc.common.parallel import in_parallel, in_rounds
from pyterrier_longdoc.common.servers import BackendError


def test_after_an_error_no_job_starts_and_running_ones_end_at_their_next_step():
    started, steps = [], []

    def work(job, step):
        step()
        started.append(job)
        if job == 1:
            raise BackendError("outage")
        while True:  # until it is stopped
            step()

    with pytest.raises(BackendError, match="outage"):
        in_parallel(work, range(20), 2, on_step=lambda: steps.append(1), on_done=lambda: started.append("done"))
    assert sorted(started) == [0, 1]
    assert in_parallel(lambda job, step: step() or -job, range(3), 2, on_step=lambda: steps.append(2)) == [0, -1, -2]
    assert steps[-3:] == [2] * 3


def rounds_of(sizes, seen):
    """A job that asks in rounds, and returns what it was told."""
    told = []
    for number, size in enumerate(sizes):
        told.append((yield [lambda number=number, task=task: seen(number, task) for task in range(size)]))
    return told


@pytest.mark.parametrize("concurrency", [1, 3])
def test_rounds_get_their_results_in_order(concurrency):
    tasks, ended = [], []
    jobs = [rounds_of(sizes, lambda number, task: (number, task)) for sizes in ([2, 0, 3], [], [0], [1])]
    found = in_rounds(jobs, concurrency, on_task=tasks.append, on_done=ended.append)
    assert found[0] == [[(0, 0), (0, 1)], [], [(2, 0), (2, 1), (2, 2)]]
    assert found[1:] == [[], [[]], [[(0, 0)]]]
    assert sorted(tasks) == [0] * 5 + [3]
    assert sorted(ended) == [0, 1, 2, 3]


def test_tasks_of_one_round_run_at_the_same_time():
    together = threading.Barrier(3, timeout=10)
    assert len(in_rounds([rounds_of([3, 3], lambda *_: together.wait())], 3)[0]) == 2


def test_after_an_error_no_task_starts():
    started = []

    def task(number, place):
        started.append(place)
        if place == 1:
            raise BackendError("outage")

    with pytest.raises(BackendError, match="outage"):
        in_rounds([rounds_of([50], task), rounds_of([50], task)], 1)
    assert started == [0, 1]


def test_an_error_of_the_job_itself_ends_all():
    def wrong():
        yield [lambda: 1]
        raise ValueError("no such document")

    with pytest.raises(ValueError, match="no such document"):
        in_rounds([wrong()], 2)
