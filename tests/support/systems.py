"""Every kind of reranker, small enough for tiny checkpoints: what the contract tests run over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
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
    "SoftMaxP": (ld.SoftMaxP, SLIDING),
    "Birch": (ld.Birch, SMALL),
    "PARADE-avg": (ld.PARADE, {"aggregation": "avg", **SLIDING}),
    "PARADE-max": (ld.PARADE, {"aggregation": "max", **SLIDING}),
    "PARADE-attn": (ld.PARADE, SLIDING),
    "PARADE-elementwise": (ld.PARADE, {"attention": "elementwise", **SLIDING}),
    "PARADE-transformer": (ld.PARADE, {"aggregation": "transformer", **SLIDING}),
    "PARADE-pretrained": (ld.PARADE, {"aggregation": "transformer", "aggregator": tiny.aggregator, **SLIDING}),
    "PARADE-query": (ld.PARADE, {"aggregation": "transformer", "query_states": True, **SLIDING}),
    "LateIR": (ld.LateIR, {"interaction": tiny.aggregator, "aggregator": tiny.aggregator, **SLIDING}),
    "MaxSim": (ld.MaxSim, SLIDING),
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

UNTRAINED = (
    "PARADE-transformer", "PARADE-pretrained", "PARADE-query", "LateIR", "MaxSim", "CEDR-pacrr",
    "CEDR-drmm", "NeuralModel1",
)  # fmt: skip
"""Systems that need training whatever the backbone."""

AGGREGATING = ("PARADE-transformer", "PARADE-pretrained", "PARADE-query", "LateIR")
"""Systems whose aggregator limits the number of windows."""

REMEMBERING = ("LateIR", "MaxSim", *BI_ENCODERS)
"""Systems that remember what they have encoded."""


REPRESENTATIVE = ("MaxP", "PARADE-pretrained", "LateIR", "CEDR-knrm", "BiEncoder-max")
"""Systems with code of their own between text and score; the others differ from one of them in a head or in windows."""

CONTRACT = (*REPRESENTATIVE, "FirstP", "LongP", "Birch", "PARADE-query", "MaxSim", "NeuralModel1")
"""Also those that read, remember or need something else: what holds for these does not depend on the head.

FirstP and LongP read one window, Birch sentences and a first stage's scores, PARADE-query the states of the query,
NeuralModel1 those of all tokens; MaxSim has an encoder of its own.
"""
TRAINABLE = tuple(name for name in CONTRACT if name in CROSS_ENCODERS)
"""Those that can be trained and saved."""

QUIET = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.cross_encoder.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.SeenQueriesWarning"),
]
"""Marks of tests in which random weights, texts that are cut and queries of the training are nothing to warn of."""

QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})
"""Labels of `tiny.results`."""


def make(name: str, backbone: Any = None, **changes: Any) -> Any:
    """A new transformer of a kind, over a checkpoint that suits it; checkpoints are made when they are first needed."""
    cls, arguments = SYSTEMS[name]
    arguments = {key: value() if callable(value) else value for key, value in arguments.items()}
    return cls(backbone or tiny.encoder(None if name in BI_ENCODERS else 1), **{**arguments, **changes})


def longp(kind: str, checkpoint: str, **changes: Any) -> ld.LongP:
    """A LongP over a checkpoint of a kind of `tiny_long`."""
    own = {
        "qwen3": {"pooling": "last"},
        "qwen3 answers": {"template": "qwen3-reranker"},
        "llama cross-encoder": {"template": "plain"},
    }.get(kind, {})
    return ld.LongP(checkpoint, **{**SMALL, "device": "cpu", **own, **changes})


SELECTORS: dict[str, Callable[[int], Any]] = {
    "FirstK": ld.FirstK,
    "BM25Windows": ld.BM25Windows,
    "EmbeddingWindows": lambda k: ld.EmbeddingWindows(k, make("BiEncoder-max")),
    "CrossEncoderWindows": lambda k: ld.CrossEncoderWindows(k, make("FirstP")),
    "CrossEncoderWindows of MaxSim": lambda k: ld.CrossEncoderWindows(k, make("MaxSim")),
}
"""By name, what makes a selector of the best `k` windows."""


def changed(transformer: Any, **attributes: Any) -> Any:
    """A copy with its weights and other arguments."""
    return pt.inspect.transformer_apply_attributes(transformer, **attributes)


def told_of(category: type[Warning], what: Callable[[], Any]) -> list[str]:
    """The warnings of this category, all of them at a line of the file of `what`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what()
    told = [warning for warning in caught if issubclass(warning.category, category)]
    assert {warning.filename for warning in told} <= {what.__code__.co_filename}
    return [str(warning.message) for warning in told]


def forget(model: Any) -> None:
    """Empties what a reranker, and the model that selects its windows, keep of texts that they have read."""
    for each in filter(None, (model, getattr(model.preselect, "model", None))):
        if hasattr(each.model.reader, "cache"):
            each.model.reader.cache.clear()


def scores(transformer: Any, frame: pd.DataFrame) -> np.ndarray:
    """The scores of the rows, in their order."""
    return transformer(frame)["score"].to_numpy()


def reloaded(transformer: Any, folder: Path) -> Any:
    """What is loaded from a folder in which it has been saved."""
    transformer.save(folder, overwrite=True)
    return type(transformer).load(folder, device="cpu")


def slow_but(representative: Iterable[str], names: Iterable[str]) -> list[Any]:
    """All names as parameters of a test, of which only the representative ones are not slow."""
    return [name if name in representative else pytest.param(name, marks=pytest.mark.slow) for name in names]
