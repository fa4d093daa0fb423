"""Training: what to train on, the losses, the loop. Sees only `scorer(queries, texts) -> scores`."""

from .args import TrainingArgs
from .groups import Group, check_qrels, make_groups
from .loop import train
from .validation import evaluate

__all__ = ["Group", "TrainingArgs", "check_qrels", "evaluate", "make_groups", "train"]
