"""A reranker as a checkpoint and back: its class, its arguments, its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .checkpoint import load_pretrained, read_config, save_pretrained
from .weights import Weights
from .windows import windows_from_config, windows_to_config


def save_reranker(model: Any, weights: Weights, folder: str | Path) -> None:
    """Writes a reranker's checkpoint.

    Args:
        model: the transformer.
        weights: its weights, which fit its arguments.
        folder: made if need be.
    """
    parameters = {k: v for k, v in model._parameters().items() if k not in model._runtime}
    parameters = {k: str(v) if isinstance(v, Path) else v for k, v in parameters.items()}
    if model.windows is not None:
        parameters["windows"] = windows_to_config(model.windows)
    training = None
    if weights.history:
        training = {"args": (model.training or model._default_training()).as_dict(), "history": weights.history}
    save_pretrained(
        folder,
        weights.scorer,
        weights.backbone,
        name=type(model).__name__,
        parameters=parameters,
        head={
            "name": weights.head[0],
            "options": weights.head[1],
            "built_from": weights.scorer.head.built_from(),
            "ready": weights.ready,
        },
        training=training,
    )


def load_reranker(
    cls: type, base: type, name: str | Path, *, revision: str | None = None, parameters: dict[str, Any]
) -> Any:
    """Restores a reranker from its checkpoint.

    Args:
        cls: the class that is asked for.
        base: the class of all rerankers, which may ask for any.
        name: a folder, or a model on the Hugging Face hub.
        revision: branch, tag or commit on the hub.
        parameters: constructor arguments to change.

    Raises:
        ValueError: if that is not a model saved by this package, or one of another class.
    """
    folder, config = read_config(name, revision=revision)
    known = {c.__name__: c for c in _all_classes(base)}
    saved: Any = known.get(config["class"])
    if saved is None:
        raise ValueError(f"{str(name)!r} holds a {config['class']!r}; known are {', '.join(sorted(known))}")
    if saved is not cls and saved not in _accepted(cls, base):
        raise ValueError(f"{str(name)!r} holds a {saved.__name__}, not a {cls.__name__}: use {saved.__name__}.load")
    arguments = dict(config["parameters"])
    if "windows" in arguments:
        arguments["windows"] = windows_from_config(arguments["windows"])
    for argument in ("text_field", "answers"):
        if isinstance(arguments.get(argument), list):
            arguments[argument] = tuple(arguments[argument])
    model = saved(**{**arguments, **parameters})
    scorer, backbone = load_pretrained(folder, config, saved._scorer_class)
    # What the weights were made for, whatever `parameters` ask for: the first transform compares the two.
    made_for = saved(**{**arguments, "trust_remote_code": model.trust_remote_code})._made_for()
    head = (config["head"]["name"], config["head"]["options"])
    training = folder / "training.json"
    history = json.loads(training.read_text(encoding="utf-8"))["history"] if training.is_file() else []
    ready = config["head"]["ready"]
    model._loaded = Weights(scorer, backbone, made_for, head, ready, trained=True, history=history)
    return model


def _accepted(cls: type, base: type) -> list[type]:
    """Subclasses that a checkpoint for `cls` may name: all of the base class, else users' own.

    That SumP is written as a MaxP with another head does not make its checkpoints MaxPs.
    """
    ours = f"{__package__}."
    return [c for c in _all_classes(cls) if cls is base or not c.__module__.startswith(ours)]


def _all_classes(cls: Any) -> list[type]:
    return [c for child in cls.__subclasses__() for c in (child, *_all_classes(child))]
