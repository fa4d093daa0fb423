"""Training in two processes computes what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..support import tiny

pytest.importorskip("accelerate")
PROGRAM = str(Path(__file__).parents[1] / "support" / "fit_in_processes.py")


def launch(count: int, *arguments: str, dies: bool = False) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--standalone"] if count > 1 else []
    command = [sys.executable, *launcher, PROGRAM]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == dies, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes(tmp_path):
    backbone = tiny.checkpoint(tmp_path / "calm", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        launch(count, backbone, str(tmp_path / str(count)))
    one = load_file(tmp_path / "1" / "gradients-0.safetensors")
    first, second = (load_file(tmp_path / "2" / f"gradients-{rank}.safetensors") for rank in (0, 1))
    assert len(one) == 6
    assert first.keys() == second.keys() == one.keys()
    for step, gradient in one.items():
        assert torch.equal(first[step], second[step])
        torch.testing.assert_close(first[step], gradient, rtol=1e-2, atol=1e-3)
    weights = [(tmp_path / "2" / f"model-{rank}" / "model.safetensors").read_bytes() for rank in (0, 1)]
    assert weights[0] == weights[1]
    histories = [
        json.loads((tmp_path / folder / "training.json").read_text())["history"]
        for folder in ("1/model-0", "2/model-0", "2/model-1")
    ]
    for name in ("epoch", "step", "loss", "validation"):
        alone, *together = ([entry[name] for entry in history] for history in histories)
        assert together[0] == together[1]
        assert together[0] == pytest.approx(alone, rel=1e-4)
    # Killed in the second epoch, two processes go on after the first one's state and end with the same weights.
    killed = tmp_path / "killed"
    killed.mkdir()
    launch(2, backbone, str(killed), "5", dies=True)
    assert not (killed / "model-0").exists()
    launch(2, backbone, str(killed))
    assert len(load_file(killed / "gradients-0.safetensors")) == 3
    assert [(killed / f"model-{rank}" / "model.safetensors").read_bytes() for rank in (0, 1)] == weights
