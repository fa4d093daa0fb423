"""Continue training after an interruption, and refuse folders of other trainings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..common.arguments import SAVED_ROLES, arguments_of
from ..common.files import replacing, undamaged
from ..common.key import frame_digest, key
from ..modelling.weights import fingerprint
from .examples import TrainingSet
from .recipe import TrainingArgs

STATE_FILE = "training-state.safetensors"
_LENGTH = ("epochs", "max_steps", "patience")
"""Arguments of a recipe that can differ, because a training can be extended."""

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
        contents, digests = {**recipe.as_dict(), "augment": recipe.augment}, []
        for group in data.groups:
            digests.append(key([group.qid, group.query, group.rows, group.labels, group.targets]))
        about = {
            **settings,
            "recipe": {name: value for name, value in contents.items() if name not in _LENGTH},
            "candidates": frame_digest(data.candidates),
            "groups": digests,
            "starting weights": fingerprint(model.state_dict()),
            "trainable weights": sorted(name for name, value in model.named_parameters() if value.requires_grad),
        }
        self.key = key(about, without=("computed",))  # a training does not depend on the device

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
            is_same = values["key"] == self.key
        if not is_same:
            raise ValueError(
                f"{str(self.file.parent)!r} belongs to another training: model, recipe, data or starting weights "
                f"differ; create the model as before, or use another folder"
            )
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


def training_settings(model: Any, *validation: pd.DataFrame | None) -> dict[str, Any]:
    """Return class and arguments of a model, and digests of its validation data.

    The name of the checkpoint is left out, because the starting weights are compared.

    Args:
        model: a reranker of this package.
        validation: the frames of the validation: candidates and qrels, or None.
    """
    return {
        "class": type(model),
        "arguments": arguments_of(model, *[role for role in SAVED_ROLES if role != "checkpoint"]),
        "head": type(model.model.head),
        "validation": [None if frame is None else frame_digest(frame) for frame in validation],
    }
