"""`MaxP ** SumP ** PARADE` over one pass through the encoder that the models share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import pandas as pd
import pyterrier as pt
import torch

from ..common.arguments import arguments_of, changed_names
from ..common.coverage import Coverage, Scored, Work
from ..common.documents import Text
from ..modelling.batching import Encoded
from ..modelling.checkpoint import Weights
from ..modelling.encoder import WindowEncoder
from ..modelling.heads import registered_heads
from ..modelling.layout import resolve_layout
from ..modelling.scorer import BLOCK_PAIRS, LongDocScorer, Read
from ..modelling.texts import blocks, numbered, same_tokens

_FREE = ("text_loader", "training", "verbose")
"""What one use of a model may ask for without doing more than score windows; text loaders are compared elsewhere."""


class Fusable:
    """A reranker that may be fused with others: its class leaves it to the scorer to encode."""

    def fuse_feature_union(self, other: pt.Transformer, is_left: bool) -> pt.Transformer | None:
        """Lets `(self ** other).compile()` encode each distinct (query, window) once for both.

        Args:
            other: another reranker, or fused ones, with the same encoder: untrained from the same backbone, or with
                equal weights. Windows and heads may differ; what else is read, precision and device may not.
            is_left: whether this transformer's feature comes first.

        Returns:
            The fused transformer; None where `other` does not fit, and for models that look at tokens or do more than
            score windows (`CEDR`, `NeuralModel1`, `TKL`, `LateIR`, `MORESPlus`, `Birch`, `LongP`, `explain`,
            `score_cache`).
        """
        models: list[Any] = []
        for part in (self, other) if is_left else (other, self):
            models += part.models if isinstance(part, FusedRerankers) else [part]
        if not all(isinstance(model, Fusable) for model in models) or not _go_together(models):
            return None
        return FusedRerankers(tuple(models)) if all(_weights_match(models[0], model) for model in models[1:]) else None


@dataclass(eq=False, repr=False)
class FusedRerankers(Fusable, pt.Transformer):
    """The feature union `a ** b ** ...` of rerankers that share an encoder; what `.compile()` makes of it.

    Each distinct (query, window) is encoded once for all of them; windows and heads may differ. Whether they still
    share an encoder is looked at in every `transform`: after one of them was trained, each encodes for itself again.

    Args:
        models: two or more `LongDocReranker`s.
    """

    models: tuple[Any, ...]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the models' scores as features.

        Args:
            inp: as of the models, without a column `features`.

        Returns:
            What the models' feature union returns: the input's columns and `features`, `(M,)` float64 of M models.
        """
        features: Sequence[pt.Transformer] = self.models
        if len(inp) and _go_together(self.models):
            first, *others = [model.load_weights() for model in self.models]
            if all(_same_encoder(first, other) for other in others):
                run = _SharedRun(self.models)
                features = [_Feature(model, run) for model in self.models]
        return reduce(operator.pow, features).transform(inp)

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        return {"label": " ** ".join(type(model).__name__ for model in self.models), "help_url": None}

    def subtransformers(self) -> dict[str, Any]:
        """The models."""
        return {"models": list(self.models)}

    def __repr__(self) -> str:
        return f"FusedRerankers({' ** '.join(map(repr, self.models))})"


def _go_together(models: Sequence[Any]) -> bool:
    """Whether the models, but for their weights, read alike and leave it to the scorer to encode."""
    first, *others = models
    return all(map(_is_plain, models)) and all(_reads_alike(first, other) for other in others)


def _is_plain(model: Any) -> bool:
    base = next(cls for cls in type(model).__mro__ if Fusable in cls.__bases__)
    own = ("transform", "score_pairs", "load_weights", "load_scorer", "set_up")
    if any(getattr(type(model), name) is not getattr(base, name) for name in own):
        return False
    if (
        model.is_foreign
        or model.encoder_class is not WindowEncoder
        or registered_heads()[model.head_spec()[0]].needs != "cls"
    ):
        return False
    does_more = changed_names(model, arguments_of(model, "call").keys() - set(_FREE))
    reads_by_query = model.preselect is not None or resolve_layout(model.layout).shared_budget
    return not does_more and not reads_by_query and model.runtime == "torch"


def _reads_alike(model: Any, other: Any) -> bool:
    if model.text_loader is not other.text_loader:
        return False
    room_by_windows = resolve_layout(model.layout).pad_query or model.max_query_len is None
    if room_by_windows and model.make_windows().largest != other.make_windows().largest:
        return False  # the fixed layout pads windows to their full size; queries have what windows leave
    return arguments_of(model, "input", "computing") == arguments_of(other, "input", "computing")


