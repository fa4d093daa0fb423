"""Bi-encoders over windows: queries and windows are embedded apart and compared by cosine or dot product."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, check_choice, check_positive
from ..modelling.embed import POOLINGS, SIMILARITIES, EmbeddingEncoder, Similarity, shared_encoder
from ..modelling.scorer import LongDocScorer
from ..modelling.windows import SlidingWindows, Truncate, Windows
from .base import WindowReranker

DEFAULT_BIENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(eq=False, repr=False)
class BiEncoder(WindowReranker):
    """Reranks by the similarity of a query's embedding to those of a document's windows; needs no training.

    The encoder of a checkpoint is loaded once for all bi-encoders of a process that are on one device, and its
    embeddings are remembered: several aggregations of one encoder take the memory and the time of one.

    Args:
        backbone: any Hugging Face encoder that was trained to embed texts, or a folder.
        aggregation: `"first"` window, `"max"` or `"avg"` of the windows' similarities.
        pooling: `"mean"` of the token states or `"cls"`; None for what a sentence-transformers checkpoint names (its
            dense layer, if it has one, is applied too), else `"mean"`.
        similarity: `"cosine"` or `"dot"`; None for what a sentence-transformers checkpoint names, else cosine.
        query_prefix: put before every query, e.g. `"query: "` for E5; None for what a sentence-transformers checkpoint
            names, else nothing.
        passage_prefix: put before every window, e.g. `"passage: "` for E5; None as above.
        position_step: of an encoder whose table of positions was stretched: how far positions of short inputs are
            apart; 8 for `"dwzhu/e5-base-4k"`.
        window_size: tokens in a window; None for 150, and for `"first"` for 477 or what the backbone takes.
        stride: tokens from one window's start to the next one's; of no effect for `"first"`.
        windows: how documents are cut; replaces `window_size` and `stride`. `"first"` reads the first of them.

    All other arguments: see :class:`~pyterrier_longdoc.rerankers.base.WindowReranker`.
    """

    backbone: str | Path = argument(DEFAULT_BIENCODER, role="checkpoint")
    _: KW_ONLY
    aggregation: str = argument("max", role="head")
    pooling: str | None = argument(None, role="head")
    similarity: str | None = argument(None, role="head")
    query_prefix: str | None = argument(None, role="input")
    passage_prefix: str | None = argument(None, role="input")
    position_step: int = argument(1, role="input")
    window_size: int | None = argument(None, role="windows")
    stride: int = argument(100, role="windows")

    papers: ClassVar[tuple[str, ...]] = ("reimers-2019-sentence",)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """As `WindowReranker.transform`; TypeError where a pipeline without a trainable stage is to be fitted."""
        # PyTerrier's fit of a pipeline trains its Estimators, and where it has none it scores and does nothing else.
        caller: Any = getattr(inspect.currentframe(), "f_back", None)
        fits = caller is not None and caller.f_code is pt.Compose.fit.__code__
        if fits and not any(isinstance(stage, pt.Estimator) for stage in caller.f_locals["self"]):
            raise TypeError(
                f"{self!r} has no fit, nor has another stage of this pipeline: a bi-encoder needs no training here; to "
                f"train its encoder as a cross-encoder, put MaxP(...).start_from(BiEncoder(...)) in its place"
            )
        return super().transform(inp)

    def set_up(self) -> LongDocScorer:
        # Never trained, it need not be held on to: copies load it again where they need it.
        settings = self.settings()
        shared = shared_encoder(str(self.backbone), settings.device, trust_remote_code=self.trust_remote_code)
        if shared.backbone.final is not None:
            message = (
                f"{str(self.backbone)!r} is a cross-encoder: as a bi-encoder it was never trained, so its similarities "
                f"mean little. Give a model that was trained to embed texts."
            )
            self._warn_once(message, UserWarning)
        encoder = EmbeddingEncoder(
            shared,
            pooling=self.pooling,
            similarity=self.similarity,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            position_step=self.position_step,
        )
        head, tokenizer = Similarity(self.aggregation), shared.backbone.tokenizer
        return LongDocScorer(encoder, tokenizer, head, settings, shared.tokens).eval()

    def make_windows(self) -> Windows:
        windows = super().make_windows()
        if self.aggregation == "first":
            return windows if isinstance(windows, Truncate) else replace(windows, max_windows=1, selection="first")
        return windows

    def default_windows(self) -> Windows:
        if self.aggregation == "first":
            return Truncate(self.window_size)
        return SlidingWindows(150 if self.window_size is None else self.window_size, self.stride)

    def check(self) -> None:
        check_choice("aggregation", self.aggregation, ("first", "max", "avg"))
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.similarity is not None:
            check_choice("similarity", self.similarity, SIMILARITIES)
        check_positive(position_step=self.position_step)
        super().check()
        self.make_windows()
