"""Keys decide what can be reused: two pipelines with the same key give the same results for the same input.

A key is a hash of class, arguments and weights. For a transformer with `describe()`, it is a hash of the returned
value, which has weights and settings in this package. The keys of other transformers depend on class, version of their
package and arguments, those of indices on their files, and those of frames on their contents. User code (lambdas,
functions inside functions, and everything defined in a script or notebook) has no key, because it may change unnoticed:
its results are always computed again.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .indices import is_java, is_terriers, terriers_properties
from .presentation import described
from .runs import frame_digest

_NOT_FOUND = pt.inspect.TransformerAttribute.MISSING


class UserCodeError(ValueError):
    """A value has no key, because it may change unnoticed."""


def key(value: Any, *, without: Collection[str] = (), user_code: list[str] | None = None) -> str:
    """Return a hash of everything except the input that the results of a pipeline, or a part of one, depend on.

    Args:
        value: the pipeline or part, or a list or dict of these.
        without: names of arguments and parts of descriptions to ignore.
        user_code: a list to which the names of user code are added; user code is then identified by its name.

    Raises:
        UserCodeError: for user code and for objects that cannot be identified, such as an index in memory.
        ValueError: from `describe()`, if a transformer cannot be described.
    """
    return digest(description(value, without=without, user_code=user_code))


def description(value: Any, *, without: Collection[str] = (), user_code: list[str] | None = None) -> Any:
    """Return the JSON description that `key` hashes."""
    return json.loads(json.dumps(_Describer(without, user_code).describe(value)))


def digest(described_value: Any) -> str:
    """Return the hash of a description."""
    return blake2b(json.dumps(described_value, sort_keys=True).encode(), digest_size=16).hexdigest()


@cache
def version_of(module: str) -> str | None:
    """Return the package version of a module; "" for Python and this package, None for user code."""
    top = module.partition(".")[0]
    if top == "pyterrier_longdoc" or top in sys.stdlib_module_names:
        return ""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(top)
    packages = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
    return " ".join(map(importlib.metadata.version, packages)) or None


@dataclass
class _Describer:
    without: Collection[str]
    user_code: list[str] | None

    def describe(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str | Path):
            return str(value) if isinstance(value, Path) else value
        if isinstance(value, pd.DataFrame):
            return frame_digest(value.reset_index(allow_duplicates=True))
        if isinstance(value, pd.Series):
            return self.describe([value.index.to_numpy(), value.to_numpy()])
        if isinstance(value, np.ndarray | np.generic):
            return frame_digest(pd.DataFrame({"": [np.asarray(value)]}))
        if isinstance(value, Mapping):
            return {str(name): self.describe(item) for name, item in value.items() if name not in self.without}
        if isinstance(value, list | tuple):
            return [self.describe(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((self.describe(item) for item in value), key=repr)
        if isinstance(value, type):
            return self._code(value)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if is_terriers(value):
            return terriers_properties(value) or self._unknown("an index that is not on disk")
        if is_java(value) or isinstance(value, Enum):
            return value.name if isinstance(value, Enum) else type(value).__name__
        is_stage = isinstance(value, pt.Transformer)
        is_ours = any(cls.__module__.startswith("pyterrier_longdoc.") for cls in type(value).__mro__)
        if callable(getattr(value, "describe", None)) and (is_stage or is_ours):
            return self._by_method(value)
        if is_stage:
            return self._stage(value)
        if is_dataclass(value):
            return self.describe({"class": type(value), **{f.name: getattr(value, f.name) for f in fields(value)}})
        function = getattr(value, "fn", value)  # how PyTerrier passes functions to Java
        if isinstance(function, partial):
            return self.describe([function.func, function.args, function.keywords])
        if callable(function) and hasattr(function, "__qualname__"):
            return self._code(function)
        if type(value).__repr__ is object.__repr__ and not isinstance(value, pt.datasets.Dataset):
            return self._unknown(described(value))
        return {"class": self._code(type(value)), "repr": described(value)}

    def _by_method(self, value: Any) -> Any:
        found = value.describe()
        if not isinstance(found, Mapping):  # a method of another package with this name
            return self._stage(value)
        self._check(value)
        settings = {"transformer": type(value), **found}
        if isinstance(value, pt.Transformer):  # not a setting, but scores depend on its texts
            settings["text_loader"] = getattr(value, "text_loader", None)
        return self.describe(settings)

    def _stage(self, stage: pt.Transformer) -> Any:
        if any(cls.__module__.startswith("pyterrier.terrier.") for cls in type(stage).__mro__):
            # Some arguments of Terrier's constructors are not inspectable.
            values = {name.lstrip("_"): value for name, value in vars(stage).items()}
            if isinstance(stage, pt.terrier.TextScorer):  # adds two redundant controls when it scores
                implied = {"termpipelines", "decorate_batch"}
                controls = {k: v for k, v in stage.kwargs.get("controls", {}).items() if k not in implied}
                values["kwargs"] = {**stage.kwargs, "controls": controls}
            return self.describe({"transformer": type(stage), **values})
        try:
            attributes = pt.inspect.transformer_attributes(stage, strict=False)
        except (pt.inspect.InspectError, ValueError):
            attributes = []
        values = {attribute.name: attribute.value for attribute in attributes if attribute.value is not _NOT_FOUND}
        settings = {"transformer": type(stage), "arguments": values}
        built = Path(str(stage.path)) / "pt_meta.json" if isinstance(stage, pt.Artifact) else None
        if built is not None and isinstance(stage, pt.Indexer) and built.is_file():
            settings["built"] = built.stat().st_mtime_ns
        if len(values) < max(1, len(attributes)):
            settings["repr"] = described(stage)
        return self.describe(settings)

    def _check(self, value: Any) -> None:
        """Search an object with `describe()` and its parts for user code."""
        if isinstance(value, list | tuple):
            for item in value:
                self._check(item)
        elif isinstance(value, partial):
            self._check(value.func)
        elif hasattr(value, "__qualname__"):
            self._code(value)
        else:
            self._code(type(value))
            for part in _parts(value):
                self._check(part)

    def _code(self, code: type | Callable[..., Any]) -> str:
        """Return the name and version of a class or function."""
        module = getattr(code, "__module__", None) or type(code).__module__
        version = version_of(module)
        if version is None or (version and "<" in code.__qualname__):
            self._unknown(code.__qualname__)
        return f"{module}.{code.__qualname__} {version or ''}".strip()

    def _unknown(self, name: str) -> str:
        if self.user_code is None:
            raise UserCodeError(f"{name} may change unnoticed (code of a script or notebook, or objects in memory)")
        self.user_code.append(name)
        return name


def _parts(value: Any) -> list[Any]:
    """Return the parts that can be user code: `code_parts`, or the fields that affect scores."""
    if hasattr(value, "code_parts"):
        return list(value.code_parts())
    roles = {f.name: f.metadata.get("role") for f in fields(value)} if is_dataclass(value) else {}
    return [getattr(value, name) for name, role in roles.items() if role not in ("computing", "call")]
