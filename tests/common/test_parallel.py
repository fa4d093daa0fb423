"""Threads that wait for servers: results in order, and an end at the first error."""

from __future__ import annotations

import pytest

from pyterrier_longdoc.common.parallel import in_parallel
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
