"""What makes a run, told alike in every process: a saved run is read only if the same pipeline would make it.

A transformer answers for itself by a method `describe()`: a dict of all that its results depend on besides the input
(weights, settings); this package's do. PyTerrier's operators and plain stages are told by their class and arguments,
frames by their contents, transformers of other packages by what they show of themselves. Of a function nobody can tell
whether it does the same as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.presentation import described
from ..common.registry import OWN_CODE, own_code
from ..common.runs import frame_digest

NOT_FOUND = pt.inspect.TransformerAttribute.MISSING


class Identity(NamedTuple):
    """What is told of a pipeline."""

    told: Any  # for JSON
    unchecked: list[str]  # transformers of other packages, of which only what they show is compared
    functions: list[str]  # names of functions, which cannot be compared


def identify(pipeline: Any) -> Identity:
    """Return what tells a pipeline, or a part of one such as a text loader, from others."""
    found = Identity(None, [], [])
    told = json.loads(json.dumps(_tell(pipeline, found)))
    return Identity(told, list(dict.fromkeys(found.unchecked)), list(dict.fromkeys(found.functions)))


def _tell(value: Any, found: Identity) -> Any:
    """Return what tells a value from others, and note in `found` what cannot be told of its parts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, pd.DataFrame):
        return frame_digest(value)
    if isinstance(value, pd.Series | np.ndarray | np.generic):
        return frame_digest(pd.DataFrame({"": [np.asarray(value)]}))
    if isinstance(value, Mapping):
        return {str(key): _tell(each, found) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_tell(each, found) for each in value]
    if isinstance(value, type):
        return _qualified(value)
    return _tell_object(value, found)


def _tell_object(value: Any, found: Identity) -> Any:
    if callable(getattr(value, "describe", None)) and (isinstance(value, pt.Transformer) or _is_plain(type(value))):
        return _tell_itself(value, found)
    if isinstance(value, pt.Transformer):
        return _tell_stage(value, found)
    if is_dataclass(value):
        told = {f.name: _tell(getattr(value, f.name), found) for f in fields(value)}
        return {"class": _qualified(type(value)), **told, **own_code(value)}
    if callable(value):
        found.functions.append(getattr(value, "__qualname__", described(value)))
    elif not isinstance(value, Path | pt.datasets.Dataset):
        found.unchecked.append(described(value))
    return described(value)


def _tell_itself(value: Any, found: Identity) -> Any:
    """Return what a transformer describes itself by; one of another package may mean something else by `describe`."""
    try:
        told = value.describe()
    except ValueError:  # it says that it cannot
        told = None
    if not isinstance(told, Mapping):
        found.unchecked.append(described(value))
        return described(value)
    own = {} if OWN_CODE in told else own_code(value)
    # The text that a reranker loads is no setting of its own.
    loader = _tell(getattr(value, "text_loader", None), found)
    return {"transformer": _qualified(type(value)), **_tell(dict(told), found), **own, "text_loader": loader}


def _tell_stage(stage: pt.Transformer, found: Identity) -> Any:
    """Return class and arguments of a transformer, and what it shows of itself where these are not all."""
    try:
        attributes = pt.inspect.transformer_attributes(stage, strict=False)
    except (pt.inspect.InspectError, ValueError):
        attributes = []
    known = {attribute.name: attribute.value for attribute in attributes if attribute.value is not NOT_FOUND}
    if _is_plain(type(stage)):
        arguments = _tell(known, found)
    else:
        arguments = _tell(known, Identity(None, [], found.functions))
        found.unchecked.append(described(stage))
    told = {"transformer": _qualified(type(stage)), "arguments": arguments}
    if not _is_plain(type(stage)) or len(known) < max(1, len(attributes)):
        told["repr"] = described(stage)  # else the names of models in it would count
    return told


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Return the names of what differs between two identities, e.g. `"arguments.transformers.1.weights"`.

    A user's own code always does, as nobody can tell that it is the same.
    """
    if name.rpartition(".")[2] == OWN_CODE:
        return [f"{name} ({', '.join(expected or found)})"]
    pairs: Mapping[Any, tuple[Any, Any]] | None = None
    if isinstance(found, dict) and isinstance(expected, dict):
        pairs = {key: (found.get(key), expected.get(key)) for key in {**expected, **found}}
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = dict(enumerate(zip(found, expected, strict=True)))
    if pairs is None:
        return [] if repr(found) == repr(expected) else [name or "all"]
    parts = [differences(a, b, f"{name}.{key}".lstrip(".")) for key, (a, b) in pairs.items()]
    return [each for part in parts for each in part]


def _is_plain(thing: type) -> bool:
    """Return whether a class is PyTerrier's or this package's, whose transformers are what their arguments say."""
    return thing.__module__.partition(".")[0] in ("pyterrier", "pyterrier_longdoc")


def _qualified(thing: type | Callable[..., Any]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
