"""Rerankers on disk and on the hub: their arguments as JSON, beside the model's weights."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..common.arguments import SAVED_ROLES, arguments_of, changed_names
from ..common.files import replacing_files, undamaged
from ..common.presentation import HIDDEN
from ..common.registry import CLASSES, from_config, look_up, to_config
from ..common.warnings import warn
from ..modelling.compact import unpack
from ..modelling.heads import registered_heads
from ..modelling.model import Model
from ..modelling.preselection import FOLDER as PRESELECT_FOLDER
from ..modelling.preselection import preselection_from_config
from ..modelling.saved import (
    CONFIG_FILE,
    SAVE_AGAIN,
    TRAINING_FILE,
    check_replaceable,
    load_model,
    read_config,
    save_model,
)
from ..training import TrainedOn, TrainingArgs

WINDOW_ARGUMENTS = ("window_size", "stride", "max_windows", "selection")
"""Arguments that `windows=` replaces."""

STALE_FILES = (PRESELECT_FOLDER, TRAINING_FILE)
"""What a save removes, because not every model has it."""


def config_of(reranker: Any) -> dict[str, Any]:
    """Return the arguments that define the model, JSON-able but for `preselect`, for `arguments_from`."""
    parameters = without_paths(arguments_of(reranker, *SAVED_ROLES))
    del parameters["trust_remote_code"]  # whoever loads a model decides that
    for name in ("windows", "layout", "template"):
        if is_dataclass(value := parameters.get(name)):
            parameters[name] = to_config(value)
    return parameters


def arguments_from(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments of a class that `config_of` described.

    Model folders are untrusted: ValueError if one sets an argument that is not of a model, such as a file to write.
    """
    roles = {f.name: f.metadata["role"] for f in fields(cls)}
    saved = {name: value for name, value in config.items() if name != "trust_remote_code"}  # no folder may set it
    if unknown := [name for name in saved if name not in roles and getattr(cls, name, saved) != saved[name]]:
        raise ValueError(f"the saved {cls.__name__} has the unknown arguments {', '.join(unknown)}")
    others = [name for name in roles if name in config and roles[name] not in SAVED_ROLES]
    if others:
        raise ValueError(
            f"the saved {cls.__name__} sets {', '.join(others)}, which only whoever loads it may do: delete it from "
            f"{CONFIG_FILE} and give it to load"
        )
    arguments: dict[str, Any] = {}
    for name, value in saved.items():
        if isinstance(value, dict) and name in CLASSES:
            cls_of_value, values = from_config(name, value)
            arguments[name] = cls_of_value(**values)
        else:
            arguments[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return {name: value for name, value in arguments.items() if name in roles}


def without_paths(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with paths as strings."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}


def write(reranker: Any, folder: Path, *, overwrite: bool = True) -> None:
    """Write a reranker into a folder, which is created if it does not exist.

    All is written before anything of an earlier model is replaced, so that this one survives a full disk. A kill while
    files are replaced leaves no `config.json`, without which `load` refuses the folder.

    Raises:
        ValueError: if the backbone uses remote code, which would be missing from the folder, or if the folder contains
            other files or, without `overwrite`, a model of another class, with another backbone or by a newer version.
        TypeError: for an external scorer, which has no weights.
    """
    reranker.require_weights("saved")
    if reranker.trust_remote_code:
        raise ValueError(
            "a model whose backbone runs remote code cannot be saved: this package does not store that code"
        )
    parameters = config_of(reranker)
    model = reranker.model
    if not overwrite:
        check_replaceable(folder, type(reranker), parameters["backbone"])
    with replacing_files(folder, last=CONFIG_FILE, old=STALE_FILES) as new:
        if reranker.preselect is not None:
            parameters["preselect"] = reranker.preselect.to_config(new)
        save_model(new, model, cls=type(reranker), parameters=parameters)


def note_source(reranker: Any, model: Model, name: str, revision: str | None = None) -> None:
    """Remember the name under which the weights can be loaded, and the arguments that are saved with them."""
    if model.is_trained:
        model.source = repr(name) + ("" if revision is None else f", revision={revision!r}")
        values = {name: repr(value) for name, value in arguments_of(reranker, *SAVED_ROLES).items()}
        values["training"] = repr(reranker.training)
        del values["trust_remote_code"]
        model.saved_arguments = values


def load_call(reranker: Any, model: Model) -> str:
    """Return the call of `load` that restores a saved model with its present arguments."""
    arguments = {name: value for name, value in arguments_of(reranker).items() if name not in HIDDEN}
    names = changed_names(reranker, arguments.keys() - model.saved_arguments.keys())
    names += [name for name, value in model.saved_arguments.items() if repr(arguments[name]) != value]
    changes = [f"{name}={arguments[name]!r}" for name in names]
    return f"{type(reranker).__name__}.load({', '.join([model.source, *changes])})"


def load(
    cls: Any, base_class: Any, name: str | Path, revision: str | None, changes: dict[str, Any]
) -> tuple[Any, Model]:
    """Return a saved reranker with some arguments changed, and its model.

    `cls` is the class whose `load` was called, `base_class` that of all rerankers that can be saved.
    """
    folder, config = read_config(name, revision=revision)
    with undamaged(folder / CONFIG_FILE, SAVE_AGAIN):
        saved_class, head = _saved_class(cls, base_class, str(name), config), config["head"]
        look_up(registered_heads(), f"{str(name)!r} needs the unknown head", head["name"], head.get("module"))
        parameters = dict(config["parameters"])
        preselect = parameters.pop("preselect", None)
        arguments = arguments_from(saved_class, parameters)
        if preselect is not None and "preselect" not in changes:
            arguments["preselect"] = preselection_from_config(preselect, folder)
        # The weights belong to the saved arguments: the first transform refuses changes of those that decide them.
        remote = {"trust_remote_code": changes.get("trust_remote_code", False)}
        original = saved_class(**{**arguments, "device": "cpu", **remote})
        if "compact" in config:
            model = original.model
            unpack(model, folder, config)
        else:
            parts = {"encoder": original.encoder_class, "weight_arguments": original.weight_arguments()}
            model = load_model(folder, config, original.make_settings(), **parts)
        model.origin = "fit" if head["ready"] else "random"
    original.training = _read_training(model, folder / TRAINING_FILE)
    note_source(original, model, str(name), revision)
    replaced = WINDOW_ARGUMENTS if changes.get("windows") is not None else ()
    kept = {name: value for name, value in arguments.items() if name not in replaced}
    return saved_class(**{**kept, "training": original.training, **changes}), model


def _read_training(model: Model, file: Path) -> TrainingArgs | None:
    """Read history, recipe and training queries of a model; return the recipe if it can be used again."""
    if not file.is_file():
        return None
    with undamaged(file, SAVE_AGAIN):
        record = json.loads(file.read_text(encoding="utf-8"))
        recipe, queries, model.history = record["args"], record["trained_on"], list(record["history"])
        model.recipe = None if recipe is None else dict(recipe)
        model.trained_on = None if queries is None else TrainedOn(**queries)
        model.trained_queries = frozenset(record.get("queries", ()))  # the packaged models have none
        if recipe is not None and recipe["augment"] is not None:
            warn(f"augment={recipe['augment']} of the recipe is not in {str(file)!r}: set it in training=", UserWarning)
        return None if recipe is None else TrainingArgs.from_dict(recipe)


def _saved_class(cls: Any, base_class: Any, model: str, config: dict[str, Any]) -> Any:
    """Return the class of a saved model; ValueError if `cls` may not restore it.

    A class restores its own models and those of users' subclasses; the base class restores all. SumP is a subclass of
    MaxP, but a saved SumP is no MaxP.
    """
    classes = {c.__name__: c for c in _subclasses(base_class) if c.head_name or c.head_spec is not base_class.head_spec}
    name = config["class"]
    saved_class = look_up(dict(sorted(classes.items())), f"{model!r} holds a", name, config.get("module"))
    is_users_class = issubclass(saved_class, cls) and not saved_class.__module__.startswith("pyterrier_longdoc.")
    if saved_class is not cls and cls is not base_class and not is_users_class:
        raise ValueError(f"{model!r} holds a {name}, not a {cls.__name__}: use {name}.load")
    return saved_class


def _subclasses(cls: Any) -> list[Any]:
    return [c for child in cls.__subclasses__() for c in (child, *_subclasses(child))]
