"""Scores that depend on nothing but the query and the document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.arguments import changed
from pyterrier_longdoc.modelling.backbones.architectures import use_attention

from .systems import forget


def assert_independent(model: Any, results: pd.DataFrame, tolerance: float = 1e-4) -> None:
    """Asserts that neither other rows, their order, padding, batches nor the attention implementation matter."""
    frame = results.reset_index(drop=True)
    expected = _scores(model, frame)
    for name, found in _other_ways(model, frame, lambda rows: _scores(model, rows)):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def _scores(model: Any, frame: pd.DataFrame) -> np.ndarray:
    forget(model)  # so that vectors are computed again
    return model(frame)["score"].to_numpy(dtype="float64")


def _other_ways(
    model: Any, frame: pd.DataFrame, score: Callable[[pd.DataFrame], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    order = np.random.default_rng(0).permutation(len(frame))
    yield "order", score(frame.iloc[order].reset_index(drop=True))[np.argsort(order)]
    rows = [frame.iloc[[i]] for i in range(len(frame))]
    yield "alone", np.concatenate([score(row) for row in rows])
    longest = frame.iloc[[frame["text"].str.len().argmax()]]
    with changed(model, batch_size=sys.maxsize, max_batch_tokens=sys.maxsize):
        padded = [score(pd.concat([row, longest], ignore_index=True))[0] for row in rows]
    yield "padding", np.array(padded)
    with changed(model, batch_size=1):
        yield "batch size 1", score(frame)
    with changed(model, max_batch_tokens=40):
        yield "batches of 40 tokens", score(frame)
    backbone = model.model.encoder.backbone
    default = getattr(backbone.config, "_attn_implementation", None)
    for kind in {"eager", "sdpa"} - {default}:
        try:
            use_attention(backbone, kind)
        except ValueError:  # not available for this architecture
            continue
        try:
            yield f"attention {kind}", score(frame)
        finally:
            use_attention(backbone, default)
