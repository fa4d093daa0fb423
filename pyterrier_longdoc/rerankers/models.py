"""The PyTerrier transformers: thin classes that name a model by its windows and its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import Without, argument, arguments_of, check_checkpoint
from ..common.caches import CACHED_BYTES
from ..common.coverage import Coverage
from ..common.frames import numeric, validated
from ..modelling.backbones.architectures import GLOBAL_ATTENTION, use_attention
from ..modelling.backbones.backbone import Backbone
from ..modelling.backbones.families import papers_of
from ..modelling.backbones.load import DEFAULT_BACKBONE
from ..modelling.encoder import WindowEncoder
from ..modelling.external import PairScorer
from ..modelling.inputs import Settings
from ..modelling.late_interaction import DEFAULT_INTERACTION, LateInteractionEncoder, load_late_backbone
from ..modelling.layout import resolve_layout
from ..modelling.model import Model
from ..modelling.weights import HeadSpec, check_head
from ..modelling.windows import GreedyChunks, SentenceWindows, SlidingWindows, Truncate, WholeText, Windows
from ..training import TrainingArgs
from .cross_encoder import CrossEncoder


@dataclass(eq=False, repr=False)
class FirstP(CrossEncoder):
    """Scores the first window of a document; the rest of the text is not read.

    `score = f(query, first window)`, `f` the cross-encoder.

    If the backbone is a cross-encoder, the scores are those of the cross-encoder. The baseline in Boytsov et al. 2025.

    Args:
        window_size: tokens of the window; None for 477 (512 - 32 - 3), or less if the backbone cannot take as many.

    Example:
        `bm25 >> dataset.text_loader() >> ld.FirstP()`
    """

    head_name: ClassVar[str] = "firstp"
    papers: ClassVar[tuple[str, ...]] = ("dai-2019-deeper", "boytsov-2025-positional")

    _: KW_ONLY
    window_size: int | None = argument(None, role="windows", at_least=1)
    max_windows: ClassVar[Any] = Without()  # type: ignore[misc]
    selection: ClassVar[Any] = Without("first")  # type: ignore[misc]

    _sized_by: ClassVar[str] = "window_size"

    def default_windows(self) -> Windows:
        return Truncate(self.window_size)

    def make_windows(self) -> Windows:
        return replace(super().make_windows(), max_windows=1, selection="first")


@dataclass(eq=False, repr=False)
class SlidingReranker(CrossEncoder):
    """Base of the models over sliding windows.

    Args:
        window_size: tokens in a window.
        stride: tokens from one window's start to the next one's.
    """

    _: KW_ONLY
    window_size: int = argument(150, role="windows", at_least=1)
    stride: int = argument(100, role="windows", at_least=1)

    _sized_by: ClassVar[str] = "window_size"

    def default_windows(self) -> Windows:
        return SlidingWindows(self.window_size, self.stride)


@dataclass(eq=False, repr=False)
class MaxP(SlidingReranker):
    """Scores a document by its best window (Dai & Callan 2019).

    `score = max_w f(query, w)`, over the windows `w` of the document; `f` is the cross-encoder.

    By default, windows of 150 tokens with a stride of 100, as in Boytsov et al. 2025.

    Example:
        `bm25 >> dataset.text_loader() >> ld.MaxP("cross-encoder/ms-marco-electra-base")`
    """

    head_name: ClassVar[str] = "maxp"
    papers: ClassVar[tuple[str, ...]] = ("dai-2019-deeper", "boytsov-2025-positional")


@dataclass(eq=False, repr=False)
class SumP(MaxP):
    """Scores a document by the sum of its windows' scores (Dai & Callan 2019); windows as in `MaxP`.

    `score = sum_w f(query, w)`, over the windows `w` of the document; `f` is the cross-encoder.

    Example:
        `bm25 >> dataset.text_loader() >> ld.SumP()`
    """

    head_name: ClassVar[str] = "sump"


@dataclass(eq=False, repr=False)
class KMaxP(MaxP):
    """Scores a document by the mean or a weighted sum of its `k` best windows' scores; windows as in `MaxP`.

    `score = sum_i weights_i f(query, w_(i))`, over the windows sorted by score.

    Args:
        k: the number of windows.
        weights: `k` weights, beginning with that of the best window; None averages.

    Example:
        `bm25 >> dataset.text_loader() >> ld.KMaxP(k=3)`
    """

    _: KW_ONLY
    k: int = argument(3, role="head", at_least=1)
    weights: Sequence[float] | None = argument(None, role="head")

    def head_spec(self) -> HeadSpec:
        weights = self.weights
        if isinstance(weights, Sequence | np.ndarray) and not isinstance(weights, str):
            weights = [float(w) for w in weights]
        return "kmaxp", {"k": self.k, "weights": weights}

    def check(self) -> None:
        super().check()
        check_head(self.head_spec())


@dataclass(eq=False, repr=False)
class SoftMaxP(MaxP):
    """Scores a document by a soft maximum of its windows' scores, corrected for their number; windows as in `MaxP`.

    `score = t log(mean_i exp(f(query, w_i) / t))` lies between `MaxP` and `AvgP` over the same windows.

    Args:
        temperature: t. Near 0, only the best window counts; for large values, all windows count the same. At 1, a
            window whose logit is 1 lower has about a third of the weight.

    Example:
        `bm25 >> dataset.text_loader() >> ld.SoftMaxP(temperature=0.5)`
    """

    papers: ClassVar[tuple[str, ...]] = ("pinheiro-2015-image",)

    _: KW_ONLY
    temperature: float = argument(1.0, role="head", above=0, below=inf)

    def head_spec(self) -> HeadSpec:
        return "softmaxp", {"temperature": float(self.temperature)}


@dataclass(eq=False, repr=False)
class Birch(KMaxP):
    """Combines the scores of the best sentences with the first-stage score (Yilmaz et al. 2019).

    `score = a * first-stage score + (1 - a) * sum_i weights_i f(query, sentence_(i))`, `f` the cross-encoder.

    The first-stage score is the `score` column of the input. The paper tunes `a` and `weights` by grid search; use
    `pt.GridSearch`. There are no `window_size` and `stride`, because windows are sentences.

    Args:
        first_stage_weight: `a`, between 0 and 1.
        k: the number of sentences.
        weights: `k` weights, beginning with that of the best sentence; None averages.

    Example:
        `bm25 >> dataset.text_loader() >> ld.Birch(first_stage_weight=0.4)`
    """

    _: KW_ONLY
    first_stage_weight: float = argument(0.5, role="head", at_least=0, at_most=1)
    window_size: ClassVar[Any] = Without()  # type: ignore[misc]
    stride: ClassVar[Any] = Without()  # type: ignore[misc]

    papers: ClassVar[tuple[str, ...]] = ("yilmaz-2019-birch",)
    _sized_by: ClassVar[str] = ""

    def default_windows(self) -> Windows:
        return SentenceWindows(max_sentences=1)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """As `CrossEncoder.transform`; the input needs a `score` column as well."""
        first_stage = self._first_stage_scores(inp)
        out = super().transform(inp)
        a = self.first_stage_weight
        return pt.model.add_ranks(out.assign(score=a * first_stage + (1.0 - a) * out["score"].to_numpy()))

    def summary(self, candidates: pd.DataFrame) -> Coverage:
        """As `CrossEncoder.summary`; the input needs a `score` column as well."""
        self._first_stage_scores(candidates)
        return super().summary(candidates)

    def rank(self, query: str, texts: Sequence[str]) -> pd.DataFrame:
        """Raise ValueError: plain texts have no first-stage score."""
        raise ValueError("Birch mixes in a first stage's score, which plain texts lack: call it with a result frame")

    def _first_stage_scores(self, inp: pd.DataFrame) -> np.ndarray:
        validated(inp, self.text_field, self.text_loader, self, extra=("score",))
        name = type(self).__name__
        return numeric(inp, "score", f"the input of {name}", f"{name} mixes in the first stage's score")


@dataclass(eq=False, repr=False)
class AvgP(CrossEncoder):
    """Scores a document by the mean score of its disjoint chunks (Boytsov et al. 2025).

    `score = mean_w f(query, w)`, over the windows `w` of the document; `f` is the cross-encoder.

    Args:
        window_size: tokens in a chunk; None for 477 (512 - 32 - 3), or less if the backbone cannot take as many.

    Example:
        `bm25 >> dataset.text_loader() >> ld.AvgP()`
    """

    head_name: ClassVar[str] = "avgp"
    papers: ClassVar[tuple[str, ...]] = ("boytsov-2025-positional",)

    _: KW_ONLY
    window_size: int | None = argument(None, role="windows", at_least=1)

    _sized_by: ClassVar[str] = "window_size"

    def default_windows(self) -> Windows:
        return GreedyChunks(self.window_size)


_TRANSFORMER = {"aggregation": "transformer"}


@dataclass(eq=False, repr=False)
class PARADE(SlidingReranker):
    """Aggregates window vectors into a document vector, which it scores (Li et al.; Boytsov et al. 2025).

    `score = u · aggregate_w [CLS]_w`, over the windows `w` of the document.

    Args:
        aggregation: `"avg"`, `"max"`, `"attn"` or `"transformer"`. With a cross-encoder as backbone, the first three
            need no training, and `"attn"` starts as `"avg"`. The transformer must be trained.
        attention: for `"attn"`: `"vector"` for one weight per window, as in the PARADE paper, or `"elementwise"` for
            one per window and feature, as in the experiments of Boytsov et al. 2025.
        aggregator: for `"transformer"`: a checkpoint whose layers are used as the aggregator, e.g.
            `"cross-encoder/ms-marco-MiniLM-L6-v2"` (PRETR-L6); None for randomly initialized layers (RAND-L2).
        layers: the number of random layers.
        attention_heads: of random layers; None for the largest number up to 12 that divides the hidden size.
        separators: for `"transformer"`: `[c, s, windows, s]` (Boytsov et al. 2025) or `[c, windows]` (Li et al.).
        positions: for `"transformer"`: whether the order of the windows counts.
        special_vectors: for `"transformer"`: the initial values of `c` and `s`, `"words"` for the embeddings of [CLS]
            and [SEP], or `"random"`. None for random values with a checkpoint and for words with random layers, as in
            Boytsov et al. 2025.
        query_states: for `"transformer"`: whether its input includes the query's token states (PRETR-Q).
        separate_query_projection: with `query_states`: whether these states have a separate linear layer.
        stride: tokens from one window's start to the next one's; 75, with windows of 150, in the configurations of
            Boytsov et al. 2025, although some of their results are for 100 (see the notes in `presets`).

    Example:
        `(bm25 >> dataset.text_loader() >> ld.PARADE(aggregation="attn")).fit(topics, qrels)`
    """

    _: KW_ONLY
    aggregation: str = argument("attn", role="head", choices=("avg", "max", "attn", "transformer"))
    attention: str = argument("vector", role="head", choices=("vector", "elementwise"), needs={"aggregation": "attn"})
    aggregator: str | Path | None = argument(None, role="checkpoint", needs=_TRANSFORMER)
    layers: int = argument(2, role="head", at_least=1, needs={**_TRANSFORMER, "aggregator": None})
    attention_heads: int | None = argument(None, role="head", at_least=1, needs={**_TRANSFORMER, "aggregator": None})
    separators: bool = argument(True, role="head", needs=_TRANSFORMER)
    positions: bool = argument(True, role="head", needs=_TRANSFORMER)
    special_vectors: str | None = argument(None, role="head", choices=("words", "random"), needs=_TRANSFORMER)
    query_states: bool = argument(False, role="head", needs=_TRANSFORMER)
    separate_query_projection: bool = argument(False, role="head", needs={**_TRANSFORMER, "query_states": True})
    stride: int = argument(75, role="windows", at_least=1)

    papers: ClassVar[tuple[str, ...]] = ("li-2024-parade", "boytsov-2025-positional")

    _of_transformer: ClassVar[tuple[str, ...]] = (
        "aggregator", "layers", "attention_heads", "separators", "positions", "special_vectors",
    )  # fmt: skip

    def head_spec(self) -> HeadSpec:
        if self.aggregation == "transformer":
            options = {name: getattr(self, name) for name in self._of_transformer}
            options["aggregator"] = None if self.aggregator is None else str(self.aggregator)
            if not self.query_states:
                return "parade-transformer", options
            return "parade-transformer-query", {**options, "separate_projection": self.separate_query_projection}
        if self.aggregation == "attn" and self.attention == "elementwise":
            return "parade-attn-elementwise", {}
        return f"parade-{self.aggregation}", {}

    def weight_arguments(self) -> dict[str, Any]:
        return {name: value for name, value in super().weight_arguments().items() if name != "aggregator"}  # the head's


@dataclass(eq=False, repr=False)
class SeparateReranker(SlidingReranker):
    """Base of the models that encode queries and windows separately and cache the states of windows.

    Args:
        cached_bytes: the maximum memory in bytes for cached windows and the tokens of their texts. What is cached is
            computed again when weights change, except through `.data` (use `torch.no_grad()`).
    """

    _: KW_ONLY
    cached_bytes: int = argument(CACHED_BYTES, role="computing", at_least=1)
    pooling: ClassVar[Any] = Without()  # type: ignore[misc]
    template: ClassVar[Any] = Without()  # type: ignore[misc]
    instruction: ClassVar[Any] = Without("")  # type: ignore[misc]
    instruction_field: ClassVar[Any] = Without()  # type: ignore[misc]

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        model = super()._set_up(model, settings)
        encoder: Any = model.encoder
        encoder.cache.max_bytes = self.cached_bytes
        return model

    def check(self) -> None:
        super().check()
        if resolve_layout(self.layout).shared_budget:
            raise ValueError(f"layout={self.layout!r} is for a query and a text in one input: here each is an input")


@dataclass(eq=False, repr=False)
class LateIR(SeparateReranker):
    """PARADE-LATEIR: encodes queries and windows separately, lets them interact, and aggregates (Boytsov et al. 2025).

    `score = u · aggregate_w interaction(E(query), E(w))`, where the encoder `E` reads either the query or the window.

    The states of windows do not depend on the query and are cached. Scoring a document for another query only takes the
    interaction and the aggregation. Must be trained.

    Args:
        backbone: encodes queries and windows separately. BERT-base in Boytsov et al. 2025.
        interaction: the transformer over the states of a query and a window.
        aggregator: the transformer that aggregates windows, as in `PARADE`; None for two random layers.
        cached_bytes: the maximum memory in bytes for cached windows and the tokens of their texts. With the default
            models and windows, each token of a document takes about 3 KB. What is cached is computed again when
            weights change, except through `.data` (use `torch.no_grad()`).
        stride: 75, with windows of 150, in Boytsov et al. 2025.
        training: the recipe for `fit`; None for `TrainingArgs()` with three epochs and a learning rate of 1e-5 also for
            the aggregator, as in Boytsov et al. 2025.

    Example:
        `(bm25 >> dataset.text_loader() >> ld.LateIR()).fit(topics, qrels)`
    """

    _: KW_ONLY
    interaction: str | Path = argument(DEFAULT_INTERACTION, role="checkpoint")
    aggregator: str | Path | None = argument(DEFAULT_BACKBONE, role="checkpoint")
    stride: int = argument(75, role="windows", at_least=1)

    papers: ClassVar[tuple[str, ...]] = ("boytsov-2025-positional",)
    encoder_class: ClassVar[type[WindowEncoder]] = LateInteractionEncoder

    def check(self) -> None:
        check_checkpoint(interaction=self.interaction)
        super().check()

    def head_spec(self) -> HeadSpec:
        return "parade-transformer", {"aggregator": None if self.aggregator is None else str(self.aggregator)}

    def load_backbone(self) -> Backbone:
        return load_late_backbone(str(self.backbone), str(self.interaction), trust_remote_code=self.trust_remote_code)

    def default_training(self) -> TrainingArgs:
        rates = {"encoder.": 1e-5, "encoder.interaction.": 1e-4, "head.aggregator.": 1e-5, "": 1e-4}
        return TrainingArgs(epochs=3, learning_rates=rates)


PAPERS_OF_MATCHING = {"knrm": "xiong-2017-end", "pacrr": "hui-2017-pacrr", "drmm": "guo-2016-deep"}
"""From the `aggregation` of CEDR to keys of `references.bib`."""


@dataclass(eq=False, repr=False)
class CEDR(AvgP):
    """Combines an interaction model over contextual token embeddings with `[CLS]` (MacAvaney et al. 2019).

    `score = u · [matches(query, document); mean_w [CLS]_w]`, with similarities of the token embeddings of all layers.

    Documents are divided into disjoint chunks as in `AvgP`. With a cross-encoder as backbone, `"knrm"` starts as
    `AvgP`; the others must be trained. The paper trains the plain ranker first:
    `ld.CEDR(...).start_from(trained_avgp).fit(...)`.

    Args:
        aggregation: `"knrm"` (soft counts of matches), `"pacrr"` (best n-gram matches) or `"drmm"` (histograms of
            matches).

    Example:
        `(bm25 >> dataset.text_loader() >> ld.CEDR(aggregation="knrm")).fit(topics, qrels)`
    """

    _: KW_ONLY
    aggregation: str = argument("knrm", role="head", choices=("knrm", "pacrr", "drmm"))

    papers: ClassVar[tuple[str, ...]] = ("macavaney-2019-cedr",)

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model and its interaction model."""
        return [*super().cited(), PAPERS_OF_MATCHING[self.aggregation]]

    def head_spec(self) -> HeadSpec:
        if self.aggregation == "pacrr":
            return "cedr-pacrr", {"query_size": self.max_query_len}
        return f"cedr-{self.aggregation}", {}

    def check(self) -> None:
        super().check()
        if self.aggregation == "pacrr" and self.max_query_len is None:
            raise ValueError("aggregation='pacrr' has weights for each token of a query: max_query_len needs a number")


