"""Training by folds: one model for each fold, trained on the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.frames import as_strings, check_columns, labels_of
from ..common.presentation import NotebookMixin
from ..common.progress import work_bar
from .recipe import TrainingArgs
from .resume import ContinuedTrainingWarning

NEXT_FOLD = "next fold"


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
    verbose: bool = False,
) -> FoldModels:
    """Train one model per fold on the candidates and judgements of the other folds.

    Every model starts from the same weights, and scores the candidates of its own fold. If the recipe names a
    `checkpoint` folder, the training of fold i has the subfolder `fold-i`. The recipe of its model keeps this folder.
    After an interruption, the same call continues, and finished folds are not trained again.

    Args:
        model: a model, which is copied with its weights for each fold (e.g. after training on a larger collection) and
            does not change; or a function that creates a new one.
        run: candidates for all queries: `qid, query, docno`, `score` or `rank`, and the text unless the model loads it.
        qrels: `qid, docno, label`.
        folds: a list of qids for each fold; each query of the run is in exactly one fold.
        training_run: the training candidates, e.g. `add_judged(run, ...)`; None uses those of `run`.
        validation: the queries to select the best weights, instead of training on them: `"next fold"`; None trains on
            all.
        verbose: show a progress bar over the folds.

    Returns:
        A transformer that scores each query with the model of its fold, with the attributes `models` and `run`, the
        runs of all folds (`qid, query, docno, score, rank`) in the order of `run`.

    Raises:
        ValueError: if a query is not in exactly one fold, the function returns the same model twice, or the checkpoint
            folder has another training.
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
            others = {*qids} - part
            held_out = parts[(index + 1) % len(parts)] & others if validation == NEXT_FOLD else set()
            data = [_of(train_on, others - held_out), _of(qrels, others - held_out)]
            data += [_of(run, held_out), _of(qrels, held_out)] if held_out else []
            # A copy with the same weights, or the new model of a function.
            new = model() if isinstance(model, type) else getattr(model, "apply_attributes", model)()
            if any(new is old for old in models):
                raise ValueError("model must create a new model in each call, but it returned the same one twice")
            recipe = getattr(new, "training", None)
            if isinstance(recipe, TrainingArgs) and recipe.checkpoint is not None:
                new.training = replace(recipe, checkpoint=Path(recipe.checkpoint) / f"fold-{index}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ContinuedTrainingWarning)  # a trained model is continued on purpose
                new.fit(*data)
            models.append(new)
            runs.append(_run_of(new, tests[index]))
            if hasattr(new, "to_cpu"):  # its next `transform` moves the weights back
                new.to_cpu()
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
