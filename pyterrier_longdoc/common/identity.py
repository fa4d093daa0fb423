"""Describe a pipeline, or an argument, so that another process can tell whether it is the same.

A transformer describes itself by `describe()`, a dict of all that its results depend on besides the input (weights,
settings); this package's do. PyTerrier's operators and plain stages are described by class and arguments, indices by
what their files say, other Java objects by their class, frames by their contents, transformers of other packages by
their attributes and `repr`. Functions, and indices in memory, cannot be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from .arguments import arguments_of
from .indices import BUILT, NOT_ON_DISK, is_java, is_terriers, terriers_properties, time_of_building
from .presentation import described
from .registry import OWN_CODE, own_code
from .runs import frame_digest

NOT_FOUND = pt.inspect.TransformerAttribute.MISSING


class Identity(NamedTuple):
    """The description of a pipeline."""

    description: Any  # for JSON
    unchecked: list[str]  # transformers of other packages: only their attributes and `repr` are compared
    functions: list[str]  # names of functions and indices in memory, which cannot be compared


def identify(pipeline: Any) -> Identity:
    """Return the identity of a pipeline, or of a part of one such as a text loader."""
    identity = Identity(None, [], [])
    description = json.loads(json.dumps(_describe(pipeline, identity)))
    return Identity(description, list(dict.fromkeys(identity.unchecked)), list(dict.fromkeys(identity.functions)))


def _describe(value: Any, identity: Identity) -> Any:
    """Return the description of a value, and add to `identity` the parts that cannot be compared."""
    if value is None or isinstance(value, bool | int | float | str | Path):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, pd.DataFrame):
        return frame_digest(value.reset_index(allow_duplicates=True))
    if isinstance(value, pd.Series):
        return _describe([value.index.to_numpy(), value.to_numpy()], identity)
    if isinstance(value, np.ndarray | np.generic):
        return frame_digest(pd.DataFrame({"": [np.asarray(value)]}))
    if isinstance(value, Mapping):
        return {str(key): _describe(item, identity) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(item, identity) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_describe(item, identity) for item in value), key=repr)
    if isinstance(value, type):
        return _qualified_name(value)
    return _describe_object(value, identity)


def _describe_object(value: Any, identity: Identity) -> Any:
    if is_terriers(value):
        return _describe_terriers(value, identity)
    if is_java(value) or isinstance(value, Enum):
        return value.name if isinstance(value, Enum) else type(value).__name__
    if callable(getattr(value, "describe", None)) and (isinstance(value, pt.Transformer) or _is_plain(type(value))):
        return _describe_by_method(value, identity)
    if isinstance(value, pt.Transformer):
        return _describe_stage(value, identity)
    if hasattr(value, "identity"):
        return _describe({"class": type(value), **value.identity(), **own_code(value)}, identity)
    if is_dataclass(value):
        description = {f.name: _describe(getattr(value, f.name), identity) for f in fields(value)}
        return {"class": _qualified_name(type(value)), **description, **own_code(value)}
    function = getattr(value, "fn", value)  # PyTerrier hands it to Java so
    if callable(function):
        identity.functions.append(getattr(function, "__qualname__", described(function)))
    elif not isinstance(value, pt.datasets.Dataset):
        identity.unchecked.append(described(value))
    return described(value)


def _describe_by_method(value: Any, identity: Identity) -> Any:
    """Return a transformer's own description; another package may mean something else by `describe`."""
    try:
        description = value.describe()
    except ValueError:  # it cannot be described
        description = None
    if not isinstance(description, Mapping):
        code = own_code(value, *(arguments_of(value, "checkpoint").values() if is_dataclass(value) else ()))
        identity.unchecked.extend([] if code else [described(value)])
        return {"repr": described(value), **code}
    code = {} if OWN_CODE in description else own_code(value)
    settings = {"transformer": _qualified_name(type(value)), **_describe(dict(description), identity), **code}
    if isinstance(value, pt.Transformer):  # the text loader is no setting, but its text decides the scores
        settings["text_loader"] = _describe(getattr(value, "text_loader", None), identity)
    return settings


def _describe_terriers(index: Any, identity: Identity) -> Any:
    """Return what the index's file says; of an index without a file as little is known as of a function."""
    properties = terriers_properties(index)
    if properties is None:
        identity.functions.append(NOT_ON_DISK)
    return properties or NOT_ON_DISK


def _describe_stage(stage: pt.Transformer, identity: Identity) -> Any:
    """Return class and arguments of a transformer, and its `repr` where these are not all."""
    is_plain = _is_plain(type(stage))
    if is_plain and any(cls.__module__.startswith("pyterrier.terrier.") for cls in type(stage).__mro__):
        return {"transformer": _qualified_name(type(stage)), **_describe(_attributes_of_terriers(stage), identity)}
    try:
        attributes = pt.inspect.transformer_attributes(stage, strict=False)
    except (pt.inspect.InspectError, ValueError):
        attributes = []
    values = {attribute.name: attribute.value for attribute in attributes if attribute.value is not NOT_FOUND}
    arguments = _describe(values, identity if is_plain else Identity(None, [], identity.functions))
    identity.unchecked.extend([] if is_plain else [described(stage)])
    description = {"transformer": _qualified_name(type(stage)), "arguments": arguments}
    if isinstance(stage, pt.Artifact) and isinstance(stage, pt.Indexer):
        description |= time_of_building(stage)
    if not is_plain or len(values) < max(1, len(attributes)):
        description["repr"] = described(stage)  # else the names of models in it would count
    return description


def _attributes_of_terriers(stage: pt.Transformer) -> dict[str, Any]:
    """Return all attributes of a transformer of Terrier's: constructors pass some of their arguments on unseen."""
    values = {name.lstrip("_"): value for name, value in vars(stage).items()}
    if isinstance(stage, pt.terrier.TextScorer):  # when it scores, it adds two controls that the rest implies
        implied = {"termpipelines", "decorate_batch"}
        controls = {k: v for k, v in stage.kwargs.get("controls", {}).items() if k not in implied}
        values["kwargs"] = {**stage.kwargs, "controls": controls}
    return values


def differences(saved: Any, current: Any, name: str = "") -> list[str]:
    """Return the names of the differences between two descriptions, e.g. `"arguments.transformers.1.weights"`.

    A user's own code always differs, as it cannot be compared.
    """
    if name.rpartition(".")[2] == OWN_CODE:
        return [f"{name} ({', '.join(current or saved)})"]
    pairs: Mapping[Any, tuple[Any, Any]] | None = None
    if isinstance(saved, dict) and isinstance(current, dict):
        pairs = {key: (saved.get(key), current.get(key)) for key in {**current, **saved}}
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        pairs = dict(enumerate(zip(saved, current, strict=True)))
    if pairs is None:
        anew = " (the index was built anew)" if name.rpartition(".")[2] in BUILT else ""
        return [] if repr(saved) == repr(current) else [f"{name}{anew}" or "all"]
    parts = [differences(a, b, f"{name}.{key}".lstrip(".")) for key, (a, b) in pairs.items()]
    return [difference for part in parts for difference in part]


def _is_plain(cls: type) -> bool:
    """Return whether a class is PyTerrier's, PISA's or this package's: arguments describe a transformer fully."""
    return cls.__module__.partition(".")[0] in ("pyterrier", "pyterrier_pisa", "pyterrier_longdoc")


def _qualified_name(obj: type | Callable[..., Any]) -> str:
    return f"{obj.__module__}.{obj.__qualname__}"
