"""Continue training after an interruption, and refuse folders of other trainings."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..common.arguments import OF_THE_MODEL, arguments_of
from ..common.files import claim, full_path, replacing, undamaged, write_lines
from ..common.frames import as_document, documents_of, field_names
from ..common.key import frame_digest, key
from ..modelling.weights import fingerprint
from .examples import TrainingSet, training_run
from .losses import LOSSES
from .processes import is_first_process
from .recipe import TrainingArgs

STATE_FILE = "training-state.safetensors"
_LENGTH = ("epochs", "max_steps", "patience")
"""Arguments of a recipe that can differ, because a training can be extended."""

_COMPUTED = ("computed",)
"""What descriptions say of the device, on which a training does not depend."""

_Tensors = dict[str, dict[str, torch.Tensor]]
"""Tensors by part (model, best weights, optimiser) and name."""


class ContinuedTrainingWarning(UserWarning):
    """`fit` was called on a trained model and continues from its weights."""


class StateFile:
    """The state of a training: a safetensors file with progress and key as JSON in its header."""

    def __init__(
        self, model: nn.Module, data: TrainingSet, recipe: TrainingArgs, settings: Mapping[str, Any], total_steps: int
    ) -> None:
        self.file, self.recipe, self.total_steps = Path(str(recipe.checkpoint)) / STATE_FILE, recipe, total_steps
        digests = []
        for group, texts in zip(data.groups, data.text_keys(), strict=True):
            digests.append(key([group.qid, group.query, texts, group.labels, group.targets]))
        about = {
            **settings,
            "recipe": {name: value for name, value in _contents(recipe).items() if name not in _LENGTH},
            "training data": digests,
            "starting weights": fingerprint(model.state_dict()),
            "trainable weights": sorted(name for name, value in model.named_parameters() if value.requires_grad),
        }
        self.key = key(about, without=_COMPUTED)

    def read(self) -> tuple[_Tensors, dict[str, Any]] | None:
        """Return the tensors and values of the state, if it exists; raise ValueError if it is from another training."""
        if not self.file.exists():
            return None
        tensors: _Tensors = defaultdict(dict)
        with undamaged(self.file, "delete it to start again", SafetensorError):
            with safe_open(self.file, framework="pt") as file:
                values = json.loads(file.metadata()["about"])
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    part, _, name = key.partition("/")
                    tensors[part][name] = file.get_tensor(key).clone()  # because the file will be replaced
            total, steps, patience = self.total_steps, values["total_steps"], values["patience"]
            check_same(values["key"], self.key, self.file.parent)
        if total < steps or (self.recipe.patience or inf) < (patience or inf):
            lengths = ((steps, patience), (total, self.recipe.patience))
            old, new = (f"{n} steps with patience={p}" for n, p in lengths)
            raise ValueError(f"{str(self.file.parent)!r} holds a longer training ({old}) than the new one ({new})")
        return tensors, values

    def write(self, tensors: _Tensors, values: dict[str, Any]) -> None:
        """Write the state; the file replaces the previous one once it is completely on disk."""
        parts = ((f"{part}/{name}", tensor) for part, group in tensors.items() for name, tensor in group.items())
        flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in parts}
        length = {"total_steps": self.total_steps, "patience": self.recipe.patience}
        about = json.dumps({**values, **length, "key": self.key}, default=str)
        with replacing(self.file) as part:
            save_file(flat, part, metadata={"about": about})


# Identity of a training.


def training_settings(model: Any, *data: pd.DataFrame | None) -> dict[str, Any]:
    """Return class, recipe and arguments of a model, and digests of its data.

    The name of the checkpoint is left out, because the starting weights are compared, and the text loader, because the
    texts are.
    """
    return {
        "class": type(model),
        "arguments": arguments_of(model, *[role for role in OF_THE_MODEL if role != "checkpoint"]),
        "head": type(model.model.head),
        "scorer": None if isinstance(model.backbone, str | Path) else model.backbone,
        "recipe": _contents(model.recipe),
        "data": [None if frame is None else frame_digest(frame) for frame in data],
        "loaded texts": [_loaded_texts(model, frame) for frame in data if frame is not None and "query" in frame],
    }


def _loaded_texts(model: Any, frame: pd.DataFrame) -> list[str]:
    """Return digests of the texts that a text loader supplies for a frame, of blocks of rows."""
    if set(field_names(model.text_field)) <= set(frame.columns):
        return []
    blocks = (frame.iloc[start : start + 4096] for start in range(0, len(frame), 4096))
    read = (documents_of(block, model.text_field, model.repeat, model.text_loader) for block in blocks)
    return [frame_digest(pd.DataFrame([asdict(as_document(text)) for text in texts])) for texts in read]


def _contents(recipe: TrainingArgs) -> dict[str, Any]:
    """Return the arguments of a recipe with their functions, which count by their code."""
    return {**recipe.as_dict(), "augment": recipe.augment, "loss": [recipe.loss, LOSSES[recipe.loss].compute]}


def check_same(stored: str | None, expected: str, folder: Path) -> None:
    """Refuse a folder of another training."""
    if stored != expected:
        raise ValueError(
            f"{str(folder)!r} holds another training, with another model, recipe, data or other starting weights: "
            f"create the model as before, or use another folder"
        )


# Models in folders: finished ones are read, unfinished ones continue.

MODEL, FINISHED = "model", "finished.json"
"""Names in the folder of a model: the model, and the key of its finished training."""
_STATE = "state"


class TrainingData(NamedTuple):
    """The arguments of `fit`, in order."""

    run: pd.DataFrame
    qrels: pd.DataFrame
    validation_run: pd.DataFrame | None = None
    validation_qrels: pd.DataFrame | None = None


def continue_fit(model: Any, *data: pd.DataFrame | None) -> None:
    """Fit a model without a `ContinuedTrainingWarning`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContinuedTrainingWarning)
        model.fit(*data)


