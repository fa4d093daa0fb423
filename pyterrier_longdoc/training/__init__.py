"""Training: what to train on, the losses, the loop. Sees only `scorer(queries, texts) -> scores`."""

from .args import Lora, TrainingArgs
from .best import BestResult, Segments, first_segments, fit_best, gold_segments, segment_precision
from .distill import TeacherScores
from .groups import Group, check_qrels, make_groups, pseudo_qrels
from .history import history_frame, plot_history
from .loop import train
from .losses import LOSSES
from .presets import PRESETS, recipes
from .rounds import fit_in_turn
from .validation import evaluate

__all__ = [
    "LOSSES",
    "PRESETS",
    "BestResult",
    "Group",
    "Lora",
    "Segments",
    "TeacherScores",
    "TrainingArgs",
    "check_qrels",
    "evaluate",
    "first_segments",
    "fit_best",
    "fit_in_turn",
    "gold_segments",
    "history_frame",
    "make_groups",
    "plot_history",
    "pseudo_qrels",
    "recipes",
    "segment_precision",
    "train",
]
