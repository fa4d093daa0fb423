"""Every kind of reranker, small enough for tiny checkpoints: what the contract tests run over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import pyterrier_longdoc as ld

from . import tiny

SMALL: dict[str, Any] = {"max_query_len": 8}
SLIDING: dict[str, Any] = {"window_size": 20, "stride": 10, **SMALL}
CHUNKS: dict[str, Any] = {"window_size": 20, **SMALL}

CROSS_ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FirstP": (ld.FirstP, CHUNKS),
    "MaxP": (ld.MaxP, SLIDING),
    "SumP": (ld.SumP, SLIDING),
    "AvgP": (ld.AvgP, CHUNKS),
    "LongP": (ld.LongP, SMALL),
    "KMaxP": (ld.KMaxP, SLIDING),
    "Birch": (ld.Birch, SMALL),
    "PARADE-avg": (ld.PARADE, {"aggregation": "avg", **SLIDING}),
    "PARADE-max": (ld.PARADE, {"aggregation": "max", **SLIDING}),
    "PARADE-attn": (ld.PARADE, SLIDING),
    "PARADE-elementwise": (ld.PARADE, {"attention": "elementwise", **SLIDING}),
    "PARADE-transformer": (ld.PARADE, {"aggregation": "transformer", **SLIDING}),
    "PARADE-pretrained": (ld.PARADE, {"aggregation": "transformer", "aggregator": tiny.aggregator, **SLIDING}),
    "PARADE-query": (ld.PARADE, {"aggregation": "transformer", "query_states": True, **SLIDING}),
    "LateIR": (ld.LateIR, {"interaction": tiny.aggregator, "aggregator": tiny.aggregator, **SLIDING}),
    "MORESPlus": (ld.MORESPlus, SLIDING),
    "CEDR-knrm": (ld.CEDR, CHUNKS),
    "CEDR-pacrr": (ld.CEDR, {"aggregation": "pacrr", **CHUNKS}),
    "CEDR-drmm": (ld.CEDR, {"aggregation": "drmm", **CHUNKS}),
    "NeuralModel1": (ld.NeuralModel1, CHUNKS),
}
BI_ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "BiEncoder-first": (ld.BiEncoder, {"aggregation": "first", **CHUNKS}),
    "BiEncoder-max": (ld.BiEncoder, SLIDING),
    "BiEncoder-avg": (ld.BiEncoder, {"aggregation": "avg", **SLIDING}),
}
SYSTEMS = {**CROSS_ENCODERS, **BI_ENCODERS}

OWN_BACKBONES: dict[str, Callable[[], str]] = {"MORESPlus": tiny.bart}
"""Systems whose backbone is of a kind of its own."""

UNTRAINED = (
    "PARADE-transformer", "PARADE-pretrained", "PARADE-query", "LateIR", "MORESPlus", "CEDR-pacrr", "CEDR-drmm",
    "NeuralModel1",
)  # fmt: skip
"""Systems that need training whatever the backbone."""

AGGREGATING = ("PARADE-transformer", "PARADE-pretrained", "PARADE-query", "LateIR")
"""Systems whose aggregator limits the number of windows."""

REMEMBERING = ("LateIR", "MORESPlus", *BI_ENCODERS)
"""Systems that remember what they have encoded."""


def make(name: str, backbone: str, **changes: Any) -> Any:
    """A new transformer of a kind; checkpoints besides the backbone are made when they are first needed."""
    cls, arguments = SYSTEMS[name]
    arguments = {key: value() if callable(value) else value for key, value in arguments.items()}
    return cls(OWN_BACKBONES.get(name, lambda: backbone)(), **{**arguments, **changes})


def slow_but(representative: Iterable[str], names: Iterable[str]) -> list[Any]:
    """All names as parameters of a test, of which only the representative ones are not slow."""
    return [name if name in representative else pytest.param(name, marks=pytest.mark.slow) for name in names]
