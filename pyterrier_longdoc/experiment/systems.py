"""What may be a system of an experiment, and the runs that it comes to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pandas as pd
import pyterrier as pt

from ..common.runs import stages_of


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold of a cross-validation, as a factory `(seed, fold)` receives it.

    Attributes:
        index: of the fold, from 0.
        test_topics: this fold's topics; the system is tested on them and must not see their judgements.
        train_topics: all others.
        validation_topics: those of the next fold, which are part of `train_topics`.
        train_qrels: judgements of `train_topics`.
    """

    index: int
    test_topics: pd.DataFrame
    train_topics: pd.DataFrame
    validation_topics: pd.DataFrame
    train_qrels: pd.DataFrame

    def fit(self, pipeline: Any, *, validation: bool = False) -> Any:
        """Fit a pipeline on the other folds and return it.

        Args:
            pipeline: anything with PyTerrier's `fit`: retriever, text loader and reranker. Its trainable stages are
                new, or copies: one that was fitted for another fold or seed would go on from there.
            validation: keep the next fold out of training and hand it over as validation data.
        """
        topics, qrels = self.train_topics, self.train_qrels
        if not validation:
            pipeline.fit(topics, qrels)
            return pipeline
        held_out, of_held_out = (frame["qid"].isin(set(self.validation_topics["qid"])) for frame in (topics, qrels))
        pipeline.fit(topics[~held_out], qrels[~of_held_out], self.validation_topics, qrels[of_held_out])
        return pipeline


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run to make or to read: that of a system, with a seed, for a fold's topics."""

    system: str
    seed: int | None  # None for a system without seeds
    fold: Fold | None  # None for all topics
    source: Any  # a pipeline, a run (frame or path), or a function that makes one of these and may train a model

    def make(self) -> Any:
        """Return the pipeline or run: what the source is, or what it makes."""
        is_made = isinstance(self.source, pt.Transformer | pd.DataFrame | str | Path)
        return self.source if is_made else self.source()

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return self.system + seed + ("" if self.fold is None else f", fold {self.fold.index}")


class FittedModels:
    """Finds models that functions fit for several folds or seeds: they come again, with other weights."""

    def __init__(self) -> None:
        # By system and id: the model, its weights, and for which run it was returned.
        self._seen: dict[tuple[str, int], tuple[ReferenceType[Any], Any, PlannedRun]] = {}

    def check(self, made: Any, planned: PlannedRun) -> None:
        """Raise ValueError if the function of a system has returned a model again that was trained in between.

        Models tell their weights by `describe()["weights"]`; of others nothing is known.
        """
        if (planned.seed is None and planned.fold is None) or not isinstance(made, pt.Transformer):
            return
        for stage in (stage for stage in stages_of(made) if hasattr(stage, "fit")):
            weights = _weights_of(stage)
            known, before, other = self._seen.get((planned.system, id(stage)), (None, weights, planned))
            if known is not None and known() is stage and before != weights:
                raise ValueError(
                    f"the function of {planned} returned the same {stage!r} as that of {other}, with other weights: it "
                    f"was trained for both, also on topics that it is tested on; make the model inside the function, "
                    f"e.g. lambda seed, fold: fold.fit(bm25 >> ld.MaxP(seed=seed))"
                )
            self._seen[planned.system, id(stage)] = ref(stage), weights, planned


def _weights_of(stage: Any) -> Any:
    try:
        told = stage.describe() if hasattr(stage, "describe") else None
    except ValueError:  # it says that it cannot
        return None
    return told.get("weights") if isinstance(told, Mapping) else None


def named_systems(systems: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the systems by name: of a dict its keys, of a list `names`, or their `str`, as in `pt.Experiment`."""
    named: dict[str, Any] = {}
    if isinstance(systems, Mapping) and names is None:
        named = {str(name): system for name, system in systems.items()}
    elif isinstance(systems, list | tuple):
        named = dict(zip(map(str, systems if names is None else names), systems, strict=True))
    if not named or len(named) < len(systems):
        raise ValueError(
            f"systems must be a dict of at least one system by name, or a list with as many different names=, not "
            f"{type(systems).__name__} with names={names}"
        )
    return named


def make_folds(folds: Sequence[Sequence[str]], topics: pd.DataFrame, qrels: pd.DataFrame) -> list[Fold]:
    """Return the folds, lists of qids, with their topics and judgements."""
    parts = [{str(qid) for qid in fold} for fold in folds]
    wrong = [qid for qid in topics["qid"] if sum(qid in part for part in parts) != 1]
    if wrong or len(parts) < 2:
        raise ValueError(
            f"folds must be at least two lists of qids with every topic in exactly one of them, but there are "
            f"{len(parts)}, and {len(wrong)} topics are in none or several, e.g. {', '.join(map(repr, wrong[:5]))}"
        )
    tests = [topics[topics["qid"].isin(part)] for part in parts]
    prepared = []
    for index, test in enumerate(tests):
        train = topics[~topics["qid"].isin(set(test["qid"]))]
        train_qrels = qrels[qrels["qid"].isin(set(train["qid"]))]
        prepared.append(Fold(index, test, train, tests[(index + 1) % len(tests)], train_qrels))
    return prepared


def planned_runs(name: str, system: Any, seeds: Sequence[int] | None, folds: Sequence[Fold]) -> list[list[PlannedRun]]:
    """Return the runs of one system, each as the parts that it is put together of: one, or one for each fold."""
    single = pt.Transformer | pd.DataFrame | str | Path
    if isinstance(system, single):
        return [[PlannedRun(name, None, None, system)]]
    if isinstance(system, list | tuple) and all(isinstance(member, single) for member in system):
        labels = list(range(len(system))) if seeds is None else list(seeds)
        if not system or len(labels) != len(system):
            raise ValueError(f"{name!r} has {len(system)} runs, but there are {len(labels)} seeds: one run for each")
        return [[PlannedRun(name, seed, None, member)] for seed, member in zip(labels, system, strict=True)]
    set_before = system.keywords if isinstance(system, partial) else {}
    parameters = {name: p for name, p in inspect.signature(system).parameters.items() if name not in set_before}
    for what, values in (("seed", seeds), ("fold", folds)):
        if what in parameters and parameters[what].default is inspect.Parameter.empty and not values:
            raise ValueError(f"the factory of {name!r} takes a {what}: give {what}s=, e.g. seeds=[0, 1, 2]")
    of_seeds: Sequence[int | None] = seeds if seeds and "seed" in parameters else [None]
    of_folds: Sequence[Fold | None] = folds if folds and "fold" in parameters else [None]

    def planned(seed: int | None, fold: Fold | None) -> PlannedRun:
        given = {what: value for what, value in (("seed", seed), ("fold", fold)) if value is not None}
        return PlannedRun(name, seed, fold, partial(system, **given))

    return [[planned(seed, fold) for fold in of_folds] for seed in of_seeds]
