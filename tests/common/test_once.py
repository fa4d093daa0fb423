from __future__ import annotations

import os
import time

import pytest

from pyterrier_longdoc.common import once
from pyterrier_longdoc.common.once import made_once

from ..support import processes


def make_slowly(folder):
    with (folder.parent / "made").open("a") as file:
        file.write("x")
    (folder / "a").write_text("1")
    time.sleep(0.4)
    (folder / "b").write_text("2")


def test_one_of_several_processes_makes_it_and_all_see_it_complete(tmp_path):
    def run() -> None:
        made_once(tmp_path / "folder", make_slowly)
        assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["a", "b"]

    children = [processes.start(run) for _ in range(4)]
    assert [processes.wait(child) for child in children] == [0] * 4
    assert (tmp_path / "made").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "made"]


def test_who_waits_says_for_whom(tmp_path):
    child = processes.start(lambda: made_once(tmp_path / "folder", make_slowly))
    while not (tmp_path / "made").exists():
        time.sleep(0.01)
    told = []
    made_once(tmp_path / "folder", make_slowly, told.append)
    assert processes.wait(child) == 0
    assert [owner.split()[1] for owner in told] == [str(child)]


def test_after_a_kill_another_process_of_the_machine_takes_over_at_once(tmp_path):
    def forever(folder):
        (folder / "half").touch()
        time.sleep(100)

    child = processes.start(lambda: made_once(tmp_path / "folder", forever))
    while not list(tmp_path.glob(".folder.*.part/half")):
        time.sleep(0.01)
    processes.kill(child)
    processes.wait(child)
    made_once(tmp_path / "folder", make_slowly)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "made"], "nothing is left of the first one"


@pytest.mark.parametrize("beats", [False, True])
def test_on_another_machine_it_takes_over_when_there_is_no_sign_of_life(tmp_path, monkeypatch, beats):
    monkeypatch.setattr(once, "_LOST", 0.5)
    monkeypatch.setattr(once, "_POLL", 0.01)
    lock = tmp_path / ".folder.lock"
    lock.write_text("another-machine 1")

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        usual(seconds)
        if beats and len(waited) < 100:
            os.utime(lock, (len(waited), len(waited)))

    usual, waited = time.sleep, []
    monkeypatch.setattr(once.time, "sleep", sleep)
    made_once(tmp_path / "folder", lambda folder: None)
    assert (tmp_path / "folder").is_dir()
    assert (len(waited) >= 100) is beats


def test_who_was_taken_for_dead_uses_what_another_made(tmp_path):
    def overtaken(folder):
        (folder.parent / "folder").mkdir()
        (folder.parent / "folder" / "by another").touch()

    made_once(tmp_path / "folder", overtaken)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["by another"]


def test_an_error_leaves_nothing_and_the_next_call_makes_it(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        made_once(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []
    made_once(tmp_path / "folder", lambda folder: None)
    assert (tmp_path / "folder").is_dir()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_signs_of_life_end_quietly_when_the_lock_is_gone(tmp_path, monkeypatch):
    def overtaken(path):
        asked.append(path)
        raise FileNotFoundError(path)

    asked = []
    monkeypatch.setattr(once, "_BEAT", 0.001)
    monkeypatch.setattr(once.os, "utime", overtaken)
    made_once(tmp_path / "folder", lambda folder: time.sleep(0.1))
    assert len(asked) > 1
