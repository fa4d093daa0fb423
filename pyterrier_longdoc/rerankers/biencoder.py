"""Bi-encoders over windows: queries and windows are embedded separately and compared by cosine or dot product."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import ClassVar

from ..common.arguments import argument
from ..common.warnings import warn_once
from ..modelling.biencoder import EMBEDDING_POOLINGS, SIMILARITIES, EmbeddingEncoder, Similarity, shared_encoder
from ..modelling.inputs import Settings
from ..modelling.model import Model
from ..modelling.windows import SlidingWindows, Truncate, Windows
from .reranker import Reranker

DEFAULT_BIENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(eq=False, repr=False)
class BiEncoder(Reranker):
    """Scores a document by the similarity of its windows' embeddings to the query's; needs no training.

    `score = max_w cos(E(query), E(w))`, over the windows `w` of the document; or that of the first window, or the mean.

    Bi-encoders with the same checkpoint and device share their encoder and cached embeddings within a process, so
    several aggregations take the memory and the time of one. Changes of weights through `.data` are not detected (use
    `torch.no_grad()`).

    Args:
        backbone: a Hugging Face encoder that was trained to embed texts, or a folder.
        aggregation: the similarity of the `"first"` window, or the `"max"` or `"avg"` of all windows' similarities.
        pooling: `"mean"` of the token states or `"cls"`; None for the setting of a sentence-transformers checkpoint,
            otherwise `"mean"`. Further layers of the checkpoint are always applied.
        similarity: `"cosine"` or `"dot"`; None for the setting of a sentence-transformers checkpoint, otherwise cosine.
        query_prefix: prepended to every query, e.g. `"query: "` for E5; None for the setting of a sentence-transformers
            checkpoint, otherwise nothing.
        passage_prefix: prepended to every window, e.g. `"passage: "` for E5; None as above.
        position_step: the distance between the position ids of short inputs, for encoders with interpolated position
            embeddings; 8 for `"dwzhu/e5-base-4k"`.
        window_size: tokens in a window; None for 150, or 477 for `"first"`, or less if the backbone or a
            sentence-transformers checkpoint has a smaller maximum input length.
        stride: tokens from one window's start to the next one's; None for 100, or for no overlap in smaller windows.
            It has no effect for `"first"`.
        windows: the window rule; replaces `window_size` and `stride`. `"first"` uses the first window.

    Example:
        `bm25 >> dataset.text_loader() >> ld.BiEncoder("intfloat/e5-base-v2", query_prefix="query: ")`
    """

    backbone: str | Path = argument(DEFAULT_BIENCODER, role="checkpoint")
    _: KW_ONLY
    aggregation: str = argument("max", role="head", choices=("first", "max", "avg"))
    pooling: str | None = argument(None, role="head", choices=EMBEDDING_POOLINGS)
    similarity: str | None = argument(None, role="head", choices=SIMILARITIES)
    query_prefix: str | None = argument(None, role="input")
    passage_prefix: str | None = argument(None, role="input")
    position_step: int = argument(1, role="input", at_least=1)
    window_size: int | None = argument(None, role="windows", at_least=1)
    stride: int | None = argument(None, role="windows", at_least=1)

    papers: ClassVar[tuple[str, ...]] = ("reimers-2019-sentence",)

    _sized_by: ClassVar[str] = "window_size"
    encoder_class: ClassVar[type[EmbeddingEncoder]] = EmbeddingEncoder

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        # The model is never trained: copies of this transformer load it again.
        shared = shared_encoder(str(self.backbone), settings.device, trust_remote_code=self.trust_remote_code)
        if shared.backbone.final is not None:
            message = (
                f"{str(self.backbone)!r} is a cross-encoder, not a bi-encoder: its similarities are not "
                f"meaningful. Use a model that was trained to embed texts."
            )
            warn_once(self, message, UserWarning)
        encoder = EmbeddingEncoder(
            shared,
            pooling=self.pooling,
            similarity=self.similarity,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            position_step=self.position_step,
        )
        length, sizes = shared.settings.document_length, (self.windows, self.window_size)
        if length is not None and sizes == (None, None):
            size = min(encoder.window_limit(length), settings.windows.largest or length)
            settings = replace(self, window_size=size).make_settings()
        head, tokenizer = Similarity(self.aggregation), shared.backbone.tokenizer
        new_model = Model(encoder, tokenizer, head, settings, backbone=shared.backbone)
        new_model.origin = "checkpoint"
        return new_model.eval()

    def make_windows(self) -> Windows:
        windows = super().make_windows()
        if self.aggregation == "first":
            return windows if isinstance(windows, Truncate) else replace(windows, max_windows=1, selection="first")
        return windows

    def default_windows(self) -> Windows:
        if self.aggregation == "first":
            return Truncate(self.window_size)
        size = 150 if self.window_size is None else self.window_size
        return SlidingWindows(size, min(100, size) if self.stride is None else self.stride)
