"""`MaxP ** SumP ** PARADE` over one pass through the encoder that the models share."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

from ..common.coverage import Coverage, Explanation, check_finite
from ..common.frames import rerank
from ..common.presentation import HELP_URL
from ..modelling.batching import of_documents
from ..modelling.checkpoint import Weights
from ..modelling.encoder import encode_distinct
from ..modelling.heads import registered_heads
from ..modelling.scorer import LongDocScorer, Step, on_devices, steps
from ..modelling.texts import same_tokens
from .base import LongDocReranker

_EQUAL = (
    "text_field", "text_loader", "batch_size", "max_batch_tokens", "device", "dtype", "max_query_len", "pad_query",
)  # fmt: skip
"""Arguments that models over one pass have in common."""

_FREE = (
    "backbone", "trust_remote_code", "windows", "max_windows", "selection", "max_doc_len", "training", "verbose",
    "seed",
)  # fmt: skip
"""Arguments in which they may differ: what they say about weights and windows is looked at elsewhere. All others of
`LongDocReranker` must be at their defaults."""

_OVERRIDABLE = ("transform", "_score", "_load_weights", "load_scorer")


@dataclass(eq=False, repr=False)
class FusedRerankers(pt.Transformer):
    """The feature union `a ** b ** ...` of rerankers that share an encoder; what `.compile()` makes of it.

    Each distinct (query, window) is encoded once for all of them; windows and heads may differ. Whether they still
    share an encoder is looked at in every `transform`: after one of them was trained, each encodes for itself again.

    Args:
        models: two or more `LongDocReranker`s.
    """

    models: tuple[LongDocReranker, ...]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the models' scores as features.

        Args:
            inp: as of the models, without a column `features`.

        Returns:
            What the models' feature union returns: the input's columns and `features`, `(M,)` float64 of M models.
        """
        features: Sequence[pt.Transformer] = self.models
        if len(inp) and self._share_an_encoder():
            run = _SharedRun(self.models)
            features = [_Feature(model, run) for model in self.models]
        return reduce(operator.pow, features).transform(inp)

    def fuse_feature_union(self, other: pt.Transformer, is_left: bool) -> pt.Transformer | None:
        """See `LongDocReranker.fuse_feature_union`."""
        return fuse(self, other) if is_left else fuse(other, self)

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        return {"label": " ** ".join(type(model).__name__ for model in self.models), "help_url": HELP_URL}

    def subtransformers(self) -> dict[str, Any]:
        """The models."""
        return {"models": list(self.models)}

    def __repr__(self) -> str:
        return f"({' ** '.join(map(repr, self.models))})"

    def _share_an_encoder(self) -> bool:
        if not _go_together(self.models):
            return False
        for model in self.models:
            model.load_scorer()
        first, *others = (_loaded(model) for model in self.models)
        return all(_same_encoder(first, other) for other in others)


def fuse(left: pt.Transformer, right: pt.Transformer) -> FusedRerankers | None:
    """`left ** right` over one pass through the encoder; None where that is not possible, or not known to be right.

    Args:
        left: a reranker, or fused ones.
        right: the same.
    """
    models: list[Any] = []
    for part in (left, right):
        models += part.models if isinstance(part, FusedRerankers) else [part]
    if not all(isinstance(model, LongDocReranker) for model in models) or not _go_together(models):
        return None
    return FusedRerankers(tuple(models)) if all(_weights_match(models[0], model) for model in models[1:]) else None


def _go_together(models: Sequence[LongDocReranker]) -> bool:
    """Whether the models, but for their weights, read alike and leave it to the scorer to encode."""
    first, *others = models
    return all(map(_is_plain, models)) and all(_reads_alike(first, other) for other in others)


def _is_plain(model: LongDocReranker) -> bool:
    cls = type(model)
    if any(getattr(cls, name) is not getattr(LongDocReranker, name) for name in _OVERRIDABLE):
        return False
    name, _ = model._head_spec()
    if cls._scorer_class is not LongDocScorer or registered_heads()[name].needs != "cls":
        return False
    rest = (f for f in dataclasses.fields(LongDocReranker) if f.name not in (*_EQUAL, *_FREE))
    return all(getattr(model, f.name) == f.default for f in rest)


def _reads_alike(model: LongDocReranker, other: LongDocReranker) -> bool:
    if model.text_loader is not other.text_loader:
        return False
    if model.pad_query and model._make_windows().largest != other._make_windows().largest:
        return False  # the fixed layout pads windows to their full size
    return all(getattr(model, name) == getattr(other, name) for name in _EQUAL if name != "text_loader")


def _weights_match(model: LongDocReranker, other: LongDocReranker) -> bool:
    """Whether the encoders are the same, or will be as soon as they are loaded."""
    loaded = [m._loaded for m in (model, other) if m._loaded is not None]
    if any(weights.made_for != m._made_for() for m in (model, other) if (weights := m._loaded) is not None):
        return False
    if len(loaded) == 2:
        return _same_encoder(*loaded)
    if any(weights.trained for weights in loaded) or type(model)._load_backbone is not type(other)._load_backbone:
        return False
    return _origin(model) == _origin(other)


