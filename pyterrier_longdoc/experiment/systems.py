"""The systems of an experiment and their runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.frames import as_strings
from ..common.runs import read_run

_READY = pt.Transformer | pd.DataFrame | str | Path
"""A pipeline, or a run as a frame or the path of a file."""


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold of a cross-validation, passed to a factory `(seed, fold)`.

    Attributes:
        index: the index of the fold, from 0.
        test_topics: the topics of this fold, for testing; the system must not see their judgements.
        train_topics: all other topics.
        validation_topics: the topics of the next fold; they are also in `train_topics`.
        train_qrels: the judgements for `train_topics`.
    """

    index: int
    test_topics: pd.DataFrame
    train_topics: pd.DataFrame
    validation_topics: pd.DataFrame
    train_qrels: pd.DataFrame

    def fit(self, pipeline: Any, *, validation: bool = False) -> Any:
        """Fit a pipeline on the other folds and return it.

        Args:
            pipeline: a pipeline with PyTerrier's `fit`: retriever, text loader and reranker. Its trainable stages must
                be new or copies: a stage that was fitted for another fold or seed would continue training.
            validation: use the next fold as validation data instead of training data.
        """
        topics, qrels = self.train_topics, self.train_qrels
        if not validation:
            pipeline.fit(topics, qrels)
            return pipeline
        topic_mask, qrel_mask = (frame["qid"].isin(set(self.validation_topics["qid"])) for frame in (topics, qrels))
        pipeline.fit(topics[~topic_mask], qrels[~qrel_mask], self.validation_topics, qrels[qrel_mask])
        return pipeline


@dataclass(frozen=True, eq=False)
class RunPart:
    """A run of a system with one seed, or the part of it for one fold."""

    system: str
    seed: int | None  # None for a system without seeds
    fold: Fold | None  # None for all topics
    source: Any  # a pipeline, a run (frame or path), or a function that returns one of these

    def make(self) -> pt.Transformer | pd.DataFrame:
        """Return the pipeline or the rows of the run, calling the source if it is a function."""
        made = self.source if isinstance(self.source, _READY) else self.source()
        if isinstance(made, pt.Transformer):
            return made
        run = read_run(made) if isinstance(made, str | Path) else made
        if not isinstance(run, pd.DataFrame):
            raise ValueError(f"the factory of {self} returned a {type(run).__name__}, not a pipeline or a run")
        if self.fold is not None and "qid" in run.columns:
            run = run[as_strings(run["qid"]).isin(set(self.fold.test_topics["qid"])).to_numpy()]
        return run

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return self.system + seed + ("" if self.fold is None else f", fold {self.fold.index}")


def named_systems(systems: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the systems by name: the keys of a dict; for a list, `names` or their `str`, as in `pt.Experiment`."""
    by_name: dict[str, Any] = {}
    if isinstance(systems, Mapping) and names is None:
        by_name = {str(name): system for name, system in systems.items()}
    elif isinstance(systems, list | tuple):
        by_name = dict(zip(map(str, systems if names is None else names), systems, strict=True))
    if not by_name or len(by_name) < len(systems):
        raise ValueError(
            f"systems must be a non-empty dict by name, or a non-empty list with distinct names=, not "
            f"{type(systems).__name__} with names={names}"
        )
    return by_name


def make_folds(folds: Sequence[Sequence[str]], topics: pd.DataFrame, qrels: pd.DataFrame) -> list[Fold]:
    """Return the folds for lists of qids, with their topics and judgements."""
    parts = [{str(qid) for qid in fold} for fold in folds]
    misplaced = [qid for qid in topics["qid"] if sum(qid in part for part in parts) != 1]
    if misplaced or len(parts) < 2:
        raise ValueError(
            f"folds must be at least 2 lists of qids, with every topic in exactly one of them: there are {len(parts)} "
            f"lists, and {len(misplaced)} topics are in none or several ({', '.join(map(repr, misplaced[:5]))})"
        )
    tests = [topics[topics["qid"].isin(part)] for part in parts]
    result = []
    for index, test in enumerate(tests):
        train = topics[~topics["qid"].isin(set(test["qid"]))]
        train_qrels = qrels[qrels["qid"].isin(set(train["qid"]))]
        result.append(Fold(index, test, train, tests[(index + 1) % len(tests)], train_qrels))
    return result


def runs_of_system(name: str, system: Any, seeds: Sequence[int] | None, folds: Sequence[Fold]) -> list[list[RunPart]]:
    """Return the runs of one system, each as a list of parts: one, or one per fold."""
    if isinstance(system, _READY):
        return [[RunPart(name, None, None, system)]]
    if isinstance(system, list | tuple) and all(isinstance(member, _READY) for member in system):
        labels = list(range(len(system))) if seeds is None else list(seeds)
        if not system or len(labels) != len(system):
            raise ValueError(f"{name!r} has {len(system)} runs, but seeds= has {len(labels)}: give one run per seed")
        return [[RunPart(name, seed, None, member)] for seed, member in zip(labels, system, strict=True)]
    if not callable(system):
        kinds = "a pipeline, a run, a function of seed and fold, or a list of pipelines or runs"
        raise ValueError(f"{name!r} must be {kinds}, not {str(system)[:80]}")
    keywords = system.keywords if isinstance(system, partial) else {}
    parameters = {name: p for name, p in inspect.signature(system).parameters.items() if name not in keywords}
    for argument, values in (("seed", seeds), ("fold", folds)):
        if argument in parameters and parameters[argument].default is inspect.Parameter.empty and not values:
            raise ValueError(f"the factory of {name!r} has the parameter {argument}: set {argument}s=")
    given = [argument for argument, values in (("seed", seeds), ("fold", folds)) if values]
    if given and parameters and not parameters.keys() & set(given):
        takes = f"the factory of {name!r} has the parameters {', '.join(parameters)}, but no {' or '.join(given)}"
        raise ValueError(f"{takes}: rename a parameter, or bind the others with functools.partial")
    run_seeds: Sequence[int | None] = seeds if seeds and "seed" in parameters else [None]
    run_folds: Sequence[Fold | None] = folds if folds and "fold" in parameters else [None]

    runs = []
    for seed in run_seeds:
        seeded = system if seed is None else partial(system, seed=seed)
        sources = [(fold, seeded if fold is None else partial(seeded, fold=fold)) for fold in run_folds]
        runs.append([RunPart(name, seed, fold, source) for fold, source in sources])
    return runs
