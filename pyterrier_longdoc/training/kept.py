"""Trained models in folders: a finished one is read again, an unfinished one goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyterrier as pt

from ..common.files import replacing
from ..experiment.runs import read_run, write_run
from ..modelling.checkpoint import fingerprint
from .args import TrainingArgs
from .identity import OF_THIS_MACHINE, check_same, frame_digest, recipe_notes, settings_of

MODEL, RUN, SETTINGS = "model", "run.res.gz", "settings.json"
"""In the folder of a model: itself, what it made of its candidates, and what it is made with."""
_FINISHED, _SCORED, _STATE = "finished.json", "scored.json", "state"


class TrainingData(NamedTuple):
    """What `fit` takes, in its order."""

    run: pd.DataFrame
    qrels: pd.DataFrame
    validation_run: pd.DataFrame | None = None
    validation_qrels: pd.DataFrame | None = None


def fit_kept(
    model: Any,
    data: TrainingData,
    folder: Path | None,
    *,
    fit: Callable[[Any], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Fits a model, or reads it if it is finished already.

    Args:
        model: new; trained in place unless it is read.
        data: what it is fitted on.
        folder: for the state of the training, which goes on from there if it was killed, and for the model; None keeps
            nothing.
        fit: trains the model on the data, by its recipe and with its checkpoint folder; None for its own `fit`.
        about: what else must be the same for a kept model to be this one, JSON-able.

    Returns:
        The trained model.

    Raises:
        TypeError: if it cannot be fitted, or has to be kept and cannot be saved.
        ValueError: if the folder holds another model, finished or not: other arguments, recipe, data or starting
            weights; or if the recipe has a checkpoint folder of its own.
    """
    if not hasattr(model, "fit"):
        raise TypeError(f"{model!r} has no fit: give an Estimator such as ld.MaxP(...)")
    if getattr(getattr(model, "training", None), "checkpoint", None) is not None:
        raise ValueError(
            "TrainingArgs(checkpoint=...) is for one training, and several begin here: leave it out; folder= keeps the "
            "state of each"
        )
    fit = fit or (lambda model: model.fit(*data))
    if folder is None:
        fit(model)
        return model
    identity = {**_identity(model, data), **(about or {})}
    kept = read_notes(folder / _FINISHED)
    if kept is not None:
        check_same(kept, identity, folder)
        again = (*OF_THIS_MACHINE, "runtime")  # which is not saved
        return type(model).load(folder / MODEL, **{name: getattr(model, name) for name in again})
    (folder / _SCORED).unlink(missing_ok=True)
    before = model.training
    model.training = replace(recipe_of(model), checkpoint=folder / _STATE)
    try:
        fit(model)
    finally:
        model.training = before
    if writes():
        model.save(folder / MODEL)
        _write(folder / _FINISHED, identity)  # last, so that it vouches for the model
        shutil.rmtree(folder / _STATE, ignore_errors=True)
    return model


def is_kept(folder: Path) -> bool:
    """Whether the folder has a finished model."""
    return (folder / _FINISHED).is_file()


def score_kept(model: Any, candidates: pd.DataFrame, folder: Path | None) -> pd.DataFrame:
    """What a model makes of its candidates, or has made of them.

    Args:
        model: the model that `fit_kept` kept in the folder.
        candidates: R rows of `qid, query, docno` and what else it needs.
        folder: None keeps nothing.

    Returns:
        `qid, query, docno, score, rank`, R rows in the order and with the index of the candidates.

    Raises:
        ValueError: if the model does not return the rows that it was given.
    """
    identity = {"candidates": frame_digest(candidates)}
    if folder is not None and read_notes(folder / _SCORED) == identity:
        scores = read_run(folder / RUN)["score"].to_numpy()
    else:
        out = model.transform(candidates)
        if not out[["qid", "docno"]].astype(str).equals(candidates[["qid", "docno"]].astype(str)):
            raise ValueError(f"{model!r} does not return the rows that it is given, in their order")
        scores = out["score"].to_numpy(dtype="float64")
        if folder is not None and writes():
            write_run(candidates.assign(score=scores), folder / RUN, type(model).__name__)
            _write(folder / _SCORED, identity)
    return pt.model.add_ranks(candidates[["qid", "query", "docno"]].assign(score=scores))


def copies_of(model: Any) -> Callable[[], Any]:
    """A function that makes a new model at each call.

    Args:
        model: such a function, or a model to be copied with its weights.

    Raises:
        TypeError: if it is neither.
    """
    if not isinstance(model, pt.Transformer):
        if not callable(model):
            raise TypeError(f"{model!r} is neither a model nor a function that makes one")
        return model
    if not hasattr(model, "apply_attributes"):
        raise TypeError(f"{model!r} cannot be copied: give a function that makes a new one at each call")
    return model.apply_attributes


def check_new(model: Any, others: Iterable[Any]) -> None:
    """Raises ValueError if a function has returned a model that it has returned before."""
    if any(model is other for other in others):
        raise ValueError(f"the function returned the same {model!r} twice: it must make a new model at each call")


def recipe_of(model: Any) -> TrainingArgs:
    """The recipe that a model's `fit` follows."""
    return model.training or model._default_training()


def off_device(model: Any) -> Any:
    """The model, its weights in main memory: the next `transform` moves them back."""
    if hasattr(model, "load_scorer"):
        model.load_scorer().cpu()
    return model


def settings_and_recipe(model: Any) -> dict[str, Any]:
    """Class, arguments and recipe of a model, for JSON, without what decides about neither weights nor scores."""
    return {**settings_of(model), "recipe": recipe_notes(recipe_of(model))}


def keep_settings(settings: dict[str, Any], folder: Path) -> None:
    """Notes in a folder what its models are made with.

    Raises:
        ValueError: if that is something else than was noted before.
    """
    kept = read_notes(folder / SETTINGS)
    if kept is not None:
        check_same(kept, settings, folder)
    elif writes():
        _write(folder / SETTINGS, settings)


def _identity(model: Any, data: TrainingData) -> dict[str, Any]:
    """What must be the same for a kept model to be this one."""
    if not hasattr(model, "save") or not hasattr(model, "training"):
        raise TypeError(f"folder= keeps models by their save, which {model!r} has not: leave folder= out")
    if model.trust_remote_code:
        raise ValueError("a model whose backbone runs remote code cannot be saved: leave folder= out")
    trained = model._loaded is not None and model._loaded.trained  # else it starts from its backbone
    return {
        **settings_and_recipe(model),
        "starting weights": fingerprint(model._loaded.scorer.state_dict()) if trained else None,
        "training data": [frame_digest(frame) for frame in data],
    }


def writes() -> bool:
    """Whether this is the only process, or the first of several that train together."""
    return os.environ.get("RANK", "0") == "0"


def read_notes(path: Path) -> dict[str, Any] | None:
    """A JSON file; None if it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write(path: Path, values: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