def _origin(model: LongDocReranker) -> dict[str, Any]:
    """What an untrained encoder depends on; the seed is only for heads."""
    return {name: value for name, value in zip(model._of_weights, model._made_for(), strict=True) if name != "seed"}


def _same_encoder(one: Weights, other: Weights) -> bool:
    a, b = one.scorer, other.scorer
    if a is b:
        return True
    if one.backbone.describe() != other.backbone.describe() or a.encoder.pooling != b.encoder.pooling:
        return False
    if a.layout != b.layout or not same_tokens(a.tokenizer, b.tokenizer):
        return False
    states, others = a.encoder.state_dict(), b.encoder.state_dict()
    return states.keys() == others.keys() and all(
        value.shape == others[name].shape and torch.equal(value, others[name].to(value.device))
        for name, value in states.items()
    )


def _loaded(model: LongDocReranker) -> Weights:
    if model._loaded is None:
        raise RuntimeError(f"{model!r} is not loaded")
    return model._loaded


@dataclass(eq=False)
class _Feature(pt.Transformer):
    """One model of a shared run as a transformer of its own, so that PyTerrier's feature union does the rest."""

    model: LongDocReranker
    run: _SharedRun

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        return rerank(self.model, inp, partial(self.run.score, self.model))

    def __repr__(self) -> str:
        return repr(self.model)


class _SharedRun:
    """The scores of several models for the same rows: the first that asks has them made for all."""

    def __init__(self, models: Sequence[LongDocReranker]) -> None:
        self._models = list({id(model): model for model in models}.values())
        self._scores: np.ndarray | None = None

    def score(
        self, model: LongDocReranker, queries: list[str], texts: list[str], on_rows: Callable[[int], None] | None
    ) -> tuple[np.ndarray, list[Explanation], Coverage]:
        weights = [_loaded(each) for each in self._models]
        if self._scores is None:
            for each, its_weights in zip(self._models, weights, strict=True):
                each._warn_untrained(its_weights)
            scorers = [each.scorer for each in weights]
            dtype = model._precision(scorers[0])
            self._scores = score_together(scorers, queries, texts, dtype=dtype, on_rows=on_rows)
        elif on_rows is not None:
            on_rows(len(texts))
        number = next(i for i, each in enumerate(self._models) if each is model)
        return self._scores[number], [], weights[number].scorer.coverage


@torch.inference_mode()
def score_together(
    scorers: Sequence[LongDocScorer],
    queries: Sequence[str],
    texts: Sequence[str],
    *,
    dtype: torch.dtype = torch.float32,
    on_rows: Callable[[int], None] | None = None,
) -> np.ndarray:
    """As `LongDocScorer.score` of each; what several have in common is encoded once, by the first one's encoder.

    Args:
        scorers: M different scorers with the same encoder, tokenizer, layout and `max_query_len`.
        queries: R queries.
        texts: R texts.
        dtype: precision of the encoder.
        on_rows: called with the number of rows that are done, for a progress bar.

    Returns:
        `(M, R)` float64 scores. Each scorer's `coverage` tells what it has read; what was encoded is that of all.

    Raises:
        FloatingPointError: if a score is not finite.
    """
    first = scorers[0]
    scores = np.full((len(scorers), len(texts)), np.nan)
    query_ids, *_ = [scorer.begin(queries, dtype) for scorer in scorers]
    offsets = any(scorer.windows.needs_text for scorer in scorers)
    parts = (
        (step, [scorer.cut(*step.pairs) for scorer in scorers])
        for step in steps(first, queries, query_ids, texts, on_rows, offsets=offsets)
    )

    def work(scorer: LongDocScorer, part: tuple[Step, Any]) -> Sequence[torch.Tensor]:
        step, cuts = part
        return _vectors(scorer, step.pairs[0], [windows for windows, _ in cuts], dtype, step.report)

    for (step, cuts), vectors in on_devices(first, parts, work):
        for number, (scorer, own, (windows, read_of)) in enumerate(zip(scorers, vectors, cuts, strict=True)):
            with scorer._evaluation():
                values = scorer._values(of_documents(own.to(scorer.device), windows))
            scorer._count(step.block, step.documents, read_of)
            for rows, value in zip(step.block.rows, values, strict=True):
                scores[number, rows] = value
    for scorer in scorers[1:]:
        scorer.coverage.add_encoded(first.coverage.tokens_encoded, first.coverage.tokens_computed)
    for of_scorer in scores:
        check_finite(of_scorer)
    return scores


def _vectors(
    scorer: LongDocScorer,
    query_ids: Sequence[np.ndarray],
    windows: Sequence[Sequence[Sequence[np.ndarray]]],
    dtype: torch.dtype,
    on_share: Callable[[float], None] | None,
) -> Sequence[torch.Tensor]:
    """The window vectors that each of M heads asks for: M times `(V, H)`."""
    flat = [
        (query, window)
        for of_head in windows
        for query, group in zip(query_ids, of_head, strict=True)
        for window in group
    ]
    with scorer.encoding(dtype):
        queries, inputs = [query for query, _ in flat], [window for _, window in flat]
        vectors = encode_distinct(scorer.encoder, scorer.layout, queries, inputs, on_share=on_share)
    return vectors.split([sum(map(len, of_head)) for of_head in windows])
