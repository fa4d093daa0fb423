"""Repeated training: on several runs in turn, and by folds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.files import full_path
from ..common.frames import as_strings, check_columns, labels_of
from ..common.presentation import NotebookMixin
from ..common.progress import work_bar
from ..common.runs import trained_qids
from .recipe import TrainingArgs
from .resume import TrainingData, check_new, continue_fit, fit_or_load

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
    """Fit a model on several candidate runs in turn, e.g. of better and better first stages with harder negatives.

    Args:
        model: a reranker, which is returned; its `training` does not change.
        runs: the training candidates of each round, as for `fit`.
        qrels_tr: the labels for all of them.
        topics_or_res_va: the validation candidates for all rounds.
        qrels_va: their labels.
        training: the recipe of each round, e.g. `recipes("leaderboard")`. A checkpoint folder gets a subfolder for each
            round, and finished rounds are not trained again.
    """
    old_recipe = model.training
    try:
        for number, (run, args) in enumerate(zip(runs, training, strict=True), start=1):
            folder = None if args.checkpoint is None else Path(args.checkpoint) / f"round-{number}"
            model.training = replace(args, checkpoint=folder)
            continue_fit(model, run, qrels_tr, topics_or_res_va, qrels_va)
    finally:
        model.training = old_recipe
    return model


class FoldModels(NotebookMixin, pt.Transformer):
    """Scores each query with the model of its fold, which was not trained on judgements for the query.

    Args:
        models: the models, one per fold.
        folds: the qids of each fold.
        run: the runs of all models on their folds: `qid, query, docno, score, rank`.
    """

    def __init__(self, models: Sequence[Any], folds: Sequence[Sequence[str]], run: pd.DataFrame) -> None:
        self.models = list(models)
        self.folds = [tuple(fold) for fold in folds]
        self.run = run

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Score every row with the model of its query's fold; rows stay the same, with new `score` and `rank`."""
        if not len(inp):
            return self.models[0].transform(inp)
        pt.validate.columns(inp, includes=["qid"], context=self)
        fold_of = {qid: number for number, fold in enumerate(self.folds) for qid in fold}
        unknown = next((qid for qid in as_strings(inp["qid"]) if qid not in fold_of), None)
        if unknown is not None:
            raise ValueError(f"qid {unknown!r} is not in any fold, so models may have been trained on it: leave it out")
        numbers = np.array([fold_of[qid] for qid in as_strings(inp["qid"])])
        rows = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        parts = [self.models[numbers[places[0]]].transform(inp.iloc[places]) for places in rows]
        return pd.concat(parts).iloc[np.argsort(np.concatenate(rows))]

    def subtransformers(self) -> dict[str, Any]:
        """Return the models."""
        return {"models": self.models}

    @property
    def trained_qids(self) -> frozenset[str]:
        """The queries that the model of their own fold was trained on."""
        pairs = zip(self.models, self.folds, strict=True)
        return frozenset().union(*(trained_qids(model) & {*fold} for model, fold in pairs))

    @property
    def history(self) -> pd.DataFrame:
        """The concatenated histories of all models, with the column `fold`, from 0."""
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
    validation: str | None = None,
    folder: str | Path | None = None,
    verbose: bool = False,
) -> FoldModels:
    """Train one model per fold on the candidates and judgements of the other folds.

    Every model starts from the same weights, and scores the candidates of its own fold.

    Args:
        model: a model, which is copied with its weights for each fold (e.g. after training on a larger collection) and
            does not change; or a function that creates a new one.
        run: candidates for all queries: `qid, query, docno`, `score` or `rank`, and the text unless the model loads it.
        qrels: `qid, docno, label`.
        folds: a list of qids for each fold; each query of the run is in exactly one fold.
        training_run: the training candidates, e.g. `add_judged(run, ...)`; None uses those of `run`.
        validation: the queries to select the best weights, instead of training on them: `"next fold"`; None trains on
            all.
        folder: a folder for the models. After an interruption, a second call with the same arguments continues:
            finished models are read, and the current fold is resumed. Models, recipe, candidates, labels and texts must
            be the same; those of a `text_loader` are read once for this. A user's function (`augment`, a loss) is
            compared by its code; what it calls does not count.
        verbose: show a progress bar over the folds.

    Returns:
        A transformer that scores each query with the model of its fold, with the attributes `models` and `run`, the
        runs of all folds (`qid, query, docno, score, rank`) in the order of `run`.

    Raises:
        ValueError: if a query is not in exactly one fold, or the folder has other models.
    """
    check_columns(run, ("qid", "query", "docno"), "the candidates")
    check_arguments("str", choices=(None, NEXT_FOLD), validation=validation)
    run = run.reset_index(drop=True).assign(qid=as_strings(run["qid"]).tolist())
    train_on = run if training_run is None else training_run.assign(qid=as_strings(training_run["qid"]).tolist())
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    labels_of(qrels, "qrels")  # checks labels before the first fold is trained
    qrels = qrels.assign(qid=as_strings(qrels["qid"]))
    parts = [{str(qid) for qid in fold} for fold in folds]
    qids = dict.fromkeys([*run["qid"], *train_on["qid"]])
    misplaced = [qid for qid in qids if sum(qid in part for part in parts) != 1]
    if misplaced:
        raise ValueError(f"folds must have every query exactly once: {len(misplaced)} are wrong, e.g. {misplaced[0]!r}")
    tests = [_of(run, part) for part in parts]

    models: list[Any] = []
    runs = []
    with work_bar("fit", "fold", len(parts), shown=verbose) as bar:
        for index, part in enumerate(parts):
            others = [qid for qid in qids if qid not in part]
            validation_qids = parts[(index + 1) % len(parts)] & set(others) if validation == NEXT_FOLD else set()
            train = set(others) - validation_qids
            data = TrainingData(_of(train_on, train), _of(qrels, train))
            if validation_qids:
                data = TrainingData(*data[:2], _of(run, validation_qids), _of(qrels, validation_qids))
            # A copy with the same weights, or the new model of a function.
            new = model() if isinstance(model, type) else getattr(model, "apply_attributes", model)()
            check_new(new, models)
            models.append(fit_or_load(new, data, None if folder is None else Path(full_path(folder)) / f"fold-{index}"))
            runs.append(_run_of(models[-1], tests[index]))
            if hasattr(models[-1], "to_cpu"):  # its next `transform` moves the weights back
                models[-1].to_cpu()
            bar.update()
    return FoldModels(models, [list(dict.fromkeys(test["qid"])) for test in tests], pd.concat(runs).sort_index())


def _run_of(model: Any, candidates: pd.DataFrame) -> pd.DataFrame:
    """Return `qid, query, docno, score, rank` of the candidates."""
    scored = model.transform(candidates)
    if not scored[["qid", "docno"]].astype(str).equals(candidates[["qid", "docno"]].astype(str)):
        raise ValueError(f"{model!r} must return the same rows in the same order")
    run = candidates[["qid", "query", "docno"]].assign(score=scored["score"].to_numpy(dtype="float64"))
    return pt.model.add_ranks(run)


def _of(frame: pd.DataFrame, qids: Iterable[str]) -> pd.DataFrame:
    return frame[frame["qid"].isin(set(qids))]
