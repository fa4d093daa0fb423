"""Keys: equal keys mean equal scores, and what cannot be identified has no key.

Objects of this package have a key, because they describe themselves by class, arguments and weights. Objects of other
packages have none: nothing is identified by its `repr`.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType
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
    try:
        content = json.dumps(description(value, without=without), sort_keys=True)
    except RecursionError:
        raise NoKeyError("functions that call each other cannot be identified: define them in a module") from None
    return blake2b(content.encode(), digest_size=16).hexdigest()


def description(value: Any, *, without: Collection[str] = ()) -> Any:
    """Return a JSON-able description of plain data, an object of this package, or a user's function or class.

    Functions and classes of a user are described by qualified name, compiled code (so that another version of Python
    gives another key), and the values of enclosing functions that they use. What they call does not count.

    Args:
        value: the value, or a list, dict and so on of values.
        without: names of dictionary entries to leave out.

    Raises:
        NoKeyError: for everything else, such as objects of other packages.
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
    if _is_ours(type(value)) and _has_parts(value):
        return {"class": _code(type(value), describe), "version": VERSION, "described": describe(_parts(value))}
    raise NoKeyError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be identified")


def own_models(pipeline: pt.Transformer) -> list[Any]:
    """Return the transformers of this package in a pipeline that have a key, from first to last."""
    return [stage for stage in stages_of(pipeline) if _is_ours(type(stage)) and _has_parts(stage)]


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


def _is_ours(cls: type) -> bool:
    return any(base.__module__.startswith(_PACKAGE) for base in cls.__mro__)


def _has_parts(value: Any) -> bool:
    return hasattr(value, "describe") or is_dataclass(value)


def _parts(value: Any) -> Any:
    """Return what an object of this package says about itself: `describe()`, or the fields that affect scores."""
    if hasattr(value, "describe"):
        return value.describe()
    names = [f.name for f in fields(value) if f.metadata.get("role") not in ("computing", "call")]
    return {name: getattr(value, name) for name in names}


def _code(code: type | FunctionType, describe: Callable[[Any], Any]) -> Any:
    """Return the name of a function or class; for a user's, also what it computes, and with which values."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.startswith(_PACKAGE):
        return name
    if isinstance(code, FunctionType):
        return [name, *_function(code, describe)]
    known = {base for own in code.__mro__ if own.__module__.startswith(_PACKAGE) for base in own.__mro__}
    bases = [base for base in code.__bases__ if base not in known and base is not object]
    members = {name: _member(value, code, describe) for name, value in vars(code).items() if name not in _NOT_MEMBERS}
    return [name, describe(bases), members]


_NOT_MEMBERS = {
    *vars(type("_", (), {})), "__annotations__", "__annotate_func__", "__annotations_cache__", "__parameters__",
    "__orig_bases__", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__hash__", "__slots__",
    "__abstractmethods__", "_abc_impl",
}  # fmt: skip
"""Entries of a class that Python makes itself, or that repeat others."""


def _member(value: Any, owner: type, describe: Callable[[Any], Any]) -> Any:
    """Describe an attribute of a class: functions also within decorators, other values as they are."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    generated = ("<string>", dataclasses.__file__)  # methods of dataclasses
    described = []
    for part in parts:
        if isinstance(part, FunctionType):
            is_generated = part.__code__.co_filename in generated
            described.append(None if is_generated else _function(part, describe, owner))
        elif not isinstance(part, MemberDescriptorType):
            described.append(describe(part))
    return described


def _function(function: FunctionType, describe: Callable[[Any], Any], owner: type | None = None) -> list[Any]:
    """Return the compiled code of a function, and the values that it holds."""
    held = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            raise NoKeyError(f"{function.__qualname__} uses {name}, which has no value yet") from None
        if value is not function and value is not owner:  # a function that calls itself, a method with super()
            held.append([name, value])
    own = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return [_compiled(function.__code__), describe([held, function.__defaults__, function.__kwdefaults__, own])]


def _compiled(code: CodeType) -> Any:
    """Return the bytecode, names and constants of code: not its text, which Python may not find or read anew."""
    constants = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_compiled(value))
        else:
            constants.append(repr(sorted(value, key=repr) if isinstance(value, frozenset) else value))
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]