@dataclass(eq=False, repr=False)
class NeuralModel1(AvgP):
    """The probability that the document generates the query, over contextual embeddings (Boytsov & Kolter 2021).

    `score = sum_q log((1 - smoothing) * mean_t T(q | t) + smoothing * background)`, over tokens.

    Documents are divided into disjoint chunks as in `AvgP`. Must be trained.

    Args:
        smoothing: the weight of the background model.
        background: the probability of each query token in the background model.
        self_translation: the probability that a word piece translates to itself; None learns it. Try 0.5 if there is
            little training data.
        projection: the size of the projected embeddings.
        units: the number of units of the network's first hidden layer; the second has half as many.

    Example:
        `(bm25 >> dataset.text_loader() >> ld.NeuralModel1()).fit(topics, qrels)`
    """

    _: KW_ONLY
    smoothing: float = argument(0.1, role="head", above=0, below=1)
    background: float = argument(1e-5, role="head", above=0, below=1)
    self_translation: float | None = argument(None, role="head", above=0, below=1)
    projection: int = argument(64, role="head")
    units: int = argument(64, role="head")
    pooling: ClassVar[Any] = Without()  # type: ignore[misc]

    papers: ClassVar[tuple[str, ...]] = ("boytsov-2021-exploring",)

    def head_spec(self) -> HeadSpec:
        return "model1", arguments_of(self, "head")

    def check(self) -> None:
        super().check()
        check_head(self.head_spec())