def _weights_match(model: Any, other: Any) -> bool:
    """Whether the encoders are the same, or will be as soon as they are loaded."""
    loaded = [each for each in (model, other) if each.is_loaded]
    if len(loaded) == 2:
        return _same_encoder(model.load_weights(), other.load_weights())
    if any(each.is_trained for each in loaded):
        return False
    # The seed is only for heads.
    origins = [{k: v for k, v in each.made_for().items() if k != "seed"} for each in (model, other)]
    return origins[0] == origins[1]


def _same_encoder(one: Weights, other: Weights) -> bool:
    a, b = one.scorer, other.scorer
    if a is b:
        return True
    if one.backbone.describe() != other.backbone.describe() or a.encoder.pooling != b.encoder.pooling:
        return False
    if (
        a.layout != b.layout
        or a.settings.max_query_len != b.settings.max_query_len
        or not same_tokens(a.tokenizer, b.tokenizer)
    ):
        return False
    states, others = a.encoder.state_dict(), b.encoder.state_dict()
    return states.keys() == others.keys() and all(
        value.shape == others[name].shape and torch.equal(value, others[name].to(value.device))
        for name, value in states.items()
    )


@dataclass(eq=False)
class _Feature(pt.Transformer):
    """One model of a shared run as a transformer of its own, so that PyTerrier's feature union does the rest."""

    model: Any
    run: _SharedRun

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        return self.model.rerank(inp, partial(self.run.score, self.model))

    def __repr__(self) -> str:
        return repr(self.model)


class _SharedRun:
    """The scores of several models for the same rows: the first that asks has them made for all."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = list({id(model): model for model in models}.values())
        self._scored: list[Scored] | None = None

    def score(self, model: Any, queries: list[str], texts: Sequence[Text], bar: Any) -> Scored:
        if self._scored is None:
            weights = [each.load_weights() for each in self._models]
            for each, its_weights in zip(self._models, weights, strict=True):
                if not its_weights.ready:
                    each.warn_untrained()
            self._scored = score_together([each.scorer for each in weights], queries, texts, bar=bar)
        elif bar is not None:
            Work(Coverage(), bar).end()
        return next(own for each, own in zip(self._models, self._scored, strict=True) if each is model)


@torch.inference_mode()
def score_together(
    scorers: Sequence[LongDocScorer],
    queries: Sequence[str],
    texts: Sequence[Text],
    *,
    bar: Any = None,
) -> list[Scored]:
    """As `LongDocScorer.score` of each; what several have in common is encoded once, by the first one's encoder.

    Args:
        scorers: M different scorers with the same encoder, tokenizer, layout and `max_query_len`.
        queries: R queries.
        texts: R texts.
        bar: as there.

    Raises:
        FloatingPointError: if a score is not finite.
    """
    first = scorers[0]
    asked, query_of_row = numbered(queries)
    censuses = [scorer.census() for scorer in scorers]
    scored = [Scored(len(texts), census.coverage) for census in censuses]
    for census in censuses:
        query_ids = first.read_queries(asked, census)
    workloads = [] if bar is None else [scorer.workload(query_ids, query_of_row, texts) for scorer in scorers]
    work = Work(scored[0].coverage, bar, sum(workload.total for workload in workloads))
    offsets = any(scorer.settings.windows.needs_text for scorer in scorers)
    with ExitStack() as inference:
        for scorer in scorers:
            inference.enter_context(scorer.inference())
        for block in blocks(query_of_row, texts, characters=first.encoder.block_characters, pairs=BLOCK_PAIRS):
            work.begin(sum(workload.of(block) for workload in workloads))
            tokenized = first.tokenize(block.texts, offsets=offsets)
            reads = [
                scorer.read_block(block, tokenized, asked, query_ids, census)
                for scorer, census in zip(scorers, censuses, strict=True)
            ]
            for scorer, own, encoded in zip(scorers, scored, _encode(first, reads, work), strict=True):
                own.add(block.rows, scorer.aggregate(encoded).double().cpu().numpy())
    work.end()
    for own in scored[1:]:
        own.coverage.tokens_encoded = scored[0].coverage.tokens_encoded
        own.coverage.tokens_computed = scored[0].coverage.tokens_computed
    return [own.checked() for own in scored]


def _encode(scorer: LongDocScorer, reads: Sequence[Read], work: Work) -> list[Encoded]:
    """What each of M heads sees of B documents, of which it has windows of its own."""
    together = Read(
        [query for read in reads for query in read.queries],
        [cut for read in reads for cut in read.cuts],
        [windows for read in reads for windows in read.windows],
        [reading for read in reads for reading in read.readings],
    )
    encoded, size = scorer.encode(together, work), len(reads[0].queries)
    parts = zip(encoded.cls.split(size), encoded.mask.split(size), strict=True)
    return [Encoded(cls, mask) for cls, mask in parts]
