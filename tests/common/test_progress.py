"""One line for a unit of work, whatever works within it and wherever it is shown."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from threading import Event, Thread

import pytest

from pyterrier_longdoc.common import progress
from pyterrier_longdoc.common.progress import aside, counting, one_line, work_bar

from ..support.lines import shown_lines


class Terminal(io.StringIO):
    """A screen as wide as it takes."""

    def isatty(self) -> bool:
        return True


def work(name: str, parts: int = 3, *, shown: bool = True) -> None:
    with counting(name, "doc", parts, shown=shown) as done:
        for _ in range(parts):
            done()


def test_a_unit_within_another_draws_in_its_line(capsys):
    with one_line("fold 1", "fold", shown=True):
        with one_line("epoch 1", "epoch", shown=True):
            work("MaxP", 4)
            states = capsys.readouterr().err
        work("MaxP", 6)
    assert "fold 1, epoch 1:" in states.split("\r")[-1]
    with one_line("fold 2", "fold", shown=True):
        work("MaxP", 4, shown=False)
    assert shown_lines(capsys) == ["fold 1", "fold 2"]


def test_a_line_keeps_the_figures_of_its_one_work_else_it_counts_itself(capsys):
    for parts in ((), (4,), (4, 6)):
        with one_line("seed 1", "seed", shown=True):
            for number in parts:
                work("MaxP", number)
    last = [line.split("\r")[-1] for line in capsys.readouterr().err.split("\n")[:-1]]
    assert [line.split("|")[2].split()[0] for line in last] == ["1/1", "4/4", "1/1"]
    assert ["s/seed" in line or "seed/s" in line for line in last] == [True, False, True]


def test_nothing_is_shown_unless_asked_for(capsys):
    with one_line("fold 1", "fold", shown=False), aside("validation"):
        work("MaxP", shown=False)
    assert capsys.readouterr().err == ""
    with one_line("fold 1", "fold", shown=False):
        work("MaxP")
    assert shown_lines(capsys) == ["MaxP"]


def test_work_within_work_shows_only_what_it_is_let_to(capsys):
    with work_bar("epoch 3", "query", shown=True, total=8, done=2) as bar:
        bar.update(4)
        bar.set_postfix(loss="0.5")
        work("MaxP", 5)
        assert (bar.n, bar.total, bar.initial) == (6, 8, 2)
        began = bar.start_t
        with aside("validation"):
            work("MaxP", 5)
            assert (bar.n, bar.total, bar.unit, bar.postfix) == (5, 5, "doc", None)
        assert (bar.n, bar.total, bar.initial, bar.unit) == (6, 8, 2, "query")
        assert (bar.start_t, bar.postfix, bar.desc) == (began, "loss=0.5", "epoch 3: ")
        bar.update(2)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "8/8" in shown.split("\r")[-1]
    with work_bar("MaxP", "token", shown=True) as bar:
        bar.reset(total=7)
        bar.update(7)
    assert shown_lines(capsys) == ["MaxP"]


def test_after_an_error_the_next_one_has_a_line_of_its_own(capsys):
    with pytest.raises(KeyError), one_line("fold 1", shown=True), work_bar("MaxP", "doc", shown=True, total=3):
        raise KeyError
    assert "0/3" in capsys.readouterr().err.split("\r")[-1]
    work("MaxP")
    assert shown_lines(capsys) == ["MaxP"]


def test_a_log_file_gets_few_states_of_a_line_and_a_terminal_many(monkeypatch):
    every = []
    for file in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", file)
        with work_bar("MaxP", "doc", shown=True, total=1) as bar:
            assert bar.fp.getvalue() == file.getvalue()
            every.append(bar.mininterval)
    assert every[0] < 1 < every[1] == progress.LOG_SECONDS


def test_warnings_stand_in_lines_of_their_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    usual = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = usual = lambda message, *_: screen.write(f"{message}\n")
        with one_line("fold 1", shown=True):
            warnings.warn("look here", UserWarning, stacklevel=1)
            work("MaxP")
        assert warnings.showwarning is usual
    lines = [line.split("\r")[-1] for line in screen.getvalue().split("\n")]
    assert lines[0] == "look here"
    assert "fold 1: 100%" in lines[1]
    assert lines[2:] == [""]


def test_lines_of_threads_leave_the_handling_of_warnings_as_it_was():
    usual, first_drawn, second_drawn, first_ended = warnings.showwarning, Event(), Event(), Event()

    def first() -> None:
        with one_line("first", shown=True):
            first_drawn.set()
            assert second_drawn.wait(10)

    def second() -> None:
        assert first_drawn.wait(10)
        with one_line("second", shown=True):
            second_drawn.set()
            assert first_ended.wait(10)

    threads = [Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    threads[0].join()
    first_ended.set()
    threads[1].join()
    assert warnings.showwarning is usual


def test_work_that_was_begun_before_shows_no_speed_for_what_was_done(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with work_bar("epoch 1", "query", shown=True, total=1000, done=900) as bar:
        with aside("validation"):
            work("MaxP")
        bar.update(100)
    states = sys.stderr.getvalue()
    assert "1000/1000" in states
    assert "-" not in states


WITHOUT_BARS = """
import numpy as np
import pyterrier_longdoc as ld
from tests.support import tiny
from tests.support.toy import toy_task

recipe = ld.TrainingArgs(epochs=1, queries_per_step=2)
models = [ld.FirstP(tiny.encoder(), device="cpu", training=recipe, verbose=verbose) for verbose in (False, True)]
run, judged = toy_task(0, queries=4)
for step in ("first", "fitted"):
    one, other = (model(run)["score"] for model in models)
    np.testing.assert_array_equal(one, other)
    if step == "first":
        losses = [model.fit(run, judged, run, judged).history["loss"].tolist() for model in models]
        assert losses[0] == losses[1]
"""


def test_bars_that_the_environment_forbids_are_not_shown_and_change_nothing():
    """In a process of its own, as tqdm reads its variables when it is imported."""
    root, known = Path(__file__).parents[2], {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**known, "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_BARS], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "%|" not in told.stderr