LONG_BACKBONE = "Alibaba-NLP/gte-reranker-modernbert-base"
"""A public cross-encoder with one logit that takes 8,192 tokens (149M parameters)."""


@dataclass(eq=False, repr=False)
class LongP(CrossEncoder):
    """Scores query and document in one input of a model for long inputs (Boytsov et al. 2025, section 3).

    `score = f(query, document)`, `f` a cross-encoder for long inputs.

    To compare it with FirstP on the same backbone, use `LongP(backbone, max_doc_len=477)` and `max_doc_len=1431`.
    Documents that exceed the backbone's maximum input length are truncated, with a warning and an entry in `coverage`.

    Args:
        backbone: Longformer, BigBird, ModernBERT, NomicBERT, EuroBERT or another encoder, plain or as a cross-encoder;
            JINA-v2 or MosaicBERT, without their remote code; a language model (Llama, Qwen3, ...), plain, with a
            classification head, or as a reranker that answers yes or no. Default: a public reranker.
        global_attention: for Longformer: `"query"` (first token, query and the separator after it, as measured in
            Boytsov et al. 2025), `"query_only"` (as described there), `"cls"`, or `"sentences"`: like `"query"`, with
            the tokenizer's first token also before each sentence of the document (QDS-Transformer, Jiang et al. 2020).
            These tokens count as tokens of the document, in limits and in `coverage`.
        attention_window: for Longformer: the number of tokens that each token sees, half of them on either side; None
            for the value in its configuration. 128 in QDS-Transformer's code (64 on either side).
        attention_type: for BigBird: `"block_sparse"` or `"original_full"`; None for the value in its configuration.
        attn_implementation: `"sdpa"`, `"flash_attention_2"` or `"eager"`; None for the architecture's best one without
            additional packages. Flash attention needs a GPU and a half-precision `dtype`.

    Example:
        `bm25 >> dataset.text_loader() >> ld.LongP(max_doc_len=1431)`
    """

    head_name: ClassVar[str] = "firstp"
    papers: ClassVar[tuple[str, ...]] = ("boytsov-2025-positional",)

    backbone: str | Path | PairScorer = argument(LONG_BACKBONE, role="checkpoint")
    _: KW_ONLY
    global_attention: str = argument("query", role="weights", choices=GLOBAL_ATTENTION)
    attention_window: int | None = argument(None, role="weights", at_least=1)
    attention_type: str | None = argument(None, role="weights", choices=("block_sparse", "original_full"))
    attn_implementation: str | None = argument(None, role="computing")
    max_windows: ClassVar[Any] = Without()  # type: ignore[misc]
    selection: ClassVar[Any] = Without("first")  # type: ignore[misc]

    def default_windows(self) -> Windows:
        return WholeText(self.max_doc_len)

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model, and behind its architecture if weights are in memory."""
        sentences = ["jiang-2020-long"] if self.global_attention == "sentences" else []
        family = None if self._model is None else self._model.backbone.family
        return [*super().cited(), *sentences, *papers_of(str(self.backbone), family)]

    def _backbone_options(self) -> dict[str, Any]:
        own = ("global_attention", "attention_window", "attention_type", "attn_implementation")
        return {**super()._backbone_options(), **{name: getattr(self, name) for name in own}}

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        model = super()._set_up(model, settings)
        if self.attn_implementation is not None:
            use_attention(model.encoder.backbone, self.attn_implementation)
        return model

    def check(self) -> None:
        super().check()
        if self.attention_window is not None and self.attention_window % 2:
            raise ValueError(f"attention_window={self.attention_window} must be even: half of it is on either side")
