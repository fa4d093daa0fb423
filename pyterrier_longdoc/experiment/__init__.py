"""Experiments as reported in the papers: seeds, folds, several baselines, gains over each model's own FirstP."""

from ..common.runs import read_run, write_run
from .efficiency import plot_efficiency
from .experiment import Experiment, ExperimentWarning
from .results import ExperimentResults
from .significance import Statistics
from .systems import Fold
from .tables import PaperTable, paper_table

__all__ = [
    "Experiment", "ExperimentResults", "ExperimentWarning", "Fold", "PaperTable", "Statistics", "paper_table",
    "plot_efficiency", "read_run", "write_run",
]  # fmt: skip
