"""The same training again: on several runs in turn, for each fold, with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_seeds
from ..common.frames import as_strings, check_columns
from ..common.notices import Told, one_system, told_together
from ..common.presentation import Presented
from ..common.progress import counting, one_line
from ..experiment.systems import Fold, asked_of, called_with, make_folds
from .recipe import TrainingArgs
from .resume import TrainingData, check_new, fit_further, fit_or_load, transform_or_read

NEXT_FOLD = "next fold"


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
            fit_further(model, run, qrels_tr, topics_or_res_va, qrels_va)
    finally:
        model.training = before
    return model


class FoldModels(Presented, pt.Transformer):
    """Sends each query to the model of its fold, which has not seen the query's judgements.

    Args:
        models: one for each fold.
        folds: each fold's qids.
        run: what the models made of their own folds' candidates: `qid, query, docno, score, rank`.
    """

    def __init__(self, models: Sequence[Any], folds: Sequence[Sequence[str]], run: pd.DataFrame) -> None:
        self.models = list(models)
        self.folds = [tuple(fold) for fold in folds]
        self.run = run
        self.warned: Told = set().union(*(getattr(model, "warned", ()) for model in models))

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Scores every row with the model of its query's fold.

        Args:
            inp: what the models take.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            ValueError: if a query is in no fold.
        """
        if not len(inp):
            return self.models[0].transform(inp)
        pt.validate.columns(inp, includes=["qid"], context=self)
        fold_of = {qid: number for number, fold in enumerate(self.folds) for qid in fold}
        qids = as_strings(inp["qid"]).tolist()
        unknown = list(dict.fromkeys(qid for qid in qids if qid not in fold_of))
        if unknown:
            raise ValueError(
                f"no model was cross-validated for the queries {', '.join(map(repr, unknown[:5]))} ({len(unknown)} in "
                f"all): they are in no fold"
            )
        numbers = np.array([fold_of[qid] for qid in qids])
        rows = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        with told_together(self), one_system(None, self.warned):
            parts = [self.models[numbers[own[0]]].transform(inp.iloc[own]) for own in rows]
        if [len(part) for part in parts] != [len(own) for own in rows]:
            raise ValueError("a fold's model does not return the rows that it is given: put it after FoldModels")
        return pd.concat(parts).iloc[np.argsort(np.concatenate(rows))]

    @property
    def history(self) -> pd.DataFrame:
        """The histories of all models one below the other, with the column `fold`, from 0."""
        return pd.concat([model.history.assign(fold=i) for i, model in enumerate(self.models)], ignore_index=True)

    def __repr__(self) -> str:
        return f"FoldModels({len(self.models)} folds: {self.models[0]!r}, ...)"


