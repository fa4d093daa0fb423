"""Bi-encoders over windows: queries and windows are embedded apart and compared by cosine or dot product."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice, check_positive
from ..common.coverage import Coverage, Explanation
from ..common.frames import TextField, rerank
from ..common.presentation import WithBackbone
from ..modelling.devices import check_devices, resolve_devices, resolve_dtype
from ..modelling.embed import POOLINGS, SIMILARITIES, BiEncoderScorer, SharedEncoder, shared_encoder
from ..modelling.windows import SlidingWindows, Truncate, Windows
from .checks import check_only_windows, check_settings

DEFAULT_BIENCODER = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(eq=False, repr=False)
class BiEncoder(WithBackbone, pt.Transformer):
    """Reranks by the similarity of a query's embedding to those of a document's windows; needs no training.

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
        max_windows: keep at most this many windows of a document; None keeps all.
        selection: which of them: `"first"` or `"first_last_random"` (PARADE's choice).
        max_doc_len: read only so many tokens of a document; None reads all.
        max_query_len: read only so many tokens of a query.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent: a text loader, or a dataset or index with one.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens in one pass; None for 16,384 on a GPU and 2,048 on a CPU. Where memory runs out,
            passes are made smaller by themselves.
        device: `"cuda"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: precision of the backbone when it scores: `"float32"`, `"bfloat16"` or `"float16"`; None for float32 on a
            CPU, so that all CPUs give the same scores, and for bfloat16 on a GPU that has it natively; `"fastest"` for
            what the device is best at: bfloat16 also on CPUs with AMX or AVX512_BF16. `coverage.dtype` tells which it
            was; in bfloat16 scores differ in the third digit.
        explain: add the columns described in `LongDocReranker`.
        trust_remote_code: run modelling code that the backbone's checkpoint brings along.
        verbose: show a progress bar.
        seed: of the choice of windows.

    Attributes:
        coverage: how much of the text the last `transform` read, with which precision, and how much of what was
            computed was padding; None before.
    """

    backbone: str | Path = DEFAULT_BIENCODER
    _: KW_ONLY
    aggregation: str = "max"
    pooling: str | None = None
    similarity: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    position_step: int = 1
    window_size: int | None = None
    stride: int = 100
    windows: Windows | None = None
    max_windows: int | None = None
    selection: str = "first"
    max_doc_len: int | None = None
    max_query_len: int = 32
    text_field: TextField = "text"
    text_loader: Any = None
    batch_size: int = 64
    max_batch_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None
    explain: bool = False
    trust_remote_code: bool = False
    verbose: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self._warned_cut = False
        self._encoder: SharedEncoder | None = None
        self._encoder_for: tuple[Any, ...] | None = None
        self._check()

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Scores every row.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that do not fit together or the backbone.
        """
        return rerank(self, inp, self._score)

    def load_scorer(self) -> BiEncoderScorer:
        """The model in memory, loaded if need be and set up by the current arguments."""
        self._check()
        wanted = (str(self.backbone), self.trust_remote_code)
        if self._encoder is None or self._encoder_for != wanted:
            self._encoder = shared_encoder(str(self.backbone), trust_remote_code=self.trust_remote_code)
            self._encoder_for = wanted
            if self._encoder.backbone.final is not None:
                warnings.warn(
                    f"{str(self.backbone)!r} is a cross-encoder: as a bi-encoder it was never trained, so its "
                    f"similarities mean little. Give a model that was trained to embed texts.",
                    stacklevel=2,
                )
        scorer = BiEncoderScorer(
            self._encoder,
            self._make_windows(),
            aggregation=self.aggregation,
            pooling=self.pooling,
            similarity=self.similarity,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            position_step=self.position_step,
            max_query_len=self.max_query_len,
            max_doc_len=self.max_doc_len,
        )
        scorer.encoder.batch_size, scorer.encoder.max_batch_tokens = self.batch_size, self.max_batch_tokens
        return scorer.to(resolve_devices(self.device)[0])

    def __getstate__(self) -> dict[str, Any]:
        # The encoder is never trained: it is loaded again where it is needed.
        return {**self.__dict__, "_encoder": None}

    def _score(
        self, queries: list[str], texts: list[str], on_rows: Callable[[int], None] | None
    ) -> tuple[np.ndarray, list[Explanation], Coverage]:
        scorer = self.load_scorer()
        dtype = resolve_dtype(self.dtype, scorer.device)
        if self.explain:
            scores, explanations = scorer.explain(queries, texts, dtype=dtype, on_rows=on_rows)
        else:
            scores, explanations = scorer.score(queries, texts, dtype=dtype, on_rows=on_rows), []
        return scores, explanations, scorer.coverage

    def _make_windows(self) -> Windows:
        first = self.aggregation == "first"
        if self.windows is not None:
            check_only_windows(self)
            return replace(self.windows, max_windows=1, selection="first") if first else self.windows
        if first:
            return Truncate(self.window_size)
        size = 150 if self.window_size is None else self.window_size
        windows = SlidingWindows(size, self.stride)
        return replace(windows, max_windows=self.max_windows, selection=self.selection, seed=self.seed)

    def _check(self) -> None:
        check_choice("aggregation", self.aggregation, ("first", "max", "avg"))
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.similarity is not None:
            check_choice("similarity", self.similarity, SIMILARITIES)
        check_positive(position_step=self.position_step)
        check_settings(self)
        check_devices(self.device, several=False)
        self._make_windows()
