"""Rules that arguments declare: what they refuse, and that every public class with such rules follows them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import argument, validate

PACKAGES = ("", ".analysis", ".comparison", ".data", ".listwise", ".passages", ".scale", ".training")
BACKBONE = {"backbone": "any/model"}
REQUIRED: dict[str, dict[str, Any]] = {
    "RelevanceJudge": {"llm": str},
    "RankGPT": {"llm": str},
    "OpenAIBackend": {"model": "any/model"},
    "Template": {"parts": "{query} {text}"},
    "PairScorer": {"scorer": lambda queries, texts: [0.0] * len(texts)},
    **{name: {"k": 2} for name in ("FirstK", "BM25Windows")},
    "EmbeddingWindows": {"k": 2, "model": ld.BiEncoder(**BACKBONE)},
    "CrossEncoderWindows": {"k": 2, "model": ld.FirstP(**BACKBONE)},
}
"""What classes need besides the argument in question."""


@dataclass
class Ruled:
    size: int = argument(5, at_least=1)
    stride: int | None = argument(None, at_least=1, at_most="size")
    share: float = argument(0.5, above=0, below=1)
    kind: str = argument("a", choices=("a", "b"))
    flag: bool = False
    factor: float = argument(1.0, needs="flag")
    power: float = argument(1.0, needs={"kind": ("b", "c"), "flag": True})

    def __post_init__(self) -> None:
        validate(self)


def test_a_broken_rule_is_an_error_that_names_the_argument():
    for name, wrong in {
        "size": (0, 2.0, "2", True, None),
        "stride": (0, 6, np.int64(6)),
        "share": (0, 1, float("nan"), "half", None),
        "kind": ("c", None, ["a"]),
        "flag": (1, None, "yes"),
        "factor": (2.0,),
        "power": (2.0,),
    }.items():
        for value in wrong:
            with pytest.raises(ValueError, match=f"Ruled: {name}="):
                Ruled(**{name: value})
    for needed in ({"kind": "b"}, {"flag": True}):  # of two needs
        with pytest.raises(ValueError, match="power="):
            Ruled(power=2.0, **needed)
    with pytest.raises(ValueError, match="stride="):
        Ruled(size=2, stride=3)


def test_values_that_follow_the_rules_are_kept_and_numbers_of_numpy_converted():
    ruled = Ruled(np.int64(7), np.int32(7), np.float32(0.25), "b", flag=True, factor=2, power=2.0)
    assert ruled == Ruled(7, 7, 0.25, "b", True, 2, 2.0)
    assert [type(value) for value in (ruled.size, ruled.stride, ruled.share)] == [int, int, float]


def wrong_values(f: Field[Any], cls: Any) -> Iterator[Any]:
    """Values that break each of an argument's rules, one at a time."""
    kind, _, optional = str(f.type).partition(" | ")
    rules = f.metadata
    if "choices" in rules:
        yield "no such choice"
    if kind in ("int", "float", "bool") and optional in ("", "None"):
        yield "a word"
        yield from [None] * (not optional)
        yield from [True] * (kind != "bool")
        yield from [1.5] * (kind == "int")
    defaults = {each.name: each.default for each in fields(cls)}
    for rule, step in (("at_least", -1), ("above", 0), ("at_most", 1), ("below", 0)):
        bound = rules.get(rule)
        bound = defaults[bound] if isinstance(bound, str) else bound
        if bound is not None:
            yield bound + step
    needs = rules.get("needs", {})
    needs = {needs: True} if isinstance(needs, str) else needs
    if any(defaults[name] != need for name, need in needs.items()):  # it has no effect
        other = not f.default if kind == "bool" else 3 if kind in ("int", "float") else "words"
        yield next(value for value in rules.get("choices", [other]) if value != f.default)


def test_every_public_class_refuses_what_its_arguments_declare_as_wrong():
    modules = [importlib.import_module(f"pyterrier_longdoc{name}") for name in PACKAGES]
    public = {id(value): value for module in modules for value in (getattr(module, name) for name in module.__all__)}
    checked, accepted = 0, []
    for cls in public.values():
        if not (isinstance(cls, type) and is_dataclass(cls)) or inspect.isabstract(cls):
            continue
        if not any(f.metadata for f in fields(cls)):
            continue
        own = {f.name: f.default for f in fields(cls)}
        given = REQUIRED.get(cls.__name__, BACKBONE if own.get("backbone") is MISSING else {})
        for f in (f for f in fields(cls) if f.init):
            for value in wrong_values(f, cls):
                checked += 1
                try:
                    cls(**{**given, f.name: value})
                except ValueError as error:
                    if f"{f.name}=" in str(error):
                        continue
                    accepted.append(f"{cls.__name__}({f.name}={value!r}): {error}")
                else:
                    accepted.append(f"{cls.__name__}({f.name}={value!r})")
    assert accepted == []
    assert checked > 500  # the rules are found
