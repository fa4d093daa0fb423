"""The script that measures on a GPU, on a CPU and in small."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_the_script_for_a_gpu_writes_speed_and_correlation_of_each_model(tmp_path):
    script, told = Path(__file__).with_name("gpu.py"), tmp_path / "gpu.json"
    command = [sys.executable, str(script), "--device", "cpu", "--tiny", "--skip-tests", "--out", str(told)]
    pytest.importorskip("sentence_transformers")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(told.read_text(encoding="utf-8"))
    assert found["machine"]["torch"] == torch.__version__
    scored = {row["model"]: row for row in found["speed"] if row["kind"] == "scoring"}
    assert list(scored) == ["MiniLM-L6", "ettin-17m", "ettin-150m", "ModernBERT-base"]
    # Both score the same inputs: only rounding in half precision, of weights that differ, is between them.
    assert all(row["correlation"] > 0.8 and row["ours/s"] > 0 < row["theirs/s"] for row in scored.values())
    if importlib.util.find_spec("datasets") is None:
        assert [line.partition(":")[0] for line in found["left out"]] == [
            f"training of {name} at 512 tokens" for name in ("MiniLM-L6", "ettin-150m")
        ]
    assert "goal" in done.stdout
