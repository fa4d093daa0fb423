"""The script that prints published figures beside computed ones, on its stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_script_shows_published_and_computed_figures(tmp_path):
    pytest.importorskip("pyterrier_pisa")
    script = Path(__file__).with_name("published_row.py")
    command = [sys.executable, str(script), "firstp-e5-4k", "maxp", "--stand-in"]
    first = subprocess.run([*command, "--dev-queries", "3"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr[-3000:]
    assert "dev RR, 3 queries" in first.stdout
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("firstp-e5-4k ", "maxp "))]
    assert [(name, published) for name, _, published in rows] == [
        ("firstp-e5-4k", "0.380"),
        ("maxp", "0.392"),
        ("firstp-e5-4k", "0.641"),
        ("maxp", "0.644"),
    ]
    assert all(0.0 <= float(found) <= 1.0 for _, found, _ in rows)
    assert (tmp_path / "published-row" / "stand-in" / "maxp-all").is_dir()
