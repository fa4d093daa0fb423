"""Keys: equal keys mean equal scores, and what cannot be identified has no key.

Objects of this package have a key, because they describe themselves by class, arguments and weights. Objects of other
packages have none: nothing is identified by its `repr`. A user's function or class counts by its module and name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .pipelines import stages_of

VERSION = 1
"""Part of every description of an object; increase it when the same arguments and weights give other scores."""


class NoKeyError(ValueError):
    """A value cannot be identified."""


def key(value: Any, *, without: Collection[str] = ()) -> str:
    """Return a hash of `description(value)`."""
    return blake2b(json.dumps(description(value, without=without), sort_keys=True).encode(), digest_size=16).hexdigest()


def description(value: Any, *, without: Collection[str] = ()) -> Any:
    """Return a JSON-able description of plain data, a function, a class, or an object of this package or a subclass.

    Functions and classes are described by their names, so a changed body is not noticed.

    Args:
        value: the value, or a list, dict and so on of values.
        without: names of dictionary entries to leave out.

    Raises:
        NoKeyError: for everything else, such as objects of other packages, lambdas, and what a function defines.
    """
    describe = partial(description, without=without)
    if value is None or isinstance(value, bool | int | float | str | Path):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, np.ndarray | np.generic):
        return describe(value.tolist())
    if isinstance(value, Mapping):
        items = ((name, item) for name, item in value.items() if name not in without)
        return {json.dumps(describe(name)): describe(item) for name, item in items}
    if isinstance(value, list | tuple):
        return list(map(describe, value))
    if isinstance(value, set | frozenset):
        return sorted(map(describe, value), key=json.dumps)
    if isinstance(value, type | FunctionType):
        if "<" in value.__qualname__:
            raise NoKeyError(f"{value.__qualname__} cannot be identified: define it at the top level of a module")
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return describe(["partial", value.func, value.args, value.keywords])
    if _has_key(value):
        return {"class": describe(type(value)), "version": VERSION, "described": describe(_parts(value))}
    raise NoKeyError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be identified")


def own_models(pipeline: pt.Transformer) -> list[Any]:
    """Return the transformers of this package in a pipeline that have a key, from first to last."""
    return [stage for stage in stages_of(pipeline) if _has_key(stage)]


def model_keys(pipeline: pt.Transformer, *, without: Collection[str] = ()) -> list[str | None]:
    """Return the keys of this package's models in a pipeline; None for one that cannot be identified."""
    keys: list[str | None] = []
    for model in own_models(pipeline):
        try:
            keys.append(key(model, without=without))
        except NoKeyError:
            keys.append(None)
    return keys


def frame_digest(frame: pd.DataFrame) -> str:
    """Return a hash of all columns of a frame: names, types and cells. The order of rows counts, that of columns not.

    Raises:
        NoKeyError: for a cell that is not plain data (text, number, None, list, dictionary, array).
    """
    digest = blake2b(digest_size=16)

    def add(content: bytes) -> None:
        digest.update(struct.pack("<q", len(content)) + content)

    for place in sorted(range(frame.shape[1]), key=lambda place: str(frame.columns[place])):
        column = frame.iloc[:, place]
        add(_cell(frame.columns[place]))
        add(str(column.dtype).encode())
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biufmM":
            add(column.to_numpy().tobytes())
            continue
        for value in column:
            try:
                add(_cell(value))
            except NoKeyError as error:
                raise NoKeyError(
                    f"the column {column.name!r} has cells without identity ({error}): drop or convert it"
                ) from None
    return digest.hexdigest()


def _cell(value: Any) -> bytes:
    """Return bytes that differ for different values."""
    if isinstance(value, str):
        return b"text" + value.encode("utf-8", "surrogatepass")
    if value is pd.NA:
        return b"missing"
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":  # vectors, for which JSON would be slow
        return f"array {value.dtype.str} {value.shape} ".encode() + value.tobytes()
    return b"json" + json.dumps(description(value), sort_keys=True).encode()


def _has_key(value: Any) -> bool:
    """Return whether it is an object of this package, or of a subclass, that describes itself."""
    is_ours = any(base.__module__.startswith("pyterrier_longdoc.") for base in type(value).__mro__)
    return is_ours and (hasattr(value, "describe") or is_dataclass(value))


def _parts(value: Any) -> Any:
    """Return what an object of this package says about itself: `describe()`, or the fields that affect scores."""
    if hasattr(value, "describe"):
        return value.describe()
    names = [f.name for f in fields(value) if f.metadata.get("role") not in ("computing", "call")]
    return {name: getattr(value, name) for name in names}
