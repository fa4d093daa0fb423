"""Signals after Java has started: without Java, and in a process of their own with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyterrier_longdoc.common.progress import work_bar
from pyterrier_longdoc.training import TrainingArgs, train

from ..support import interrupted, terrier, tiny
from ..support.systems import make
from ..support.toy import Toy, toy_set

ENDS = [getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)]


@pytest.fixture
def installed(monkeypatch) -> list:
    """The signals whose handlers are installed, after Java has started."""
    numbers: list = []
    monkeypatch.setattr("pyterrier.java.started", lambda: True)
    monkeypatch.setattr("signal.signal", lambda number, handler: numbers.append(number))
    return numbers


def bar() -> None:
    with work_bar("work", "part", shown=False):
        pass


def training() -> None:
    train(Toy(), toy_set(1), TrainingArgs(epochs=1))


def transform() -> None:
    make("MaxP")(tiny.results())


@pytest.mark.parametrize("loop", [bar, training, transform])
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.TruncationWarning")
def test_long_loops_restore_the_handlers_of_python(loop, installed):
    loop()
    assert installed[: len(ENDS)] == ENDS


def test_without_java_nothing_is_installed(installed, monkeypatch):
    monkeypatch.setattr("pyterrier.java.started", lambda: False)
    bar()
    assert installed == []


def test_other_threads_install_nothing(installed):
    thread = threading.Thread(target=bar)
    thread.start()
    thread.join()
    assert installed == []


def test_a_handler_of_other_code_is_kept(installed, monkeypatch):
    monkeypatch.setattr("signal.getsignal", dict.fromkeys(ENDS).get)
    bar()
    assert installed == []


# In a process.

JOBS = ("fit:SIGINT", "transform:SIGINT", "rerank_to_disk:SIGINT", "fit:SIGTERM:own", "transform:SIGTERM")


@pytest.fixture(scope="module")
def ends(terrier_home, tmp_path_factory) -> tuple[dict[str, list], subprocess.CompletedProcess[str]]:
    """How each loop of `JOBS` has ended, by its name, and the process, which the last of them ends."""
    if os.name != "posix":
        pytest.skip("sends signals")
    command = [sys.executable, interrupted.__file__, str(tmp_path_factory.mktemp("interrupted")), *JOBS]
    root, environment = Path(interrupted.__file__).parents[2], terrier.environment(terrier_home)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    lines = map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("[")))
    return {name: how for name, *how in lines}, done


@pytest.mark.slow
def test_ctrl_c_in_fit_keeps_the_weights(ends):
    raised, message, are_finite, are_trained = ends[0]["fit:SIGINT"]
    assert raised == "KeyboardInterrupt"
    assert "interrupted after step 2 of 12: its weights are kept" in message
    assert are_finite
    assert are_trained


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["transform", "rerank_to_disk"])
def test_ctrl_c_raises_keyboard_interrupt(ends, loop):
    assert ends[0][f"{loop}:SIGINT"][0] == "KeyboardInterrupt"


@pytest.mark.slow
def test_a_handler_of_the_user_is_called(ends):
    assert ends[0]["fit:SIGTERM:own"][0] == "StoppedError"


@pytest.mark.slow
def test_sigterm_ends_the_process_as_without_java(ends):
    assert ends[1].returncode == -signal.SIGTERM, ends[1].stderr
