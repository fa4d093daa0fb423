"""Trainings that continue after a kill, and trained models in folders: is it the one that is asked for?"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pandas as pd
import pyterrier as pt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ..common.arguments import OF_THE_MODEL, Role, arguments_of
from ..common.files import replacing, write_lines
from ..common.frames import frame_digest
from ..common.notices import warn
from ..common.presentation import described
from ..common.registry import own_code, own_code_in
from ..experiment.identity import Identities
from ..experiment.runs import read_run, write_run
from ..modelling.fingerprint import fingerprint
from ..modelling.preselection import Preselection
from .examples import Group, Texts
from .losses import LOSSES
from .recipe import TrainingArgs

STATE_FILE = "training-state.safetensors"
_FORMAT = 2
_LENGTH = ("epochs", "max_steps", "patience")


class ContinuedTrainingWarning(UserWarning):
    """`fit` of a model that is trained already goes on from its weights."""


class ScheduleWarning(UserWarning):
    """A training is extended, and its steps so far followed a schedule of the shorter length."""


Sections = dict[str, dict[str, torch.Tensor]]
"""Tensors by name by section."""


# The state of a training.


class Checkpoint:
    """The folder of a training's state: one safetensors file, replaced as a whole, and what must be the same.

    Tensors are named `SECTION/NAME`; all else is JSON in the file's header. The scorer is as it was before the training
    (`entries`: of the history then), or as the training that is to be continued has left it in this process. How long
    the training is may differ: it can be extended.
    """

    def __init__(
        self,
        scorer: nn.Module,
        groups: Sequence[Group],
        texts: Texts,
        args: TrainingArgs,
        settings: Mapping[str, Any],
        entries: int,
    ) -> None:
        self.file = Path(str(args.checkpoint)) / STATE_FILE
        self.length = {name: getattr(args, name) for name in _LENGTH}
        self.entries, self.start = entries, fingerprint(scorer.state_dict())
        before, end = _ended.get(scorer, (None, ""))
        if before is not None and (before.file, end) == (self.file, self.start) and self.file.exists():
            self.entries, self.start = before.entries, before.start
        data = 0
        for group in groups:
            numbers = [None if own is None else tuple(own.tolist()) for own in (group.labels, group.targets)]
            data = zlib.crc32(repr((group.qid, group.query, texts.told(group.rows), *numbers)).encode(), data)
        self.identity: dict[str, Any] = {
            "format": _FORMAT,
            **settings,
            "recipe": {name: value for name, value in args.as_dict().items() if name not in _LENGTH},
            "training data": data,
            "starting weights": self.start,
            "trainable weights": sorted(name for name, value in scorer.named_parameters() if value.requires_grad),
        }

    def load(self) -> tuple[Sections, dict[str, Any]] | None:
        """The tensors and values of the state, if there is one; it is left as it is where it cannot be used."""
        if not self.file.exists():
            return None
        sections: Sections = {}
        try:
            with safe_open(self.file, framework="pt") as file:
                values = json.loads(file.metadata()["about"])
                for key in file.keys():  # noqa: SIM118 - no mapping
                    section, _, name = key.partition("/")
                    sections.setdefault(section, {})[name] = file.get_tensor(key).clone()  # the file is replaced
        except Exception as error:
            raise ValueError(
                f"the state of the training in {str(self.file)!r} cannot be read: {error}. It was left as it is; move "
                f"it away or restore a copy, or name another checkpoint folder to start afresh"
            ) from error
        check_same(values["identity"], self.identity, self.file.parent)
        _warn_of_own_code(self.identity, self.file.parent)
        return sections, values

    def save(self, sections: Sections, values: dict[str, Any]) -> None:
        """Writes the state in place of the last one, which stays untouched until this one is complete on disk."""
        tensors = {
            f"{section}/{name}": tensor.detach().cpu().contiguous().clone()
            for section, named in sections.items()
            for name, tensor in named.items()
        }
        about = _as_json({**values, "length": self.length, "identity": self.identity})
        try:
            with replacing(self.file, only_writer=True) as part:
                save_file(tensors, part, metadata={"about": about})
        except Exception as error:
            rest, folder = "; the last state is still there" if self.file.exists() else "", str(self.file.parent)
            raise OSError(f"the state of the training cannot be written to {folder!r}: {error}{rest}") from error

    def end(self, scorer: nn.Module) -> None:
        """Remembers how the training of a model began, for as long as the model has the weights of its end."""
        _ended[scorer] = self, fingerprint(scorer.state_dict())


_ended: WeakKeyDictionary[nn.Module, tuple[Checkpoint, str]] = WeakKeyDictionary()
"""The trainings of this process by model, and the fingerprint of the weights that each ended with."""


def is_resumed(args: TrainingArgs) -> bool:
    """Whether a training by this recipe finds its state in its checkpoint folder, and goes on with it."""
    return args.checkpoint is not None and (Path(args.checkpoint) / STATE_FILE).exists()


def fit_further(model: Any, *data: pd.DataFrame | None) -> None:
    """`fit` where it is known that a trained model goes on from its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContinuedTrainingWarning)
        model.fit(*data)


