"""Arguments that declare their rules and, of transformers, their role: saving and identities ask for roles."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

Role = Literal["checkpoint", "weights", "head", "windows", "input", "computing", "call"]
"""What an argument decides.

- `checkpoint`: from which checkpoint weights come; the same one may lie elsewhere on another machine;
- `weights`: how weights are made, with the checkpoint's;
- `head`: the aggregation;
- `windows`: which part of a text is read, and how it is cut;
- `input`: how query and window become one input;
- `computing`: where, how fast and in which precision;
- `call`: what one use of the transformer asks for (progress, text loader, explanations, recipe of `fit`).

The first five make a model what it is: they are saved with it and belong to its identity.
"""

OF_THE_MODEL: tuple[Role, ...] = ("checkpoint", "weights", "head", "windows", "input")


def argument(
    default: Any = MISSING,
    *,
    role: Role | None = None,
    choices: Collection[Any] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    needs: str | Mapping[str, Any] | None = None,
) -> Any:
    """Return a dataclass field that declares its rules, which `validate` enforces.

    Args:
        default: value where none is given; without one the argument must be given.
        role: what the argument of a transformer decides: `"checkpoint"`, `"weights"`, `"head"`, `"windows"`, `"input"`,
            `"computing"` or `"call"`; all but the last two are saved with the model.
        choices: the values allowed.
        at_least: the smallest number allowed.
        at_most: the largest number allowed.
        needs: the argument without which this one has no effect, or its values: `needs="repeat"`,
            `needs={"aggregation": "attn"}`, `needs={"aggregation": ("attn", "transformer")}`. Another value than the
            default is refused where the need is not met.

    Raises:
        ValueError: for an unknown role: the argument would not be saved.

    Example:
        `share: float = ld.argument(0.5, role="head", at_least=0)`.
    """
    if role is not None:
        check_arguments("str", choices=get_args(Role), role=role)
    rules = {"choices": choices, "at_least": at_least, "at_most": at_most, "needs": needs}
    metadata = {name: rule for name, rule in {"role": role, **rules}.items() if rule is not None}
    return field(default=default, metadata=metadata)


_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
}
"""What the annotation of a field asks for: a type, and the same in words."""


def validate(instance: Any) -> None:
    """Hold the fields of a dataclass against their annotations and declared rules; numpy's numbers become Python's.

    An annotation of `bool`, `int` or `float`, also with `| None`, is a rule by itself.

    Raises:
        ValueError: that names the first argument that breaks a rule, its value, and what it must be.
    """
    for f in fields(instance):
        value = plain(getattr(instance, f.name))
        object.__setattr__(instance, f.name, value)
        annotation = f.type.__name__ if isinstance(f.type, type) else str(f.type)
        annotation = re.sub(r"(?:typing\.)?Optional\[(\w+)\]", r"\1 | None", annotation)
        rule = _broken_rule(annotation, value, *(f.metadata.get(rule) for rule in ("choices", "at_least", "at_most")))
        unmet = _unmet_need(instance, f, value)
        if rule or unmet:
            wrong = f"must be {rule}" if rule else f"has no effect without {unmet}"
            raise ValueError(f"{type(instance).__name__}: {f.name}={value!r} {wrong}")


def check_arguments(
    annotation: str, *, choices: Collection[Any] | None = None, at_least: float | None = None, **values: Any
) -> None:
    """Hold arguments of a function, `k=k`, against an annotation and rules as `validate` holds fields."""
    for name, value in values.items():
        rule = _broken_rule(annotation, value, choices, at_least)
        if rule:
            raise ValueError(f"{name}={value!r} must be {rule}")


def _broken_rule(
    annotation: str, value: Any, choices: Collection[Any] | None, least: float | None, most: float | None = None
) -> str | None:
    """Return what a value must be, in words; None if it is so."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional == "None":
        return None
    if choices is not None and value not in choices:
        return f"one of {', '.join(map(repr, choices))}"
    if optional not in ("", "None") or kind not in _KINDS:
        return None
    wanted, words = _KINDS[kind]
    is_kind = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if is_kind and (least is None or value >= least) and (most is None or value <= most):
        return None
    bounds = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
    return f"{words} of {' and '.join(bounds)}" if bounds else words


def _unmet_need(instance: Any, f: Field[Any], value: Any) -> str | None:
    """Return what the field needs and does not have, in words; None if it has its default, or all it needs."""
    needs = f.metadata.get("needs")
    if needs is None or value is f.default or repr(value) == repr(f.default):
        return None
    if isinstance(needs, str):
        return None if getattr(instance, needs) not in (None, False) else needs
    for name, wanted in needs.items():
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        if getattr(instance, name) not in values:
            return f"{name}={' or '.join(map(repr, values))}"
    return None


def arguments_of(transformer: Any, *roles: Role) -> dict[str, Any]:
    """Return the constructor arguments with these roles, by name; all of them if none is named."""
    chosen = (f.name for f in fields(transformer) if not roles or f.metadata.get("role") in roles)
    return {name: getattr(transformer, name) for name in chosen}


def changed_names(transformer: Any, names: Container[str]) -> list[str]:
    """Return those of the named constructor arguments that differ from their defaults."""
    asked = [f for f in fields(transformer) if f.name in names]
    # By what they look like, as arrays are neither equal nor unequal.
    return [f.name for f in asked if repr(getattr(transformer, f.name)) != repr(f.default)]


def check_roles(transformer: Any) -> None:
    """Raise TypeError for an argument without a role: it would neither be saved nor be part of an identity."""
    for f in fields(transformer):
        if "role" not in f.metadata:
            name = f"{type(transformer).__name__}.{f.name}"
            raise TypeError(f"{name} has no role and would not be saved: define it as ld.argument(..., role='head')")


def plain(value: Any) -> Any:
    """Return numpy's number, truth or string as Python's own, which JSON can hold; any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_checkpoint(**names: Any) -> None:
    """Raise ValueError, naming it, for what cannot be the name of a checkpoint."""
    for name, value in names.items():
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError(f"{name}={value!r} must be a folder, or a model on the Hugging Face hub")


def check_seeds(seeds: Any) -> None:
    """Raise ValueError if these are no distinct whole numbers."""
    numbers = list(seeds) if isinstance(seeds, Iterable) else []
    are_whole = all(isinstance(seed, Integral) and not isinstance(seed, bool) for seed in numbers)
    if not numbers or not are_whole or len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds={seeds!r} must be a list of different whole numbers, e.g. [0, 1, 2]")
