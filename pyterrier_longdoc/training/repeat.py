"""The same training again: on several runs in turn, for each fold, with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import arguments_of, check_seeds
from ..common.frames import as_strings, check_columns
from ..common.presentation import Presented, described
from ..common.progress import counting
from ..common.registry import own_code_in
from ..common.runs import frame_digest, read_run, write_run
from ..common.warnings import SeenWarnings, one_system, told_together
from .processes import is_first_process
from .recipe import TrainingArgs
from .resume import FINISHED, TrainingData, check_new, fit_further, fit_or_load, settings_of

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
    """Fit a model on several candidate runs in turn, e.g. of ever better first stages with ever harder negatives.

    Args:
        model: a reranker, which is returned; its `training` is the same afterwards.
        runs: training candidates of each round, as `fit` takes them.
        qrels_tr: labels of all of them.
        topics_or_res_va: validation candidates, the same in each round.
        qrels_va: their labels.
        training: each round's recipe, e.g. `recipes("leaderboard")`. A checkpoint folder gets a folder for each
            round, and rounds that are finished there are not trained again.
    """
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
        self.warned: SeenWarnings = set().union(*(getattr(model, "warned", ()) for model in models))

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Score every row with the model of its query's fold; the rows stay as they are, with `score` and `rank`."""
        if not len(inp):
            return self.models[0].transform(inp)
        pt.validate.columns(inp, includes=["qid"], context=self)
        fold_of = {qid: number for number, fold in enumerate(self.folds) for qid in fold}
        numbers = np.array([fold_of[qid] for qid in as_strings(inp["qid"])])
        rows = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        with told_together(self), one_system(None, self.warned):
            parts = [self.models[numbers[own[0]]].transform(inp.iloc[own]) for own in rows]
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
    """Train one model for each fold on the candidates and judgements of the other folds.

    Every model starts from the same weights, and scores the candidates of its own fold, whose judgements it has not
    seen.

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
        executor: a `RayExecutor`: trains the folds on its workers, one fold each at a
            time. Workers on other machines must see the same folder. None trains one after the other, here.
        verbose: show a progress bar of the folds.

    Returns:
        A transformer that sends each query to the model of its fold; `.models`, and `.run`: the folds' runs as one
        (`qid, query, docno, score, rank`) in the order of `run`.

    Raises:
        ValueError: if a query is not in exactly one fold, or the folder holds other models.
    """
    check_columns(run, ("qid", "query", "docno"), "the candidates")
    run = run.reset_index(drop=True).assign(qid=as_strings(run["qid"]).tolist())
    train_on = run if training_run is None else training_run.assign(qid=as_strings(training_run["qid"]).tolist())
    qrels = qrels.assign(qid=as_strings(qrels["qid"]))
    parts = [{str(qid) for qid in fold} for fold in folds]
    asked = dict.fromkeys([*run["qid"], *train_on["qid"]])
    wrong = [qid for qid in asked if sum(qid in part for part in parts) != 1]
    if wrong:
        raise ValueError(f"every query must be in exactly one fold, but {len(wrong)} are not, e.g. {wrong[0]!r}")
    tests = [_of(run, part) for part in parts]

    def fits() -> Iterator[_Fit]:
        for index, part in enumerate(parts):
            rest = [qid for qid in asked if qid not in part]
            following = parts[(index + 1) % len(parts)] & set(rest)
            held_out = _held_out(rest, following, qrels, validation, f"{seed}:validation:{index}")
            train = set(rest) - held_out
            data = TrainingData(_of(train_on, train), _of(qrels, train))
            if held_out:
                data = data._replace(validation_run=_of(run, held_out), validation_qrels=_of(qrels, held_out))
            kept = None if folder is None else Path(folder) / f"fold-{index}"
            yield _Fit(_copy(model), data, kept, tests[index])

    models, runs = zip(*_fit_all(fits(), "fold", len(parts), executor, verbose), strict=True)
    return FoldModels(models, [list(dict.fromkeys(test["qid"])) for test in tests], pd.concat(runs).sort_index())


def _of(frame: pd.DataFrame, qids: Iterable[str]) -> pd.DataFrame:
    return frame[frame["qid"].isin(set(qids))]


def _held_out(
    qids: Sequence[str], following: set[str], qrels: pd.DataFrame, validation: str | float | None, seed: str
) -> set[str]:
    """Return those training queries of a fold that are kept to choose the best weights."""
    if validation is None:
        return set()
    if validation == NEXT_FOLD:
        held_out, offered = following, list(qids)
    else:
        judged = set(qrels["qid"])
        offered = [qid for qid in qids if qid in judged]
        held_out = set(Random(seed).sample(offered, max(1, round(float(validation) * len(offered)))))
    if not held_out or len(held_out) >= len(offered):
        raise ValueError(f"validation={validation!r} leaves no queries for training or for validation")
    return held_out


