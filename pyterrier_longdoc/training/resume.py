"""Trainings that continue after a kill, and trained models in folders: is it the one that is asked for?"""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ..common.arguments import OF_THE_MODEL, Role, arguments_of
from ..common.files import replacing, write_lines
from ..common.presentation import described
from ..common.registry import own_code, own_code_in
from ..common.runs import frame_digest
from ..common.warnings import warn
from ..modelling.weights import fingerprint
from .examples import TrainingSet, training_run
from .losses import LOSSES
from .processes import is_first_process
from .recipe import TrainingArgs

STATE_FILE = "training-state.safetensors"
_LENGTH = ("epochs", "max_steps", "patience")
"""What may differ in a recipe: a training can be made longer."""

_Tensors = dict[str, dict[str, torch.Tensor]]
"""Tensors by name by part: of the model, its best weights, the optimiser."""


class ContinuedTrainingWarning(UserWarning):
    """`fit` of a model that is trained already goes on from its weights."""


class StateFile:
    """The state of a training: one safetensors file, replaced as a whole, with JSON and who it is in its header."""

    def __init__(
        self, model: nn.Module, data: TrainingSet, recipe: TrainingArgs, settings: Mapping[str, Any], total_steps: int
    ) -> None:
        self.file, self.recipe, self.total_steps = Path(str(recipe.checkpoint)) / STATE_FILE, recipe, total_steps
        digest = 0
        for group in data.groups:
            numbers = [None if own is None else tuple(own.tolist()) for own in (group.labels, group.targets)]
            digest = zlib.crc32(repr((group.qid, group.query, data.told(group.rows), *numbers)).encode(), digest)
        self.identity: dict[str, Any] = {
            **settings,
            "recipe": {name: value for name, value in recipe.as_dict().items() if name not in _LENGTH},
            "training data": digest,
            "starting weights": fingerprint(model.state_dict()),
            "trainable weights": sorted(name for name, value in model.named_parameters() if value.requires_grad),
        }

    def read(self) -> tuple[_Tensors, dict[str, Any]] | None:
        """Return the tensors and values of the state, if there is one; it stays as it is where it cannot be used."""
        if not self.file.exists():
            return None
        tensors: _Tensors = defaultdict(dict)
        with safe_open(self.file, framework="pt") as file:
            values = json.loads(file.metadata()["about"])
            for key in file.keys():  # noqa: SIM118 - no mapping
                part, _, name = key.partition("/")
                tensors[part][name] = file.get_tensor(key).clone()  # the file is replaced
        check_same(values["identity"], self.identity, self.file.parent)
        total, steps, patience = self.total_steps, values["total_steps"], values["patience"]
        if total < steps or (self.recipe.patience or inf) < (patience or inf):
            held, asked = (
                f"{n} steps with patience={p}" for n, p in ((steps, patience), (total, self.recipe.patience))
            )
            raise ValueError(f"{str(self.file.parent)!r} holds a longer training ({held}) than asked for ({asked})")
        return tensors, values

    def write(self, tensors: _Tensors, values: dict[str, Any]) -> None:
        """Write the state in place of the last one, which stays untouched until this one is complete on disk."""
        parts = ((f"{part}/{name}", tensor) for part, named in tensors.items() for name, tensor in named.items())
        flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in parts}
        length = {"total_steps": self.total_steps, "patience": self.recipe.patience}
        about = _as_json({**values, **length, "identity": self.identity})
        with replacing(self.file, only_writer=True) as part:
            save_file(flat, part, metadata={"about": about})


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what an optimiser knows of each parameter, as `NAME/QUANTITY`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = optimizer.state.items()
    return {f"{names[id(p)]}/{what}": value for p, state in states for what, value in state.items()}


# What must be the same.


def settings_of(model: Any, *roles: Role) -> dict[str, Any]:
    """Return class, recipe and arguments of a model: those of the roles, or all that decide about its scores."""
    given, recipe = arguments_of(model, *(roles or OF_THE_MODEL)), model.recipe
    arguments = {name: _told(value) for name, value in given.items()}
    own = own_code(None, model, *given.values(), recipe, LOSSES[recipe.loss].compute)
    return {"class": type(model).__name__, "arguments": arguments, "recipe": recipe.as_dict(), **own}


def training_settings(model: Any, *validation: pd.DataFrame | None) -> dict[str, Any]:
    """Return the same and what is validated on, for a training: its starting weights say more than a checkpoint's name.

    Texts that are loaded are known by their docnos and the name of their loader.
    """
    settings = settings_of(model, *[role for role in OF_THE_MODEL if role != "checkpoint"])
    return {**settings, "validation data": _digests(validation), "text loader": described(model.text_loader)}


