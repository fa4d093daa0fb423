"""Training: data, losses, the training loop, and training by folds and segments.

The loop only uses `model(queries, texts) -> scores`.
"""

from .best_segments import BestResult, Segments, fit_on_best_segments, segment_precision
from .examples import Example, QueryGroup, TeacherScores, TrainingSet, add_judged, make_groups, prepare
from .folds import FoldModels, k_fold_fit
from .history import evaluate, history_frame, plot_history
from .loop import train
from .losses import LOSSES, Loss
from .queries import LeftOutWarning, TrainedOn
from .recipe import PRESETS, Lora, TrainingArgs, recipes
from .resume import ContinuedTrainingWarning, training_settings

__all__ = [
    "LOSSES", "PRESETS", "BestResult", "ContinuedTrainingWarning", "Example", "FoldModels", "LeftOutWarning", "Lora",
    "Loss", "QueryGroup", "Segments", "TeacherScores", "TrainedOn", "TrainingArgs", "TrainingSet",
    "add_judged", "evaluate", "fit_on_best_segments", "history_frame", "k_fold_fit",
    "make_groups", "plot_history", "prepare", "recipes", "segment_precision", "train",
    "training_settings",
]  # fmt: skip
