"""What must be the same for a training to be continued, or for a kept model to be the one that is asked for."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pandas as pd
from torch import nn

from ..modelling.checkpoint import fingerprint
from .args import TrainingArgs
from .groups import Group
from .state import STATE_FILE

OF_THIS_MACHINE = (
    "text_loader", "device", "training", "verbose", "score_cache", "batch_size", "max_batch_tokens", "explain",
)  # fmt: skip
"""Constructor arguments on which neither the weights of a model nor its scores depend."""
_NOT_COMPARED = {*OF_THIS_MACHINE, "trust_remote_code"}
_CHECKPOINTS = {"backbone", "aggregator", "interaction"}
"""Arguments that name checkpoints, which may lie elsewhere on another machine."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Start:
    """How a training began.

    Attributes:
        folder: for its state.
        weights: fingerprint of the weights.
        entries: of the history, of earlier trainings.
    """

    folder: Path
    weights: str
    entries: int


_left: WeakKeyDictionary[nn.Module, tuple[Start, str]] = WeakKeyDictionary()
"""For the models that were trained in this process: how that began, and the fingerprint of the weights at its end."""


def settings_of(model: Any) -> dict[str, Any]:
    """Class and arguments of a model, for JSON, without what decides about neither weights nor scores."""
    arguments = {name: _shown(value) for name, value in model._parameters().items() if name not in _NOT_COMPARED}
    return {"class": type(model).__name__, "arguments": arguments}


def training_settings(model: Any, *validation: pd.DataFrame | None) -> dict[str, Any]:
    """The same for a training, whose starting weights say more than the names of checkpoints do.

    Args:
        model: the model.
        *validation: on what it is validated.
    """
    found = settings_of(model)
    arguments = {name: value for name, value in found["arguments"].items() if name not in _CHECKPOINTS}
    return {**found, "arguments": arguments, "validation data": [frame_digest(frame) for frame in validation]}


def recipe_notes(args: TrainingArgs) -> dict[str, Any]:
    """A recipe as JSON gives it back."""
    return json.loads(json.dumps(args.as_dict(), default=str))


def frame_digest(frame: pd.DataFrame | None) -> str | None:
    """Of the rows and columns that a training or a score may depend on; None of none."""
    if frame is None:
        return None
    digest = blake2b(digest_size=16)
    for name in sorted(set(map(str, frame.columns)) - {"rank"}):
        digest.update(f"{name}\0".encode())
        for value in frame[name].tolist():
            digest.update(f"{value}\0".encode("utf-8", "replace"))
    return digest.hexdigest()


def _shown(value: Any) -> str:
    """An argument, alike in every process and however it was written."""
    if isinstance(value, Path):
        value = str(value)
    return _ADDRESS.sub("", repr(tuple(value) if isinstance(value, list) else value))


def start_of(scorer: nn.Module, folder: Path, entries: int) -> Start:
    """How a training begins now, or began that has left the model as it is, and its state in the folder.

    Args:
        scorer: the model.
        folder: for the state.
        entries: of the history so far.
    """
    weights = fingerprint(scorer.state_dict())
    start, end = _left.get(scorer, (None, ""))
    if start is not None and (start.folder, end) == (folder, weights) and (folder / STATE_FILE).exists():
        return start
    return Start(folder, weights, entries)


def leave(scorer: nn.Module, start: Start) -> None:
    """Remembers how the training of a model began, for as long as the model has the weights of its end."""
    _left[scorer] = start, fingerprint(scorer.state_dict())


def training_identity(
    scorer: nn.Module, groups: Sequence[Group], args: TrainingArgs, settings: Mapping[str, Any], start: Start
) -> dict[str, Any]:
    """Model, recipe, data and starting weights of a training, JSON-able.

    Args:
        scorer: the model.
        groups: the training data.
        args: the recipe.
        settings: of `training_settings`; empty where there is no such model.
        start: how it began.
    """
    data = 0
    for group in groups:
        data = zlib.crc32(repr((group.qid, group.query, group.texts, group.labels, group.targets)).encode(), data)
    return {
        **json.loads(json.dumps(settings)),
        "recipe": recipe_notes(args),
        "training data": data,
        "starting weights": start.weights,
        "trainable weights": sorted(name for name, parameter in scorer.named_parameters() if parameter.requires_grad),
    }


def check_same(found: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Raises ValueError, naming what differs, if a state belongs to another training."""
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
