"""Experiments as the papers report them: seeds, folds, several baselines, gains over each model's own FirstP."""

from .experiment import Experiment, ExperimentWarning
from .plots import plot_document_length, plot_efficiency
from .results import ExperimentResults, PaperTable, by_document_length, by_query_value, paper_table
from .runs import read_run, write_run
from .shown import Shown, show
from .significance import Statistics
from .sources import citations
from .sweeps import Sweep, sweep_depth, sweep_passages, sweep_truncation, sweep_windows
from .systems import Fold
from .why import Why

__all__ = [
    "Experiment", "ExperimentResults", "ExperimentWarning", "Fold", "PaperTable", "Shown", "Statistics", "Sweep", "Why",
    "by_document_length", "by_query_value", "citations", "paper_table", "plot_document_length", "plot_efficiency",
    "read_run", "show", "sweep_depth", "sweep_passages", "sweep_truncation", "sweep_windows", "write_run",
]  # fmt: skip