def k_fold_fit(
    model: Any | Callable[[], Any],
    run: pd.DataFrame,
    qrels: pd.DataFrame,
    folds: Sequence[Sequence[str]],
    *,
    training_run: pd.DataFrame | None = None,
    validation: str | float | None = None,
    seed: int = 42,
    folder: str | Path | None = None,
    executor: Any = None,
    verbose: bool = False,
) -> FoldModels:
    """Trains one model for each fold on the candidates and judgements of the other folds.

    Every model starts from the same weights, and scores the candidates of its own fold, whose judgements it has not
    seen. Robust04's folds (Huston & Croft 2014, from ir_datasets): `ld.protocols["robust04-title"].fold_qids()`.

    Args:
        model: a model that is copied for each fold with its weights, e.g. one that has been trained on a larger
            collection, and stays as it is; or a function that makes a new one.
        run: candidates of all queries: `qid, query, docno`, `score` or `rank`, and the text, unless the model loads it.
        qrels: `qid, docno, label`.
        folds: a list of qids for each fold; each of the run's queries is in exactly one.
        training_run: candidates to train on where these are others than those to score, e.g. `add_judged(run, ...)`.
        validation: what is kept out of the training to choose the best weights: `"next fold"`, or a share of the
            training queries, e.g. 0.1; None keeps all for training.
        seed: of the choice of that share.
        folder: for models and runs. A second call with the same arguments goes on where the first one was interrupted:
            finished folds are read, the one under way continues.
        executor: a `RayExecutor`, or what `ld.distributed` returns: trains the folds on its workers, one fold each at a
            time. Workers on other machines must see the same folder. None trains one after the other, here.
        verbose: show a line for each fold, with the progress of its training; with `executor`, one for all.

    Returns:
        A transformer that sends each query to the model of its fold; `.models`, and `.run`: the folds' runs as one
        (`qid, query, docno, score, rank`) in the order of `run`.

    Raises:
        ValueError: if a query is in no fold or in several, a fold has none of the run's queries, the models of two
            folds are the same, or the folder holds other models.
        TypeError: if the model cannot be fitted or copied.
    """
    check_columns(run, ("qid", "query", "docno"), "the candidates")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    is_fraction = isinstance(validation, Real) and not isinstance(validation, bool) and 0.0 < float(validation) < 1.0
    if not (validation is None or validation == NEXT_FOLD or is_fraction):
        raise ValueError(
            f"validation={validation!r} must be {NEXT_FOLD!r}, a share of the training queries between 0 and 1, or None"
        )
    run = run.reset_index(drop=True).assign(qid=as_strings(run["qid"]).tolist())
    train_on = run if training_run is None else training_run.assign(qid=as_strings(training_run["qid"]).tolist())
    qrels = qrels.assign(qid=as_strings(qrels["qid"]))
    topics = pd.concat([frame[["qid", "query"]] for frame in (run, train_on)]).drop_duplicates("qid")
    prepared = make_folds(folds, topics, qrels)
    empty = [str(fold.index) for fold in prepared if not len(fold.test_topics)]
    if empty:
        raise ValueError(f"the folds {', '.join(empty)} (counted from 0) have none of the queries of the run")

    def fits() -> Iterator[_Fit]:
        for place, fold in enumerate(prepared, 1):
            yield _Fit(
                f"fold {place}/{len(prepared)}",
                _new(model, {}),
                _training_data(fold, train_on, run, validation, seed),
                None if folder is None else Path(folder) / f"fold-{fold.index}",
                _of(run, fold.test_topics["qid"]),
            )

    models, runs = zip(*_fit_all(fits(), "fold", len(prepared), executor, verbose), strict=True)
    return FoldModels(models, [fold.test_topics["qid"].tolist() for fold in prepared], pd.concat(runs).sort_index())


class _Fit(NamedTuple):
    """A training: its name, of what, on what, where it is kept, and what the model scores afterwards, if anything."""

    name: str
    model: Any
    data: TrainingData
    folder: Path | None
    candidates: pd.DataFrame | None = None


def _fit_all(
    fits: Iterable[_Fit], unit: str, number: int, executor: Any, verbose: bool
) -> list[tuple[Any, pd.DataFrame | None]]:
    """The trained models and their runs, in order; trained one after the other, or by the workers of an executor."""
    made: WeakSet[Any] = WeakSet()
    told: Told = set()
    done: dict[int, tuple[Any, pd.DataFrame | None]] = {}

    def new() -> Iterator[tuple[int, _Fit]]:
        for place, fit in enumerate(fits):
            check_new(fit.model, made)
            made.add(fit.model)
            yield place, fit

    if executor is None:
        for place, fit in new():
            with one_line(fit.name, unit, shown=verbose), one_system(None, told):
                done[place] = _fit(None, fit)
    else:
        with counting("fit", unit, number, shown=verbose) as advance, one_system(None, told), told_together():
            tasks = ((place, fit._replace(folder=fit.folder and fit.folder.absolute())) for place, fit in new())
            for place, fitted in executor.map(_fit, None, tasks):
                done[place] = fitted
                advance()
    return [done[place] for place in sorted(done)]


def _fit(_: None, fit: _Fit) -> tuple[Any, pd.DataFrame | None]:
    """Trains, or reads what is finished, here or on a worker."""
    trained = fit_or_load(fit.model, fit.data, fit.folder)
    run = None if fit.candidates is None else transform_or_read(trained, fit.candidates, fit.folder)
    return _off_device(trained), run


def _training_data(
    fold: Fold, train_on: pd.DataFrame, run: pd.DataFrame, validation: str | float | None, seed: int
) -> TrainingData:
    """Candidates and judgements of the other folds, divided if some are for validation."""
    held_out: set[str] = set()
    if validation == NEXT_FOLD:
        held_out = set(fold.validation_topics["qid"])
    elif validation is not None:
        judged = set(fold.train_qrels["qid"])
        offered = [qid for qid in fold.train_topics["qid"] if qid in judged]
        number = max(1, round(float(validation) * len(offered)))
        if number >= len(offered):
            raise ValueError(f"validation={validation} leaves none of the {len(offered)} judged queries for training")
        held_out = set(Random(f"{seed}:validation:{fold.index}").sample(offered, number))
    train = set(fold.train_topics["qid"]) - held_out
    if not train:
        raise ValueError(f"validation={validation!r} needs at least three folds: with two, none is left for training")
    data = TrainingData(_of(train_on, train), _of(fold.train_qrels, train))
    if not held_out:
        return data
    return data._replace(validation_run=_of(run, held_out), validation_qrels=_of(fold.train_qrels, held_out))


