"""Cross-validated training: one model for each fold, trained on the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import as_strings, check_columns
from ..common.presentation import Presented
from ..experiment.systems import Fold, make_folds
from .groups import check_qrels
from .kept import TrainingData, check_new, copies_of, fit_kept, off_device, score_kept

NEXT_FOLD = "next fold"


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
        parts = [self.models[numbers[own[0]]].transform(inp.iloc[own]) for own in rows]
        if [len(part) for part in parts] != [len(own) for own in rows]:
            raise ValueError("a fold's model does not return the rows that it is given: put it after FoldModels")
        return pd.concat(parts).iloc[np.argsort(np.concatenate(rows))]

    @property
    def history(self) -> pd.DataFrame:
        """The histories of all models one below the other, with the column `fold`, from 0."""
        return pd.concat([model.history.assign(fold=i) for i, model in enumerate(self.models)], ignore_index=True)

    def __repr__(self) -> str:
        return f"FoldModels({len(self.models)} x {self.models[0]!r})"


def k_fold_fit(
    model: Any | Callable[[], Any],
    run: pd.DataFrame,
    qrels: pd.DataFrame,
    folds: Sequence[Sequence[str]],
    *,
    validation: str | float | None = None,
    seed: int = 42,
    folder: str | Path | None = None,
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
        validation: what is kept out of the training to choose the best weights: `"next fold"`, or a share of the
            training queries, e.g. 0.1; None keeps all for training.
        seed: of the choice of that share.
        folder: for models and runs. A second call with the same arguments goes on where the first one was interrupted:
            finished folds are read, the one under way continues.
        verbose: show a progress bar over the folds.

    Returns:
        A transformer that sends each query to the model of its fold; `.models`, and `.run`: the folds' runs as one
        (`qid, query, docno, score, rank`) in the order of `run`.

    Raises:
        ValueError: if a query is in no fold or in several, a fold has none of the run's queries, the models of two
            folds are the same, or the folder holds other models.
        TypeError: if the model cannot be fitted or copied.
    """
    check_columns(run, ("qid", "query", "docno"), "the candidates")
    check_qrels(qrels)
    _check_validation(validation)
    run = run.reset_index(drop=True).assign(qid=as_strings(run["qid"]).tolist())
    qrels = qrels.assign(qid=as_strings(qrels["qid"]))
    prepared = make_folds(folds, run[["qid", "query"]].drop_duplicates("qid"), qrels)
    empty = [str(fold.index) for fold in prepared if not len(fold.test_topics)]
    if empty:
        raise ValueError(f"the folds {', '.join(empty)} (counted from 0) have none of the queries of the run")
    make = copies_of(model)
    models: list[Any] = []
    runs: list[pd.DataFrame] = []
    for fold in pt.tqdm(prepared, desc="k_fold_fit", unit="fold", disable=not verbose):
        own_folder = None if folder is None else Path(folder) / f"fold-{fold.index}"
        new = make()
        check_new(new, models)
        trained = fit_kept(new, _training_data(fold, run, validation, seed), own_folder)
        runs.append(score_kept(trained, _of(run, fold.test_topics["qid"]), own_folder))
        models.append(off_device(trained))
    return FoldModels(models, [fold.test_topics["qid"].tolist() for fold in prepared], pd.concat(runs).sort_index())


def _training_data(fold: Fold, run: pd.DataFrame, validation: str | float | None, seed: int) -> TrainingData:
    """Candidates and judgements of the other folds, divided if some are for validation."""
    held_out = _held_out(fold, validation, seed)
    train = [qid for qid in fold.train_topics["qid"] if qid not in held_out]
    if not train:
        raise ValueError(f"validation={validation!r} needs at least three folds: with two, none is left for training")
    if not held_out:
        return TrainingData(_of(run, train), _of(fold.train_qrels, train))
    return TrainingData(
        _of(run, train), _of(fold.train_qrels, train), _of(run, held_out), _of(fold.train_qrels, held_out)
    )


def _held_out(fold: Fold, validation: str | float | None, seed: int) -> set[str]:
    """The qids kept for validation."""
    if validation is None:
        return set()
    if validation == NEXT_FOLD:
        return set(fold.validation_topics["qid"])
    judged = set(fold.train_qrels["qid"])
    offered = [qid for qid in fold.train_topics["qid"] if qid in judged]
    number = max(1, round(float(validation) * len(offered)))
    if number >= len(offered):
        raise ValueError(f"validation={validation} leaves none of the {len(offered)} judged queries for training")
    return set(random.Random(f"{seed}:validation:{fold.index}").sample(offered, number))


def _of(frame: pd.DataFrame, qids: Any) -> pd.DataFrame:
    return frame[frame["qid"].isin(set(qids))]


def _check_validation(validation: Any) -> None:
    if validation is None or validation == NEXT_FOLD:
        return
    if isinstance(validation, bool) or not isinstance(validation, Real) or not 0.0 < float(validation) < 1.0:
        raise ValueError(
            f"validation={validation!r} must be {NEXT_FOLD!r}, a share of the training queries between 0 and 1, or None"
        )
