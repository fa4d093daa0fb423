"""Who makes a run: all that can be told about a pipeline, or about a function that makes one, alike in every process.

A transformer answers for itself by a method `describe()`: a dict of all that its results depend on besides the input
(weights, settings); this package's do. PyTerrier's operators and plain stages are told by their class and arguments,
frames and texts by their contents, functions by their code and the values that it names. What cannot be told is named,
never taken for equal in silence.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import frame_digest
from ..common.presentation import described
from ..common.registry import OWN_CODE, defined_in, is_ours, own_code

TRANSPARENT = ("pyterrier", "pyterrier_longdoc")
"""Packages whose transformers are what their arguments say, unless they describe themselves."""


class Identity(NamedTuple):
    """What is told of a system, JSON-able, and the names of what is not."""

    told: Any
    unchecked: list[str]


class Identities:
    """Tells who systems are; what it has looked at once it takes to stay the same, so that it is for one moment."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any, list[str]]] = {}  # with the object, so that no other gets its id
        self._unchecked: list[str] = []
        self._entered: set[int] = set()

    def of(self, system: Any) -> Identity:
        """The identity of a pipeline, a function that makes one, or any value that such a thing is made of."""
        self._unchecked = []
        told = json.loads(json.dumps(self._told(system)))
        return Identity(told, list(dict.fromkeys(self._unchecked)))

    def _told(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) in self._entered:  # a function that calls itself, say
            return described(type(value))
        if id(value) not in self._known:
            outer, self._unchecked = self._unchecked, []
            self._entered.add(id(value))
            try:
                told = self._look_at(value)
            finally:
                self._entered.discard(id(value))
                outer, self._unchecked = self._unchecked, outer
            self._known[id(value)] = value, told, outer
        _, told, unchecked = self._known[id(value)]
        self._unchecked += unchecked
        return told

    def _look_at(self, value: Any) -> Any:
        if isinstance(value, pd.DataFrame):
            return {"index": self._told(value.index.to_numpy()), "digest": frame_digest(value)}
        if isinstance(value, pd.Series):
            return {"index": self._told(value.index.to_numpy()), "values": self._told(value.to_numpy())}
        if isinstance(value, np.ndarray | np.generic):
            values = pd.DataFrame({"": pd.Series(list(np.ravel(value)), dtype=object)})
            return {"shape": list(np.shape(value)), "digest": frame_digest(values)}
        if isinstance(value, Path | types.ModuleType):
            return str(value) if isinstance(value, Path) else value.__name__
        if isinstance(value, list | tuple):
            return [self._told(each) for each in value]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self._told(each), sort_keys=True) for each in value)
        if isinstance(value, dict):
            return {key if isinstance(key, str) else described(key): self._told(each) for key, each in value.items()}
        return self._look_at_thing(value)

    def _look_at_thing(self, value: Any) -> Any:
        if isinstance(value, type):
            if not _is_transparent(value):
                self._unchecked.append(f"class {value.__qualname__}")
            return self._class(value)
        if _describes_itself(value):
            return self._by_itself(value)
        if isinstance(value, pt.Transformer):
            return self._stage(value)
        if isinstance(value, pt.datasets.Dataset):
            return described(value)
        if is_dataclass(value):
            told = {f.name: self._told(getattr(value, f.name)) for f in fields(value)}
            return {"class": _qualified(type(value)), **told, **own_code(value)}
        if callable(value):
            return self._function(value)
        self._unchecked.append(type(value).__name__)
        return described(value)

    def _by_itself(self, value: Any) -> Any:
        try:
            told = value.describe()
        except ValueError:  # it says that it cannot
            told = None
        if not isinstance(told, Mapping):  # of another package, it may mean something else
            self._unchecked.append(described(value))
            return described(value)
        # The text that a reranker loads is no setting of its own.
        loader = getattr(value, "text_loader", None)
        own = {} if OWN_CODE in told else own_code(value)
        transformer = {"transformer": _qualified(type(value)), **self._told(dict(told)), **own}
        return {**transformer, "text_loader": self._told(loader)}

    def _stage(self, stage: pt.Transformer) -> Any:
        """A transformer by its arguments; if these do not tell who it is, it is itself what is unchecked."""
        arguments: dict[str, Any] = {}
        before, complete = len(self._unchecked), _is_transparent(type(stage))
        try:
            attributes = pt.inspect.transformer_attributes(stage, strict=False)
        except (pt.inspect.InspectError, ValueError):
            attributes, complete = [], False
            self._unchecked.append(described(stage))
        for attribute in attributes:
            if attribute.value is not pt.inspect.TransformerAttribute.MISSING:
                arguments[attribute.name] = self._told(attribute.value)
                continue
            complete = False
            if attribute.init_parameter_kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                self._unchecked.append(attribute.name)
        told = {"transformer": _qualified(type(stage)), "arguments": arguments}
        if not complete:  # else the names of models in it would count, which are others for the same weights
            told["repr"] = described(stage)
        if not _is_transparent(type(stage)):
            del self._unchecked[before:]
            self._unchecked.append(described(stage))
        elif len(self._unchecked) > before and not list(stages_below(stage)):
            self._unchecked[before:] = [described(stage)]
        return told

    def _function(self, function: Any) -> Any:
        if isinstance(function, partial):
            arguments = [self._told(function.args), self._told(function.keywords)]
            recipes = _recipes([*function.args, *function.keywords.values()])
            return {"function": self._told(function.func), "arguments": arguments, **recipes}
        if isinstance(function, types.MethodType):
            return {"function": self._told(function.__func__), "of": self._told(function.__self__)}
        if not isinstance(function, types.FunctionType):
            # Of functools.cache, say; a decorator written in Python has code of its own.
            if hasattr(function, "__wrapped__"):
                return self._told(function.__wrapped__)
            self._unchecked.append(f"function {getattr(function, '__qualname__', described(function))}")
            return described(function)
        if not _is_transparent(function):
            self._unchecked.append(f"function {function.__qualname__}")
        around, of_module = list(values_around(function)), list(values_of_module(function))
        recipes = _recipes(value for _, value in [*around, *of_module])
        names = {name: self._named(name, value) for name, value in around}
        for name, value in of_module:
            is_library = isinstance(value, types.FunctionType) and value.__module__ != function.__module__
            names[name] = code_digest(value.__code__) if is_library else self._named(name, value)
        code, defaults = code_digest(function.__code__), [function.__defaults__, function.__kwdefaults__]
        told = {"function": _qualified(function), "code": code, "defaults": self._told(defaults), "names": names}
        return {**told, **recipes}

    def _class(self, cls: type) -> Any:
        """A class that is named; of a user's own ones those that are made of this package's cannot be told."""
        if not is_ours(cls) or not defined_in(cls):
            return _qualified(cls)
        describe = getattr(cls, "describe", None)
        vouches = describe is not None and defined_in(describe)
        told = {"describe": self._told(describe)} if vouches else {OWN_CODE: [cls.__qualname__]}
        return {"class": _qualified(cls), **told}

    def _named(self, name: str, value: Any) -> Any:
        """A value that the code of a function names."""
        if isinstance(value, types.ModuleType | type):
            return self._class(value) if isinstance(value, type) else value.__name__
        if isinstance(value, list | dict | set) and not (value and is_plain(value)):
            # Where functions note what they have made, which does not tell what they will make; at first it is empty.
            self._unchecked.append(name)
            return described(type(value))
        return self._told(value)


