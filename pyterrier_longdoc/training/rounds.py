"""Training on several candidate runs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from .args import TrainingArgs


def fit_in_turn(
    model: Any,
    runs: Sequence[pd.DataFrame],
    qrels_tr: pd.DataFrame,
    topics_or_res_va: pd.DataFrame | None = None,
    qrels_va: pd.DataFrame | None = None,
    *,
    training: Sequence[TrainingArgs],
) -> Any:
    """Fits a model on several candidate runs in turn, e.g. of ever better first stages with ever harder negatives.

    Args:
        model: a reranker; its `training` is the same afterwards.
        runs: training candidates of each round, as `fit` takes them.
        qrels_tr: labels of all of them.
        topics_or_res_va: validation candidates, the same in each round.
        qrels_va: their labels.
        training: each round's recipe, e.g. `recipes("leaderboard")`. A checkpoint folder gets a folder for each
            round, and rounds that are finished there are not trained again.

    Returns:
        The model.

    Raises:
        ValueError: if there are not as many runs as recipes.
    """
    if len(runs) != len(training) or not runs:
        raise ValueError(f"{len(runs)} candidate runs and {len(training)} recipes: give one recipe for each run")
    before = model.training
    try:
        for number, (run, args) in enumerate(zip(runs, training, strict=True), start=1):
            folder = None if args.checkpoint is None else Path(args.checkpoint) / f"round-{number}"
            model.training = replace(args, checkpoint=folder)
            model.fit(run, qrels_tr, topics_or_res_va, qrels_va)
    finally:
        model.training = before
    return model
