"""What may be a system of an experiment, and the jobs (one run each) that it comes to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import pandas as pd
import pyterrier as pt

from .identity import stages_of


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
        """Fits a pipeline on the other folds and returns it.

        Args:
            pipeline: anything with PyTerrier's `fit`: retriever, text loader and reranker. Its trainable stages are
                new, or copies: one that was fitted for another fold or seed would go on from there.
            validation: keep the next fold out of training and hand it over as validation data.

        Raises:
            TypeError: if it has no `fit`.
            ValueError: if a stage of it was fitted for another fold or seed before.
        """
        if not hasattr(pipeline, "fit"):
            raise TypeError(f"{pipeline!r} has no fit: give fold.fit a pipeline with an Estimator such as ld.MaxP")
        for stage in trainable_stages(pipeline):
            _claim(stage, _call.get() or self)
        topics, qrels = self.train_topics, self.train_qrels
        if not validation:
            pipeline.fit(topics, qrels)
            return pipeline
        held_out, of_held_out = (frame["qid"].isin(set(self.validation_topics["qid"])) for frame in (topics, qrels))
        pipeline.fit(topics[~held_out], qrels[~of_held_out], self.validation_topics, qrels[of_held_out])
        return pipeline


@dataclass(frozen=True, eq=False)
class Job:
    """One run to make or to read."""

    system: str
    seed: int | None  # None for a system without seeds
    fold: Fold | None  # that it is restricted to
    source: Any  # a pipeline, a run (frame or path), or a function that makes one of these and may train a model

    @property
    def given(self) -> bool:
        """Whether the run is there already: nothing is computed."""
        return isinstance(self.source, pd.DataFrame | str | Path)

    def make(self) -> Any:
        """The pipeline or run: what the source is, or what it makes."""
        if self.given or isinstance(self.source, pt.Transformer):
            return self.source
        token = _call.set(self)
        try:
            return self.source()
        finally:
            _call.reset(token)

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return self.system + seed + ("" if self.fold is None else f", fold {self.fold.index}")


# Models that are fitted, each for one fold and seed.

_call: ContextVar[Job | None] = ContextVar("job", default=None)
"""Whose function is being called."""
_claimed: dict[int, tuple[ReferenceType[Any], ReferenceType[Any], str]] = {}
"""What `Fold.fit` has fitted, by id, as transformers hash by what they look like: itself, for whom, and their name."""

ADVICE = "make the model inside the function, e.g. lambda seed, fold: fold.fit(bm25 >> ld.MaxP(seed=seed))"


def trainable_stages(pipeline: Any) -> list[Any]:
    """The stages that `fit` of a pipeline trains."""
    stages = stages_of(pipeline) if isinstance(pipeline, pt.Transformer) else [pipeline]
    return [stage for stage in stages if hasattr(stage, "fit") and not isinstance(stage, pt.Compose)]


def _claim(stage: Any, owner: Job | Fold) -> None:
    """Notes that a stage is fitted for a call of a function, or a fold; raises ValueError if it was for another."""
    known, whose, name = _claimed.get(id(stage), (None, None, ""))
    if known is not None and known() is stage and whose is not None and whose() is not owner:
        raise ValueError(
            f"this {stage!r} was fitted for {name} already and would go on from there, trained on topics that it is "
            f"tested on now: {ADVICE}"
        )
    who = str(owner) if isinstance(owner, Job) else f"fold {owner.index}"
    _claimed[id(stage)] = ref(stage, partial(_forget, id(stage))), ref(owner), who


def _forget(stage_id: int, _: Any) -> None:
    _claimed.pop(stage_id, None)


class FittedModels:
    """Finds models that functions fit themselves for several folds or seeds: they come again, with other weights."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[ReferenceType[Any], str, Job]] = {}

    def check(self, made: Any, job: Job) -> None:
        """Raises ValueError if the function of a system has returned a model again that it has trained in between.

        Models tell their weights by `describe()["weights"]`; of others nothing is known.
        """
        if (job.seed is None and job.fold is None) or not isinstance(made, pt.Transformer):
            return
        for stage in trainable_stages(made):
            weights = weights_of(stage)
            known, before, other = self._seen.get((job.system, id(stage)), (None, weights, job))
            if known is not None and known() is stage and before != weights:
                raise ValueError(
                    f"the function of {job} returned the same {stage!r} as that of {other}, with other weights: it was "
                    f"trained for both, one after the other; {ADVICE}"
                )
            if weights is not None:
                self._seen[job.system, id(stage)] = ref(stage), weights, job