def fit_or_load(
    model: Any,
    data: TrainingData,
    folder: str | Path | None,
    *,
    fit: Callable[[Any], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Fit a new model in place and save it in the folder, or read it from there if it is finished.

    After an interruption, training continues from its state in the folder; None writes nothing. `fit` replaces the
    model's `fit(*data)`. A finished model is only read if its training had the same arguments, data and `about`.
    """
    if getattr(getattr(model, "training", None), "checkpoint", None) is not None:
        raise ValueError("TrainingArgs(checkpoint=) is for a single training: use folder= instead")
    fit = fit or (lambda model: continue_fit(model, *data))
    if folder is None:
        fit(model)
        return model
    if not hasattr(model, "save") or model.trust_remote_code:
        raise ValueError(f"folder= needs models that can be saved, which {model!r} cannot: leave folder= out")
    folder = Path(full_path(folder))
    claim(folder)
    # Judged documents added by the recipe must be the same too, with their texts.
    data = data._replace(run=training_run(model, data.run, data.qrels))
    start = {"starting weights": fingerprint(model.model.state_dict())}
    current_key = key({**training_settings(model, *data), **start, **(about or {})}, without=_COMPUTED)
    if (folder / FINISHED).is_file():
        with undamaged(folder / FINISHED, "delete it to train again"):
            check_same(json.loads((folder / FINISHED).read_text("utf-8")), current_key, folder)
        return type(model).load(folder / MODEL, **arguments_of(model, "computing", "call"))
    old_recipe = model.training
    model.training = replace(model.recipe, checkpoint=folder / _STATE)
    try:
        fit(model)
    finally:
        model.training = old_recipe
    if is_first_process():
        model.save(folder / MODEL)
        write_lines(folder / FINISHED, [json.dumps(current_key)])  # written last, when the model is complete
        shutil.rmtree(folder / _STATE, ignore_errors=True)
    return model


def check_new(model: Any, models: Iterable[Any]) -> None:
    """Refuse a model that a function already returned, because its training would continue the earlier one."""
    if any(model is old_model for old_model in models):
        raise ValueError(f"the function returned the same {model!r} twice: it must create a new model in each call")
