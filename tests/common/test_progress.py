"""Progress bars: plain lines, only where they are asked for and allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_tqdm_disable_hides_bars_without_other_effects():
    """In a process of its own, as tqdm reads its variables when it is imported."""
    root, known = Path(__file__).parents[2], {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**known, "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_BARS], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "%|" not in told.stderr
