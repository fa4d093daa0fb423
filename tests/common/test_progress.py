"""Progress bars: plain lines, only where they are asked for and allowed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyterrier_longdoc.common.progress import work_bar

from ..support.lines import shown_lines


def test_a_shown_bar_counts_finished_work(capsys):
    for shown in (False, True):
        with work_bar("epoch 3", "query", 8, shown=shown, done=2) as bar:
            bar.update(4)
            bar.set_postfix(loss="0.5")
            bar.reset(total=7)
            bar.update(7)
    screen = capsys.readouterr().err
    assert screen.count("\n") == 1
    assert "7/7" in screen.split("\r")[-1]


def test_nested_bars_disappear_when_they_are_done(capsys):
    with work_bar("fit", "fold", 2, shown=True) as fitted:
        for _ in range(2):
            with work_bar("MaxP", "doc", 4, shown=True) as done:
                done.update()
                done.update(3)
            fitted.update()
    assert shown_lines(capsys) == ["fit"]
    with work_bar("fit", "fold", 1, shown=False), work_bar("MaxP", "doc", 1, shown=True) as done:
        done.update()
    assert shown_lines(capsys) == ["MaxP"]


def test_after_an_error_the_next_bar_is_not_nested(capsys):
    with pytest.raises(KeyError), work_bar("first", "fold", 1, shown=True):
        raise KeyError
    assert shown_lines(capsys) == []
    with work_bar("second", "fold", 1, shown=True) as done:
        done.update()
    assert shown_lines(capsys) == ["second"]


WITHOUT_BARS = """
from pyterrier_longdoc.common.progress import work_bar

with work_bar("outer", "fold", 1, shown=True) as outer, work_bar("inner", "doc", 1, shown=True) as inner:
    inner.update()
    inner.reset(total=2)
    outer.set_postfix(loss="0.5")
"""


def test_tqdm_disable_hides_bars():
    """In a process of its own, as tqdm reads its variables when it is imported."""
    environment = {**os.environ, "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", WITHOUT_BARS], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "%|" not in told.stderr
