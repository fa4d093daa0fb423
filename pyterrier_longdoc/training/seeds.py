"""The same training with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

from ..experiment.experiment import Experiment
from ..experiment.results import ExperimentResults
from .kept import TrainingData, check_new, fit_kept, off_device, recipe_of


class SeedModels(Mapping[int, Any]):
    """Models by seed, each of them a transformer.

    Args:
        models: by seed.
    """

    def __init__(self, models: Mapping[int, Any]) -> None:
        self._models = dict(models)

    def __getitem__(self, seed: int) -> Any:
        return self._models[seed]

    def __iter__(self) -> Iterator[int]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __repr__(self) -> str:
        return f"SeedModels({self._models!r})"

    def behind(self, first_stage: pt.Transformer) -> list[pt.Transformer]:
        """A pipeline for each seed: a system of `ld.Experiment`, which averages each query over them before it tests.

        Args:
            first_stage: retriever and text loader.
        """
        return [first_stage >> model for model in self.values()]

    def evaluate(
        self, run: pd.DataFrame, qrels: pd.DataFrame, metrics: Sequence[Any], *, name: str = "model"
    ) -> ExperimentResults:
        """Evaluates all models on the same candidates.

        Args:
            run: candidates, as the models take them.
            qrels: `qid, docno, label`.
            metrics: as for `ld.Experiment`.
            name: what the results call the models.

        Returns:
            The results: `.perquery` are means over seeds for each query, which is what significance tests compare
            (Boytsov et al. 2025, section 3.2); `.perseed`, `.means` and `.stds` over seeds.
        """
        topics = run[["qid", "query"]].drop_duplicates("qid")
        runs = [model.transform(run) for model in self.values()]
        return Experiment({name: runs}, topics, qrels, metrics, seeds=list(self))


def fit_seeds(
    model: Any | Callable[[int], Any],
    seeds: Sequence[int],
    topics_or_res_tr: pd.DataFrame,
    qrels_tr: pd.DataFrame,
    topics_or_res_va: pd.DataFrame | None = None,
    qrels_va: pd.DataFrame | None = None,
    *,
    folder: str | Path | None = None,
    verbose: bool = False,
) -> SeedModels:
    """Trains one model for each seed.

    The seed decides on the weights that start at random, on the order and choice of what is trained on, and on dropout.

    Args:
        model: a function that makes a new model for a seed, `lambda seed: ld.MaxP(seed=seed)`; or a model that is
            copied, with that seed if it starts from its backbone. The seed of its recipe is set here.
        seeds: whole numbers; 0, 1, 2 in Boytsov et al. 2025.
        topics_or_res_tr: training candidates, as for `fit`.
        qrels_tr: their labels.
        topics_or_res_va: validation candidates.
        qrels_va: their labels.
        folder: for the models. A second call goes on where the first one was interrupted.
        verbose: show a progress bar over the seeds.

    Returns:
        The models by seed.

    Raises:
        ValueError: if seeds are missing, come twice or are no whole numbers, two models are the same, or the folder
            holds other models.
        TypeError: if the model cannot be fitted or copied.
    """
    check_seeds(seeds)
    data = TrainingData(topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va)
    models: dict[int, Any] = {}
    for seed in pt.tqdm(list(seeds), desc="fit_seeds", unit="seed", disable=not verbose):
        new = _with_seed(model, seed)
        check_new(new, models.values())
        models[int(seed)] = off_device(fit_kept(new, data, None if folder is None else Path(folder) / f"seed-{seed}"))
    return SeedModels(models)


def check_seeds(seeds: Any) -> None:
    """Raises ValueError if these are no distinct whole numbers."""
    numbers = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if not numbers or not all(isinstance(seed, Integral) and not isinstance(seed, bool) for seed in numbers):
        raise ValueError(f"seeds={seeds!r} must be a list of whole numbers, e.g. [0, 1, 2]")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds={seeds!r} has a seed twice")


def _with_seed(model: Any, seed: int) -> Any:
    if not isinstance(model, pt.Transformer):
        new = model(seed)
    elif not hasattr(model, "apply_attributes"):
        raise TypeError(f"{model!r} cannot be copied: give a function that makes a new model for a seed")
    else:
        # A seed of its own would ask for other weights than the trained ones.
        weights = getattr(model, "_loaded", None)
        starts_afresh = weights is None or not weights.trained
        new = model.apply_attributes(**({"seed": int(seed)} if starts_afresh else {}))
    if hasattr(new, "training"):
        new.training = replace(recipe_of(new), seed=int(seed))
    return new
