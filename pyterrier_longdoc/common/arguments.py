"""Dataclass arguments that declare their rules and, in transformers, their role for saving and keys."""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

Role = Literal["checkpoint", "weights", "head", "windows", "input", "computing", "call"]
"""The part of a transformer that an argument belongs to.

- `checkpoint`: the checkpoint of the weights, which can be in another place on another machine;
- `weights`: how weights are created in addition to those of the checkpoint;
- `head`: the aggregation;
- `windows`: truncation and windowing of texts;
- `input`: how query and window become one input;
- `computing`: device, speed and precision;
- `call`: a single use of the transformer (progress bar, text loader, explanations, recipe of `fit`).

The first five are saved with a model and are part of its key.
"""

SAVED_ROLES: tuple[Role, ...] = ("checkpoint", "weights", "head", "windows", "input")


def argument(
    default: Any = MISSING,
    *,
    role: Role | None = None,
    choices: Collection[Any] | None = None,
    at_least: float | str | None = None,
    at_most: float | str | None = None,
    above: float | str | None = None,
    below: float | str | None = None,
    needs: str | Mapping[str, Any] | None = None,
) -> Any:
    """Return a dataclass field that declares its rules, which `validate` enforces.

    Args:
        default: the default value; without it, the argument is required.
        role: the part of a transformer that the argument belongs to: `"checkpoint"`, `"weights"`, `"head"`,
            `"windows"`, `"input"`, `"computing"` or `"call"`. All but the last two are saved with the model.
        choices: the allowed values.
        at_least: the smallest allowed number. A bound can also be the name of an earlier argument.
        at_most: the largest allowed number.
        above: the exclusive lower bound.
        below: the exclusive upper bound.
        needs: another argument, optionally with values, without which this one has no effect: `needs="repeat"`,
            `needs={"aggregation": "attn"}`, `needs={"aggregation": ("attn", "transformer")}`. If the need is not met,
            only the default is allowed.

    Raises:
        ValueError: for an unknown role.

    Example:
        `share: float = ld.argument(0.5, role="head", at_least=0)`.
    """
    if role is not None:
        check_arguments("str", choices=get_args(Role), role=role)
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    rules = {"role": role, "choices": choices, "needs": needs, **bounds}
    metadata = {name: rule for name, rule in rules.items() if rule is not None}
    return field(default=default, metadata=metadata)


_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
}
"""The type of an annotation and its description in messages."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
"""Shortens long values in messages."""

_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def validate(instance: Any, who: str | None = None) -> None:
    """Check the fields of a dataclass against their annotations and declared rules; convert numpy scalars to Python's.

    Annotations of `bool`, `int` or `float`, also with `| None`, are rules. Errors begin with `who`, by default the name
    of the class.

    Raises:
        ValueError: if an argument breaks a rule; the message names `who`, the argument, its value and the rule.
    """
    for f in fields(instance):
        value = to_scalar(getattr(instance, f.name))
        object.__setattr__(instance, f.name, value)
        annotation = f.type.__name__ if isinstance(f.type, type) else str(f.type)
        annotation = re.sub(r"(?:typing\.)?Optional\[(\w+)\]", r"\1 | None", annotation)
        rule = _broken_rule(annotation, value, f.metadata, instance)
        unmet = _unmet_need(instance, f, value)
        if rule or unmet:
            problem = f"must be {rule}" if rule else f"has no effect without {unmet}"
            raise ValueError(f"{who or type(instance).__name__}: {f.name}={_SHORT.repr(value)} {problem}")


def check_arguments(
    annotation: str,
    who: str = "",
    *,
    choices: Collection[Any] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    **args: Any,
) -> None:
    """Check arguments of a function, passed as `k=k`, against an annotation and rules, like `validate`."""
    rules = {"choices": choices, "at_least": at_least, "at_most": at_most, "above": above, "below": below}
    for name, value in args.items():
        rule = _broken_rule(annotation, value, rules)
        if rule:
            raise ValueError(f"{f'{who}: ' if who else ''}{name}={_SHORT.repr(value)} must be {rule}")


def check_type(cls: Any, rule: str, **args: Any) -> None:
    """Raise ValueError with the name of the argument and the rule if it is not an instance of a class."""
    for name, value in args.items():
        if not isinstance(value, cls):
            raise ValueError(f"{name}={_SHORT.repr(value)} must be {rule}")


def _broken_rule(annotation: str, value: Any, rules: Mapping[str, Any], instance: Any = None) -> str | None:
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional == "None":
        return None
    choices = rules.get("choices")
    if choices is not None and value not in tuple(choices):
        return f"one of {', '.join(map(repr, choices))}"
    if optional not in ("", "None") or kind not in _KINDS:
        return None
    cls, words = _KINDS[kind]
    holds = isinstance(value, cls) and (cls is bool or not isinstance(value, bool))
    bounds = []
    for name, compare in _BOUNDS.items():
        bound = rules.get(name)
        if bound is not None:
            limit = getattr(instance, bound) if isinstance(bound, str) else bound
            bounds.append(f"{name.replace('_', ' ')} {limit if limit is bound else f'{bound}={limit}'}")
            holds = holds and compare(value, limit)
    return None if holds else ", ".join([words, *bounds])


def _unmet_need(instance: Any, f: Field[Any], value: Any) -> str | None:
    needs = f.metadata.get("needs")
    if needs is None or value is f.default or repr(value) == repr(f.default):
        return None
    if isinstance(needs, str):
        return None if getattr(instance, needs) not in (None, False) else needs
    for name, need in needs.items():
        values = need if isinstance(need, tuple) else (need,)
        if getattr(instance, name) not in values:
            return f"{name}={' or '.join(map(repr, values))}"
    return None


def arguments_of(transformer: Any, *roles: Role) -> dict[str, Any]:
    """Return the constructor arguments with these roles by name; without roles, all arguments."""
    names = (f.name for f in fields(transformer) if not roles or f.metadata.get("role") in roles)
    return {name: getattr(transformer, name) for name in names}


def changed_names(transformer: Any, names: Container[str]) -> list[str]:
    """Return which of the named constructor arguments differ from their defaults."""
    named_fields = [f for f in fields(transformer) if f.name in names]
    # Compared by their repr, because arrays have no single truth value.
    return [f.name for f in named_fields if repr(getattr(transformer, f.name)) != repr(f.default)]


def check_roles(transformer: Any) -> None:
    """Raise TypeError for an argument without a role, which would neither be saved nor be part of the key."""
    for f in fields(transformer):
        if "role" not in f.metadata:
            name = f"{type(transformer).__name__}.{f.name}"
            raise TypeError(f"{name} has no role and would not be saved: define it as ld.argument(..., role='head')")


class Without:
    """An argument of a base class that a class does not have, and the value that the base class sees.

    Annotated as a `ClassVar`, it is no field of the dataclass: `max_windows: ClassVar[Any] = Without()`.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.value

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError(f"{type(instance).__name__} has no argument {self.name}")


def to_scalar(value: Any) -> Any:
    """Convert a numpy scalar to a Python value, for JSON; other values are returned unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def check_checkpoint(**names: Any) -> None:
    """Raise ValueError with the name of the argument if it cannot be the name of a checkpoint."""
    for name, value in names.items():
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError(f"{name}={value!r} must be a folder or the name of a model on the Hugging Face hub")


@contextmanager
def changed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Change attributes of an object temporarily."""
    old = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)
