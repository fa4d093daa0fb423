"""Experiments as the papers report them: seeds, folds, several baselines, gains over each model's own FirstP."""

from .breakdowns import by_document_length, by_relevant_position
from .checks import ExperimentWarning
from .comparisons import Statistics
from .experiment import Experiment
from .papertable import PaperTable, paper_table
from .plots import plot_efficiency
from .results import ExperimentResults
from .runs import read_run, write_run
from .sweeps import Sweep, sweep_depth, sweep_passages, sweep_truncation, sweep_windows
from .systems import Fold

__all__ = [
    "Experiment",
    "ExperimentResults",
    "ExperimentWarning",
    "Fold",
    "PaperTable",
    "Statistics",
    "Sweep",
    "by_document_length",
    "by_relevant_position",
    "paper_table",
    "plot_efficiency",
    "read_run",
    "sweep_depth",
    "sweep_passages",
    "sweep_truncation",
    "sweep_windows",
    "write_run",
]