def stages_below(stage: pt.Transformer) -> Iterator[pt.Transformer]:
    """The transformers that a pipeline or operator is put together of, itself left out."""
    try:
        below = pt.inspect.subtransformers(stage)
    except (pt.inspect.InspectError, ValueError):
        return
    for value in below.values():
        yield from value if isinstance(value, Sequence) else [value]


def stages_of(pipeline: pt.Transformer) -> Iterator[pt.Transformer]:
    """A pipeline and all transformers in it."""
    yield pipeline
    for stage in stages_below(pipeline):
        yield from stages_of(stage)


def _recipes(values: Iterable[Any]) -> dict[str, Any]:
    """How a function would train the models that it names, of which `describe` says nothing."""
    stages = (stage for value in values if isinstance(value, pt.Transformer) for stage in stages_of(value))
    recipes = [{**stage.recipe.as_dict(), **own_code(stage.recipe)} for stage in stages if hasattr(stage, "recipe")]
    return {"recipes": recipes} if recipes else {}


def values_around(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that a function takes from the functions around it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet set
            continue


def values_of_module(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values of its module that a function names."""
    for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def code_digest(code: types.CodeType) -> str:
    """Of what the code does: not of its place in a file."""

    def told(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            names = [value.co_names, value.co_varnames, value.co_freevars]
            return [value.co_code.hex(), *names, [told(constant) for constant in value.co_consts]]
        return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)

    return blake2b(json.dumps(told(code)).encode(), digest_size=16).hexdigest()


def is_plain(value: Any) -> bool:
    """Whether a value consists of nothing but numbers, strings and settings."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    plain = value is None or isinstance(value, bool | int | float | str | Path)
    return plain or (is_dataclass(value) and not isinstance(value, type | pt.Transformer))


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """The names of what differs between two told identities, e.g. `"arguments.transformers.1.weights"`.

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


def _describes_itself(value: Any) -> bool:
    may = isinstance(value, pt.Transformer) or _is_transparent(type(value))
    return may and callable(getattr(value, "describe", None))


def _is_transparent(thing: type | Callable[..., Any]) -> bool:
    return str(thing.__module__).partition(".")[0] in TRANSPARENT


def _qualified(thing: type | Callable[..., Any]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
