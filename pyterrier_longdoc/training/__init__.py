"""Training: what to train on, the losses, the loop, and the same again by folds, seeds and segments.

The loop sees only `scorer(queries, texts) -> scores`.
"""

from .best import BestResult, Segments, first_segments, fit_on_best_segments, gold_segments, segment_precision
from .examples import Example, Group, TeacherScores, Texts, add_judged, make_groups, pseudo_qrels
from .loop import evaluate, history_frame, plot_history, train
from .losses import LOSSES, Loss
from .queries import LeftOutWarning, TrainedOn
from .recipe import PRESETS, Lora, TrainingArgs, recipes
from .repeat import FoldModels, SeedModels, fit_in_turn, fit_seeds, k_fold_fit
from .resume import ContinuedTrainingWarning, ScheduleWarning, training_settings

__all__ = [
    "LOSSES", "PRESETS", "BestResult", "ContinuedTrainingWarning", "Example", "FoldModels", "Group", "LeftOutWarning",
    "Lora", "Loss", "ScheduleWarning", "SeedModels", "Segments", "TeacherScores", "Texts", "TrainedOn", "TrainingArgs",
    "add_judged", "evaluate", "first_segments", "fit_in_turn", "fit_on_best_segments", "fit_seeds", "gold_segments",
    "history_frame", "k_fold_fit", "make_groups", "plot_history", "pseudo_qrels", "recipes", "segment_precision",
    "train", "training_settings",
]  # fmt: skip
