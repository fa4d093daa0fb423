"""Bi-encoders over windows: queries and windows are embedded apart and compared by cosine or dot product."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from ..common.arguments import argument, arguments_of, check_choice, check_positive
from ..modelling.devices import resolve_device, resolve_dtype
from ..modelling.embed import POOLINGS, SIMILARITIES, EmbeddingEncoder, Similarity, shared_encoder
from ..modelling.scorer import LongDocScorer
from ..modelling.settings import Settings
from ..modelling.windows import SlidingWindows, Truncate, Windows
from .base import WindowReranker

DEFAULT_BIENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(eq=False, repr=False)
class BiEncoder(WindowReranker):
    """Reranks by the similarity of a query's embedding to those of a document's windows; needs no training.

    The encoder of a checkpoint is loaded once for all bi-encoders of a process, and its embeddings are remembered.

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

    All other arguments: see `WindowReranker`.
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

    def __post_init__(self) -> None:
        self._scorer: LongDocScorer | None = None
        self._set_up: dict[str, Any] | None = None
        super().__post_init__()

    def load_scorer(self) -> LongDocScorer:
        """The model in memory, loaded if need be and set up by the current arguments."""
        arguments = arguments_of(self)
        if self._scorer is not None and arguments == self._set_up:
            self._scorer.back_to_its_device()
            return self._scorer
        self.check()
        shared = shared_encoder(str(self.backbone), trust_remote_code=self.trust_remote_code)
        known = self._scorer is not None and self._scorer.encoder.shared is shared
        if shared.backbone.final is not None and not known:
            warnings.warn(
                f"{str(self.backbone)!r} is a cross-encoder: as a bi-encoder it was never trained, so its similarities "
                f"mean little. Give a model that was trained to embed texts.",
                stacklevel=2,
            )
        names = ("pooling", "similarity", "query_prefix", "passage_prefix", "position_step")
        encoder = EmbeddingEncoder(shared, **{name: arguments[name] for name in names})
        device = resolve_device(self.device)
        settings = Settings(
            windows=self.make_windows(),
            max_doc_len=self.max_doc_len,
            max_query_len=self.max_query_len,
            batch_size=self.batch_size,
            max_batch_tokens=self.max_batch_tokens,
            device=device,
            dtype=resolve_dtype(self.dtype, device),
        )
        head, tokenizer = Similarity(self.aggregation), shared.backbone.tokenizer
        self._scorer = LongDocScorer(encoder, tokenizer, head, settings, shared.tokens).eval()
        self._set_up = arguments
        return self._scorer

    def __getstate__(self) -> dict[str, Any]:
        # The encoder is never trained: it is loaded again where it is needed.
        return {**self.__dict__, "_scorer": None, "_set_up": None}

    def make_windows(self) -> Windows:
        windows = super().make_windows()
        if self.aggregation == "first":
            return windows if isinstance(windows, Truncate) else replace(windows, max_windows=1, selection="first")
        return windows

    def _default_windows(self) -> Windows:
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