def _of(frame: pd.DataFrame, qids: Any) -> pd.DataFrame:
    return frame[frame["qid"].isin(set(qids))]


class SeedModels(dict[int, Any]):
    """Models by seed, each of them a transformer."""

    def behind(self, first_stage: pt.Transformer) -> list[pt.Transformer]:
        """A pipeline for each seed: a system of `ld.Experiment`, which averages each query over them before it tests.

        That is what significance tests compare in Boytsov et al. 2025, section 3.2.

        Args:
            first_stage: retriever and text loader, or `pt.Transformer.from_df(run)` for given candidates.
        """
        return [first_stage >> model for model in self.values()]


def fit_seeds(
    model: Any | Callable[[int], Any],
    seeds: Sequence[int],
    topics_or_res_tr: pd.DataFrame,
    qrels_tr: pd.DataFrame,
    topics_or_res_va: pd.DataFrame | None = None,
    qrels_va: pd.DataFrame | None = None,
    *,
    folder: str | Path | None = None,
    executor: Any = None,
    verbose: bool = False,
) -> SeedModels:
    """Trains one model for each seed.

    The seed decides on the weights that start at random, on the order and choice of what is trained on, and on dropout.

    Args:
        model: a function that makes a new model for a seed, `lambda seed: ld.MaxP(seed=seed)` or `ld.MaxP` itself; or
            a model that is copied, with that seed if it starts from its backbone. The seed of its recipe is set here.
        seeds: whole numbers; 0, 1, 2 in Boytsov et al. 2025.
        topics_or_res_tr: training candidates, as for `fit`.
        qrels_tr: their labels.
        topics_or_res_va: validation candidates.
        qrels_va: their labels.
        folder: for the models. A second call goes on where the first one was interrupted.
        executor: as in `k_fold_fit`: its workers train one seed each at a time.
        verbose: show a line for each seed, with the progress of its training; with `executor`, one for all.

    Returns:
        The models by seed.

    Raises:
        ValueError: if seeds are missing, come twice or are no whole numbers, the function takes no seed, two models are
            the same, or the folder holds other models.
        TypeError: if the model cannot be fitted or copied.
    """
    check_seeds(seeds)
    data = TrainingData(topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va)

    def fits() -> Iterator[_Fit]:
        for seed in seeds:
            # A seed of its own would ask for other weights than the trained ones.
            new = _new(model, {"seed": seed}, **({} if getattr(model, "is_trained", False) else {"seed": int(seed)}))
            if hasattr(new, "recipe"):
                new.training = replace(new.recipe, seed=int(seed))
            yield _Fit(f"seed {seed}", new, data, None if folder is None else Path(folder) / f"seed-{seed}")

    fitted = _fit_all(fits(), "seed", len(seeds), executor, verbose)
    return SeedModels({int(seed): trained for seed, (trained, _) in zip(seeds, fitted, strict=True)})


def _new(model: Any, arguments: Mapping[str, Any], **changes: Any) -> Any:
    """What a function makes of the arguments, or a copy of a model with its weights and these changes."""
    if not isinstance(model, pt.Transformer):
        if not callable(model):
            raise TypeError(f"{model!r} is neither a model nor a function that makes one")
        asked = asked_of(model, list(arguments), "the function that makes a model")
        if unasked := [name for name in arguments if name not in asked]:
            raise ValueError(f"the function that makes a model takes no {unasked[0]}: all models would be the same")
        return called_with(model, {asked[name].name: value for name, value in arguments.items()})()
    if not hasattr(model, "apply_attributes"):
        raise TypeError(f"{model!r} cannot be copied: give a function that makes a new one at each call")
    return model.apply_attributes(**changes)


def _off_device(model: Any) -> Any:
    """The model, its weights in main memory: the next `transform` moves them back."""
    if hasattr(model, "load_scorer"):
        model.load_scorer().cpu()
    return model