# What must be the same.


def settings_of(model: Any, *roles: Role) -> dict[str, Any]:
    """Class, recipe and arguments of a model; those that decide about weights or scores unless roles are named."""
    given, recipe = arguments_of(model, *(roles or OF_THE_MODEL)), model.recipe
    arguments = {name: _shown(value) for name, value in given.items()}
    own = own_code(None, model, *given.values(), recipe, LOSSES[recipe.loss].compute)
    return {"class": type(model).__name__, "arguments": arguments, "recipe": recipe.as_dict(), **own}


def training_settings(model: Any, *validation: pd.DataFrame | None, texts: Texts | None = None) -> dict[str, Any]:
    """The same, and what is validated on, for a training: its starting weights say more than names of checkpoints.

    Texts that are loaded are known by their docnos and by their loader.
    """
    settings = settings_of(model, *[role for role in OF_THE_MODEL if role != "checkpoint"])
    settings["validation data"] = [frame_digest(frame) for frame in validation]
    if texts is not None and texts.loaded:
        settings["text loader"] = Identities().of(model.text_loader).told
    return settings


def _shown(value: Any) -> str:
    """An argument, alike in every process and however it was written."""
    if isinstance(value, Preselection):  # with what models it has by their weights, not by where they were loaded from
        told = json.dumps(_wherever(value.identity()), sort_keys=True, default=str)
        return f"{type(value).__name__} {blake2b(told.encode(), digest_size=16).hexdigest()}"
    if isinstance(value, Path):
        value = str(value)
    return described(tuple(value) if isinstance(value, list) else value)


def _wherever(told: Any) -> Any:
    """An identity without where, and how exactly, models compute: a training may go on elsewhere."""
    if not isinstance(told, dict):
        return told
    return {name: _wherever(value) for name, value in told.items() if name != "computed"}


def _warn_of_own_code(identity: dict[str, Any], folder: Path) -> None:
    own = own_code_in(identity)
    if own:
        warn(
            f"{str(folder)!r} was begun before; nobody can tell if with the same code of {', '.join(own)}. To train "
            f"afresh, delete it",
            UserWarning,
        )