def weights_of(stage: Any) -> str | None:
    """The fingerprint of a model's weights, if it tells one."""
    try:
        told = stage.describe() if hasattr(stage, "describe") else None
    except ValueError:  # it says that it cannot
        return None
    return told.get("weights") if isinstance(told, Mapping) else None


# Systems and folds as they are given.


def named_systems(systems: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The systems by name: of a dict its keys, of a list `names`, or their `str`, as in `pt.Experiment`."""
    if isinstance(systems, Mapping):
        if names is not None:
            raise ValueError("names= is for a list of systems: a dict names them itself")
        named = {str(name): system for name, system in systems.items()}
    elif isinstance(systems, list):
        chosen = [str(name) for name in (systems if names is None else names)]
        if len(chosen) != len(systems):
            raise ValueError(f"there are {len(systems)} systems but {len(chosen)} names")
        twice = sorted({name for name in chosen if chosen.count(name) > 1})
        if twice:
            raise ValueError(f"names of systems must be unique, but {', '.join(twice)} comes twice: set names=")
        named = dict(zip(chosen, systems, strict=True))
    else:
        raise ValueError(f"systems must be a dict or a list, not {type(systems).__name__}")
    if not named:
        raise ValueError("there are no systems to compare")
    return named


def make_folds(folds: Sequence[Sequence[str]], topics: pd.DataFrame, qrels: pd.DataFrame) -> list[Fold]:
    """Checks folds and prepares their topics and judgements.

    Args:
        folds: each fold's qids.
        topics: to be divided; qids are strings.
        qrels: of all topics; qids are strings.

    Raises:
        ValueError: if there are fewer than two folds, or a topic is in none or in several of them.
    """
    parts = [{str(qid) for qid in fold} for fold in folds]
    if len(parts) < 2:
        raise ValueError("cross-validation needs at least two folds")
    times = {qid: sum(qid in part for part in parts) for qid in topics["qid"]}
    for what, wrong in (
        ("no fold", [qid for qid, n in times.items() if n == 0]),
        ("more than one fold", [qid for qid, n in times.items() if n > 1]),
    ):
        if wrong:
            some = ", ".join(map(repr, wrong[:5]))
            raise ValueError(f"every topic must be in one fold, but {len(wrong)} are in {what}, e.g. {some}")
    tests = [topics[topics["qid"].isin(part)] for part in parts]
    prepared = []
    for index, test in enumerate(tests):
        train = topics[~topics["qid"].isin(set(test["qid"]))]
        train_qrels = qrels[qrels["qid"].isin(set(train["qid"]))]
        prepared.append(Fold(index, test, train, tests[(index + 1) % len(tests)], train_qrels))
    return prepared


def plan(name: str, system: Any, seeds: Sequence[int] | None, folds: Sequence[Fold]) -> list[list[Job]]:
    """The runs of one system, each as the jobs that it is put together of: one, or one for each fold."""
    single = pt.Transformer | pd.DataFrame | str | Path
    if isinstance(system, single):
        return [[Job(name, None, None, system)]]
    if isinstance(system, list | tuple):
        labels = list(range(len(system))) if seeds is None else list(seeds)
        if not system or len(labels) != len(system):
            raise ValueError(f"{name!r} has {len(system)} runs, but there are {len(labels)} seeds: one run for each")
        for member in system:
            if not isinstance(member, single):
                kind = type(member).__name__
                raise ValueError(f"{name!r} lists a {kind}; list pipelines, frames or paths of TREC runs")
        return [[Job(name, seed, None, member)] for seed, member in zip(labels, system, strict=True)]
    if callable(system):
        return _from_factory(name, system, seeds, folds)
    raise ValueError(
        f"system {name!r} is a {type(system).__name__}; it must be a pipeline, a factory of pipelines, a run "
        f"(frame or path of a TREC file), or a list of pipelines or runs, one for each seed"
    )


def _from_factory(
    name: str, factory: Callable[..., Any], seeds: Sequence[int] | None, folds: Sequence[Fold]
) -> list[list[Job]]:
    asked = asked_of(factory, ("seed", "fold"), f"the factory of {name!r}")
    if "seed" in asked and asked["seed"].needed and not seeds:
        raise ValueError(f"{name!r} is a factory: say with which seeds to call it, e.g. seeds=[0, 1, 2]")
    if "fold" in asked and asked["fold"].needed and not folds:
        raise ValueError(f"the factory of {name!r} takes a fold: give folds=, a list of qids for each")
    of_seeds: Sequence[int | None] = seeds if seeds and "seed" in asked else [None]
    of_folds: Sequence[Fold | None] = folds if folds and "fold" in asked else [None]

    def job(seed: int | None, fold: Fold | None) -> Job:
        offered = {"seed": seed, "fold": fold}
        given = {asked[what].name: value for what, value in offered.items() if value is not None}
        return Job(name, seed, fold, called_with(factory, given))

    return [[job(seed, fold) for fold in of_folds] for seed in of_seeds]


class Asked(NamedTuple):
    """The parameter of a function that stands for something on offer, and whether it must be given."""

    name: str
    needed: bool


def asked_of(function: Callable[..., Any], offers: Sequence[str], who: str) -> dict[str, Asked]:
    """Which of the things on offer a function asks for.

    Parameters are known by their names, with or without a default (`def make(backbone="...", seed=42)`). What a
    function needs besides is taken for the remaining offers, in their order (`lambda s: ...`). An argument that
    `functools.partial` has set is not asked for.

    Args:
        function: a function, class or any other callable.
        offers: names, in the order in which they may be asked for without them, e.g. `("seed", "fold")`.
        who: the function, for errors.

    Returns:
        By offer its parameter, those that are asked for.

    Raises:
        ValueError: if the function needs more, or takes anything (`**options`), so that it cannot be told, or seems to
            have a seed by another name (`s=0`).
    """
    set_already = function.keywords if isinstance(function, partial) else {}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in set_already]
    listed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = {p.name: Asked(p.name, p.default is p.empty) for p in listed if p.name in offers}
    others = [p for p in listed if p.default is p.empty and p.name not in offers]
    free = [name for name in offers if name not in found]
    forms = " or ".join(f"({', '.join(offers[:n])})" for n in range(len(offers) + 1))
    if len(others) > len(free) or any(p.kind is p.KEYWORD_ONLY for p in others):
        raise ValueError(f"{who} takes {len(others) + len(found)} arguments; it must take {forms}")
    if len(listed) < len(parameters) and not found and not others and not listed:
        raise ValueError(f"{who} takes any arguments: name those that it wants, {forms}")
    found |= {name: Asked(p.name, True) for name, p in zip(free, others, strict=False)}
    meant = [p for p in listed if p.name not in offers and p.default is not p.empty and _sounds_like_a_seed(p.name)]
    if "seed" in offers and "seed" not in found and meant:
        raise ValueError(f"{who} would not get a seed in {meant[0]}: name it seed, or give it no default")
    return found


def _sounds_like_a_seed(name: str) -> bool:
    return name == "s" or "seed" in name


def called_with(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A call to be made: with these arguments by name, also where they can only be given by their place."""
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update(arguments)
    bound.apply_defaults()
    return partial(function, *bound.args, **bound.kwargs)
