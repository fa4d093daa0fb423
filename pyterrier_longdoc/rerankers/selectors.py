"""Selectors of windows by a model: a bi-encoder, or a small cross-encoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..common.arguments import argument, check_type
from ..common.key import description
from ..common.warnings import warn_of_coverage
from ..modelling.preselection import FOLDER, WindowSelector
from ..modelling.tokens import Span, TokenizedText
from .biencoder import BiEncoder
from .cross_encoder import CrossEncoder
from .saved import arguments_from, config_of, write

_DECIMALS = 5
"""Scores are compared to this many decimals, because those of the same text can differ in the last bits."""


@dataclass(frozen=True)
class ModelWindows(WindowSelector):
    """Base of the selectors that score windows with a model, as if they were documents.

    The model reads the same text as the reranker, with the title before the window. The windows of many documents are
    scored together, each distinct window once. Give the model `dtype="float32"`: in half precision, rounding depends on
    the batch and can decide between windows with almost equal scores.
    """

    model: Any = argument()

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        sizes = list(map(len, spans))
        texts = [
            document.input_text(span) for document, windows in zip(documents, spans, strict=True) for span in windows
        ]
        queries = [query for query, size in zip(queries, sizes, strict=True) for _ in range(size)]
        # Weights that are loaded in inference mode could not be trained afterwards.
        with torch.inference_mode(False):
            scored = self.model.score(queries, texts)
        warn_of_coverage(self.model, scored.coverage, ", which selects windows,")
        return np.split(np.round(scored.scores, _DECIMALS), np.cumsum(sizes)[:-1])

    def describe(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "k": self.k, "model": description(self.model)}

    def cited(self) -> list[str]:
        return [*super().cited(), *self.model.cited()]


@dataclass(frozen=True)
class EmbeddingWindows(ModelWindows):
    """Keeps the `k` windows that are most similar to the query by a bi-encoder (as in KeyB2).

    The bi-encoder caches its embeddings, so a document that is a candidate for several queries is embedded once.

    Args:
        k: the number of windows.
        model: a `BiEncoder`. It reads each window as a document; its own `aggregation` applies to long ones.

    Example:
        `ld.PARADE(preselect=ld.EmbeddingWindows(3, ld.BiEncoder()))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2024-keyb2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type(BiEncoder, "a BiEncoder", model=self.model)

    def to_config(self, folder: Path) -> dict[str, Any]:
        # A bi-encoder is never trained, so its arguments describe it.
        if self.model.trust_remote_code:
            raise ValueError(f"{self.model!r} runs remote code, which cannot be stored")
        return {"type": type(self).__name__, "k": self.k, "model": config_of(self.model)}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> WindowSelector:
        return cls(config["k"], BiEncoder(**arguments_from(BiEncoder, config["model"])))


@dataclass(frozen=True)
class CrossEncoderWindows(ModelWindows):
    """Keeps the `k` windows that a smaller cross-encoder scores highest (IDCM, and KeyB with BERT as selector).

    In IDCM, the selector is a kernel model over convolutions. Here it is any reranker of this package, trained on
    labels or, as in IDCM, on the scores of the large model (`TeacherScores`). The large model of IDCM is `KMaxP` with
    weights and other inputs: in the published code (matchmaker, `sigir21_idcm.py`), only the last window of a document
    ends in `[SEP]`, and masked padding replaces the missing neighbours of the first and last windows.

    Args:
        k: the number of windows. 4 in Hofstätter et al. 2021.
        model: a reranker of this package, for instance `FirstP` or, to encode a window once for all queries, `MaxSim`;
            it reads each window as a document.

    Example:
        `ld.KMaxP(large, k=3, window_size=64, stride=50, preselect=ld.CrossEncoderWindows(4, ld.FirstP(small)))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("hofstatter-2021-intra",)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Birch needs more than query and text.
        model = self.model
        if not isinstance(model, CrossEncoder) or type(model).transform is not CrossEncoder.transform:
            raise ValueError(
                f"{type(self).__name__}: model={model!r} must be a reranker of query and text, for instance FirstP(...)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CrossEncoderWindows:
        # Its model can be trained.
        return replace(self, model=copy.deepcopy(self.model, memo))

    def to_config(self, folder: Path) -> dict[str, Any]:
        write(self.model, folder / FOLDER)
        return {"type": type(self).__name__, "k": self.k}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> WindowSelector:
        return cls(config["k"], CrossEncoder.load(folder / FOLDER))
