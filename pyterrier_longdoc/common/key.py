"""Keys: equal keys mean equal scores, and what cannot be identified has no key.

Objects of this package have a key, because they describe themselves by class, arguments and weights. Objects of other
packages have none: nothing is identified by its `repr`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import linecache
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .runs import stages_of

VERSION = 1
"""Part of every description of an object; increase it when the same arguments and weights give other scores."""

_PACKAGE = "pyterrier_longdoc."


class NoKeyError(ValueError):
    """A value cannot be identified."""


def key(value: Any, *, without: Collection[str] = ()) -> str:
    """Return a hash of `description(value)`."""
    content = json.dumps(description(value, without=without), sort_keys=True)
    return blake2b(content.encode(), digest_size=16).hexdigest()


def description(value: Any, *, without: Collection[str] = ()) -> Any:
    """Return a JSON-able description of plain data, an object of this package, or a user's function or class.

    Functions and classes of a user are described by qualified name, source text, and the values of enclosing functions
    that they use. What they call does not count.

    Args:
        value: the value, or a list, dict and so on of values.
        without: names of dictionary entries to leave out.

    Raises:
        NoKeyError: for everything else, such as objects of other packages and functions without source text.
    """
    describe = partial(description, without=without)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
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
        return _code(value, describe)
    if isinstance(value, partial):
        return describe(["partial", value.func, value.args, value.keywords])
    if _is_ours(type(value)) and (hasattr(value, "describe") or is_dataclass(value)):
        return {"class": _code(type(value), describe), "version": VERSION, "described": describe(_parts(value))}
    raise NoKeyError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be identified")


def own_models(pipeline: pt.Transformer) -> list[Any]:
    """Return the transformers in a pipeline that describe themselves: this package's models, from first to last."""
    return [stage for stage in stages_of(pipeline) if _is_ours(type(stage)) and hasattr(stage, "describe")]


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
                raise NoKeyError(f"the column {column.name!r} has cells without identity: {error}") from None
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


def _is_ours(cls: type) -> bool:
    return any(base.__module__.startswith(_PACKAGE) for base in cls.__mro__)


def _parts(value: Any) -> Any:
    """Return what an object of this package says about itself: `describe()`, or the fields that affect scores."""
    if hasattr(value, "describe"):
        return value.describe()
    names = [f.name for f in fields(value) if f.metadata.get("role") not in ("computing", "call")]
    return {name: getattr(value, name) for name in names}


def _code(code: type | FunctionType, describe: Callable[[Any], Any]) -> Any:
    """Return the name of a function or class of this package; for a user's, also its source and enclosing values."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.startswith(_PACKAGE):
        return name
    functions, source, bases = _methods(code), _source(code), []
    if isinstance(code, type):
        known = {base for own in code.__mro__ if own.__module__.startswith(_PACKAGE) for base in own.__mro__}
        bases = [base for base in code.__bases__ if base not in known and base is not object]
    elif code.__name__ == "<lambda>" and source.count("lambda") > 1:
        raise NoKeyError(f"{name} cannot be told from another lambda of its line: define it with def")
    used = [
        [name, cell.cell_contents]
        for function in functions
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if cell.cell_contents is not code and name != "__class__"  # which a method with super() refers to
    ]
    defaults = [[function.__defaults__, function.__kwdefaults__] for function in functions]
    return [name, source, describe([used, defaults, bases])]


def _methods(code: type | FunctionType) -> list[FunctionType]:
    """Return a function, or those of a class without those that dataclasses generate."""
    values = vars(code).values() if isinstance(code, type) else [code]
    functions = [value for value in values if isinstance(value, FunctionType)]
    generated = ("<string>", dataclasses.__file__)
    return [function for function in functions if function.__code__.co_filename not in generated]


def _source(code: type | FunctionType) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        # Python does not find the source of a class in a notebook, but that of its methods: the text of the cell.
        files = {method.__code__.co_filename for method in _methods(code) if isinstance(code, type)}
        lines = [line for file in sorted(files) for line in linecache.getlines(file)]
        if not lines:
            raise NoKeyError(f"{code.__module__}.{code.__qualname__} has no source text to identify it") from None
        return "".join(lines)