class _Fit(NamedTuple):
    """A training: its name, of what, on what, where it is kept, and what the model scores afterwards, if anything."""

    model: Any
    data: TrainingData
    folder: Path | None
    candidates: pd.DataFrame | None = None


def _fit_all(
    fits: Iterator[_Fit], unit: str, number: int, executor: Any, verbose: bool
) -> list[tuple[Any, pd.DataFrame | None]]:
    """Return the trained models and their runs; trained one after the other, or by the workers of an executor."""
    made: WeakSet[Any] = WeakSet()
    done: dict[int, tuple[Any, pd.DataFrame | None]] = {}

    def new() -> Iterator[tuple[int, _Fit]]:
        for place, fit in enumerate(fits):
            check_new(fit.model, made)
            made.add(fit.model)
            yield place, fit

    if executor is None:
        fitted = ((place, _fit(None, fit)) for place, fit in new())
    else:
        tasks = ((place, fit._replace(folder=fit.folder and fit.folder.absolute())) for place, fit in new())
        fitted = executor.map(_fit, None, tasks)
    together = nullcontext() if executor is None else told_together()
    with counting("fit", unit, number, shown=verbose) as advance, one_system(None, set()), together:
        for place, of_place in fitted:
            done[place] = of_place
            advance()
    return [done[place] for place in sorted(done)]


def _fit(_: None, fit: _Fit) -> tuple[Any, pd.DataFrame | None]:
    """Train, or read what is finished, here or on a worker."""
    trained = fit_or_load(fit.model, fit.data, fit.folder)
    run = None if fit.candidates is None else transform_or_read(trained, fit.candidates, fit.folder)
    if hasattr(trained, "to_cpu"):  # its next `transform` moves the weights back
        trained.to_cpu()
    return trained, run


def transform_or_read(model: Any, candidates: pd.DataFrame, folder: Path | None) -> pd.DataFrame:
    """Return candidates scored by a model of `fit_or_load`: read, if its folder has them."""
    keys, path = candidates[["qid", "query", "docno"]], None
    if folder is not None:
        how = [frame_digest(candidates), arguments_of(model, "computing"), (folder / FINISHED).read_text("utf-8")]
        path = folder / f"run-{blake2b(described(how).encode(), digest_size=8).hexdigest()}.res.gz"
        if path.exists() and not own_code_in(settings_of(model)):
            return pt.model.add_ranks(keys.assign(score=read_run(path)["score"].to_numpy()))
    out = model.transform(candidates)
    if not out[["qid", "docno"]].astype(str).equals(keys[["qid", "docno"]].astype(str)):
        raise ValueError(f"{model!r} does not return the rows that it is given, in their order")
    run = keys.assign(score=out["score"].to_numpy(dtype="float64"))
    if path is not None and is_first_process():
        write_run(run, path, type(model).__name__)
    return pt.model.add_ranks(run)


def _copy(model: Any, **arguments: Any) -> Any:
    """Return what a function makes of the arguments, or a copy of a model with its weights and these arguments."""
    make = model.apply_attributes if hasattr(model, "apply_attributes") else model
    return make(**arguments)


class SeedModels(dict[int, Any]):
    """Models by seed, each of them a transformer."""

    def behind(self, first_stage: pt.Transformer) -> list[pt.Transformer]:
        """Return a pipeline for each seed, as a system of `ld.Experiment`, which averages each query before it tests.

        The first stage is retriever and text loader, or `pt.Transformer.from_df(run)` for given candidates.
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
    """Train one model for each seed, which decides on random weights, on what is drawn in what order, and on dropout.

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
        verbose: show a progress bar of the seeds.
    """
    check_seeds(seeds)
    data = TrainingData(topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va)

    def fits() -> Iterator[_Fit]:
        for seed in map(int, seeds):
            # A seed of its own would ask for other weights than the trained ones.
            new = _copy(model, **({} if getattr(model, "is_trained", False) else {"seed": seed}))
            if hasattr(new, "recipe"):
                new.training = replace(new.recipe, seed=seed)
            yield _Fit(new, data, None if folder is None else Path(folder) / f"seed-{seed}")

    fitted = _fit_all(fits(), "seed", len(seeds), executor, verbose)
    return SeedModels({int(seed): trained for seed, (trained, _) in zip(seeds, fitted, strict=True)})