def _digests(frames: Iterable[pd.DataFrame | None]) -> list[str | None]:
    return [None if frame is None else frame_digest(frame) for frame in frames]


def _told(value: Any) -> str:
    """Return an argument as text, alike in every process and however it was written."""
    if hasattr(value, "identity") and not isinstance(value, type):
        # With the weights of a selecting model, whatever it is called and wherever it computes.
        told = json.dumps(_wherever(value.identity()), sort_keys=True, default=str)
        return f"{type(value).__name__} {blake2b(told.encode(), digest_size=16).hexdigest()}"
    if isinstance(value, Path):
        value = str(value)
    return described(tuple(value) if isinstance(value, list) else value)


def _wherever(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    return {name: _wherever(value) for name, value in told.items() if name != "computed"}


def check_same(found: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Refuse what was found in a folder if it is of another training; warn if nobody can tell."""
    expected = json.loads(_as_json(expected))
    different = []
    for name, new in expected.items():
        old = found.get(name)
        if old != new and isinstance(old, dict) and isinstance(new, dict):
            different += [f"{name} {key}" for key in {**old, **new} if old.get(key) != new.get(key)]
        elif old != new:
            different.append(name)
    if different:
        other = ", ".join(different)
        raise ValueError(f"{str(folder)!r} holds another training, with other {other}: name another folder")
    own = own_code_in(expected)
    if own:
        code = f"nobody can tell if with the same code of {', '.join(own)}"
        warn(f"{str(folder)!r} was begun before; {code}. To train afresh, delete it", UserWarning)


# Models in folders: a finished one is read again, an unfinished one goes on where it was.

MODEL, FINISHED, SETTINGS = "model", "finished.json", "settings.json"
"""In the folder of a model: itself, which training it has finished, and what models of a folder are made with."""
_STATE = "state"


class TrainingData(NamedTuple):
    """What `fit` takes, in its order."""

    run: pd.DataFrame
    qrels: pd.DataFrame
    validation_run: pd.DataFrame | None = None
    validation_qrels: pd.DataFrame | None = None


def fit_further(model: Any, *data: pd.DataFrame | None) -> None:
    """`fit` where it is known that a trained model goes on from its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContinuedTrainingWarning)
        model.fit(*data)


def fit_or_load(
    model: Any,
    data: TrainingData,
    folder: Path | None,
    *,
    fit: Callable[[Any], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Fit a new model in place and save it in the folder, or read it if it is finished there already.

    A training that was killed goes on from its state in the folder; None writes nothing. `fit` trains the model where
    that is not its own `fit(*data)`; `about` is what else must be the same for a finished model to be this one.
    """
    fit = fit or (lambda model: fit_further(model, *data))
    if folder is None:
        fit(model)
        return model
    if not hasattr(model, "save") or model.trust_remote_code:
        raise ValueError(f"folder= keeps models that can be saved, which {model!r} cannot: leave folder= out")
    # Judged documents that the recipe takes in belong, with their texts, to what must be the same.
    data = data._replace(run=training_run(model, data.run, data.qrels))
    weights = fingerprint(model.model.state_dict())
    identity = {
        **settings_of(model),
        "text loader": described(model.text_loader),
        "starting weights": weights,
        "training data": _digests(data),
        **(about or {}),
    }
    if (folder / FINISHED).is_file():
        check_same(_read_json(folder / FINISHED), identity, folder)
        return type(model).load(folder / MODEL, **arguments_of(model, "computing", "call"))
    before = model.training
    model.training = replace(model.recipe, checkpoint=folder / _STATE)
    try:
        fit(model)
    finally:
        model.training = before
    if is_first_process():
        model.save(folder / MODEL)
        _write_json(folder / FINISHED, identity)  # last, so that it vouches for the model
        shutil.rmtree(folder / _STATE, ignore_errors=True)
    return model


def note_settings(settings: dict[str, Any], folder: Path) -> None:
    """Note in a folder what its models are made with; refuse it if that was something else before."""
    if (folder / SETTINGS).is_file():
        check_same(_read_json(folder / SETTINGS), settings, folder)
    elif is_first_process():
        _write_json(folder / SETTINGS, settings)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_lines(path, [_as_json(values, indent=1)])


def check_new(model: Any, others: Iterable[Any]) -> None:
    """Refuse a model that a function has returned before: it would go on from what it has seen."""
    if any(model is other for other in others):
        raise ValueError(f"the function returned the same {model!r} twice: it must make a new model at each call")


def _as_json(values: dict[str, Any], **options: Any) -> str:
    return json.dumps(values, default=str, **options)