def check_same(found: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Raises ValueError, naming what differs, if what was found in a folder belongs to another training."""
    expected = json.loads(_as_json(expected))
    different = [name for name in expected if found.get(name) != expected[name]]
    for whole in ("recipe", "arguments"):
        if whole in different:
            old, new = found.get(whole, {}), expected[whole]
            names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
            different[different.index(whole)] = f"{whole} ({', '.join(names)})"
    if different:
        anew = "make the model as it was made then to go on, " if "starting weights" in different else ""
        raise ValueError(
            f"the checkpoint folder {str(folder)!r} holds the state of another training: not the same are its "
            f"{', '.join(different)}; {anew}name another folder, or delete that one to start afresh"
        )


# Models in folders: a finished one is read again, an unfinished one goes on where it was.

MODEL, RUN, SELECTION, SETTINGS = "model", "run.res.gz", "selection.csv", "settings.json"
"""In the folder of a model: itself, what it made of its candidates or selected of them, and what it is made with."""
_FINISHED, _SCORED, _STATE = "finished.json", "scored.json", "state"


class TrainingData(NamedTuple):
    """What `fit` takes, in its order."""

    run: pd.DataFrame
    qrels: pd.DataFrame
    validation_run: pd.DataFrame | None = None
    validation_qrels: pd.DataFrame | None = None


def fit_or_load(
    model: Any,
    data: TrainingData,
    folder: Path | None,
    *,
    fit: Callable[[Any], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Fits a new model in place and saves it in the folder, or reads it if it is finished there already.

    A training that was killed goes on from its state in the folder; None writes nothing. `fit` trains the model by its
    recipe and with its checkpoint folder, where that is not its own `fit(*data)`; `about` is what else must be the same
    for a finished model to be this one.
    """
    if not hasattr(model, "fit"):
        raise TypeError(f"{model!r} has no fit: give an Estimator such as ld.MaxP(...)")
    if getattr(getattr(model, "training", None), "checkpoint", None) is not None:
        raise ValueError(
            "TrainingArgs(checkpoint=...) is for one training, and several begin here: leave it out; folder= keeps the "
            "state of each"
        )
    fit = fit or (lambda model: fit_further(model, *data))
    if folder is None:
        fit(model)
        return model
    _check_can_be_kept(model)
    # Judged documents that the recipe takes in belong, with their texts, to what must be the same.
    data = data._replace(run=model.training_candidates(data.run, data.qrels))
    identity = {**_identity(model, data), **(about or {})}
    finished = _read_json(folder / _FINISHED)
    if finished is not None:
        check_same(finished, identity, folder)
        _warn_of_own_code(identity, folder)
        return type(model).load(folder / MODEL, **arguments_of(model, "computing", "call"))
    for made in (_SCORED, SELECTION):
        (folder / made).unlink(missing_ok=True)
    before = model.training
    model.training = replace(model.recipe, checkpoint=folder / _STATE)
    try:
        fit(model)
    finally:
        model.training = before
    if is_first_process():
        model.save(folder / MODEL)
        _write_json(folder / _FINISHED, identity)  # last, so that it vouches for the model
        shutil.rmtree(folder / _STATE, ignore_errors=True)
    return model


def _check_can_be_kept(model: Any) -> None:
    if not hasattr(model, "save") or not hasattr(model, "training"):
        raise TypeError(f"folder= keeps models by their save, which {model!r} has not: leave folder= out")
    if model.trust_remote_code:
        raise ValueError("a model whose backbone runs remote code cannot be saved: leave folder= out")


def _identity(model: Any, data: TrainingData) -> dict[str, Any]:
    """What must be the same for a finished model to be this one."""
    return {
        **settings_of(model),
        "starting weights": fingerprint(model.load_scorer().state_dict()),
        "training data": [frame_digest(frame) for frame in data],
        "text loader": Identities().of(model.text_loader).told,
    }


def transform_or_read(model: Any, candidates: pd.DataFrame, folder: Path | None) -> pd.DataFrame:
    """`qid, query, docno, score, rank` of candidates by a model of `fit_or_load`, read if they are in its folder."""
    identity = {} if folder is None else {"candidates": frame_digest(candidates), "model": Identities().of(model).told}
    if folder is not None and _read_json(folder / _SCORED) == identity and not own_code_in(identity):
        scores = read_run(folder / RUN)["score"].to_numpy()
    else:
        out = model.transform(candidates)
        if not out[["qid", "docno"]].astype(str).equals(candidates[["qid", "docno"]].astype(str)):
            raise ValueError(f"{model!r} does not return the rows that it is given, in their order")
        scores = out["score"].to_numpy(dtype="float64")
        if folder is not None and is_first_process():
            write_run(candidates.assign(score=scores), folder / RUN, type(model).__name__)
            _write_json(folder / _SCORED, identity)
    return pt.model.add_ranks(candidates[["qid", "query", "docno"]].assign(score=scores))


def note_settings(settings: dict[str, Any], folder: Path) -> None:
    """Notes in a folder what its models are made with; raises ValueError if that was something else before."""
    before = _read_json(folder / SETTINGS)
    if before is not None:
        check_same(before, settings, folder)
    elif is_first_process():
        _write_json(folder / SETTINGS, settings)


def check_new(model: Any, others: Iterable[Any]) -> None:
    """Raises ValueError if a function has returned a model that it has returned before."""
    if any(model is other for other in others):
        raise ValueError(f"the function returned the same {model!r} twice: it must make a new model at each call")


def is_first_process() -> bool:
    """Whether this is the only process, or the first of several that train together."""
    return os.environ.get("RANK", "0") == "0"


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_lines(path, [_as_json(values, indent=1)])


def _as_json(values: dict[str, Any], **options: Any) -> str:
    return json.dumps(values, default=str, **options)
