"""Selectors of windows that ask a model: the similarity of embeddings, a small cross-encoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..modelling.preselection import FOLDER, Preselection, WindowSelector
from ..modelling.texts import Span, TokenizedText
from .base import LongDocReranker, from_config
from .biencoder import BiEncoder

_DECIMALS = 5
"""Scores of models are rounded before they are compared: the same text may differ in the last bits between batches."""


@dataclass(frozen=True)
class ModelWindows(WindowSelector):
    """Base of the selectors that score a window with a model, as if it were a document of its own.

    It gets the text that the reranker reads, the title before the window included. All windows of many
    documents are scored together, each distinct one once. In half precision windows that are as
    good as equal may be told apart by rounding, which depends on the batch: give the model `dtype="float32"`.
    """

    model: Any

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        """See the base class."""
        asked = [query for query, own in zip(queries, spans, strict=True) for _ in own]
        texts = []
        for document, own in zip(documents, spans, strict=True):
            texts += [document.shown(span) for span in own]
        # Weights that were loaded in the caller's inference mode could not be trained afterwards.
        with torch.inference_mode(False):
            scored = self.model.score_pairs(asked, texts)
        self.model.warn_of_losses(scored.coverage, ", which selects windows,")
        return np.split(np.round(scored.scores, _DECIMALS), np.cumsum([len(own) for own in spans])[:-1])

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {"type": type(self).__name__, "k": self.k, "model": self.model.describe()}

    def cited(self) -> list[str]:
        """The keys of the papers behind the selection, and behind the model."""
        return [*super().cited(), *self.model.cited()]


@dataclass(frozen=True)
class EmbeddingWindows(ModelWindows):
    """Keeps the `k` windows that a bi-encoder finds most similar to the query (as KeyB2 does).

    The bi-encoder remembers its embeddings, so that a window that several queries ask for is embedded once.

    Args:
        k: how many windows.
        model: a `BiEncoder`. It gets each window as a text; one that is longer than its own windows is scored as its
            `aggregation` says.

    Example:
        `ld.PARADE(preselect=ld.EmbeddingWindows(3, ld.BiEncoder()))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2024-keyb2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, BiEncoder):
            raise ValueError(f"model={self.model!r} must be a BiEncoder; CrossEncoderWindows takes the other rerankers")

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class; a bi-encoder is never trained, so its arguments say all."""
        if self.model.trust_remote_code:
            raise ValueError(f"{self.model!r} runs remote code, which cannot be stored: give another bi-encoder")
        return {"type": type(self).__name__, "k": self.k, "model": self.model.to_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        """See the base class."""
        return cls(config["k"], BiEncoder(**from_config(config["model"])))


@dataclass(frozen=True)
class CrossEncoderWindows(ModelWindows):
    """Keeps the `k` windows that a smaller cross-encoder scores best (IDCM, and KeyB with BERT as selector).

    Differs from IDCM, whose selector is a kernel model over convolutions: here it is any reranker of this package,
    which `fit` trains on labels or, as in IDCM, on the large one's scores (`TeacherScores`). The rest is `KMaxP` with
    weights, but for inputs: in the published code (matchmaker, `sigir21_idcm.py`) only a document's last window ends in
    `[SEP]`, and masked padding stands where its first and last windows have no neighbour.

    Args:
        k: how many windows. 4 in Hofstätter et al. 2021.
        model: a reranker of this package, `FirstP` for instance; it gets each window as a document.

    Example:
        `ld.KMaxP(large, k=3, window_size=64, stride=50, preselect=ld.CrossEncoderWindows(4, ld.FirstP(small)))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("hofstatter-2021-intra",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, LongDocReranker):
            raise ValueError(
                f"model={self.model!r} must be a cross-encoder of this package, FirstP(...) for instance; "
                f"EmbeddingWindows takes a BiEncoder"
            )
        if type(self.model).transform is not LongDocReranker.transform:
            raise ValueError(
                f"{type(self.model).__name__} scores by more than query and text: it cannot select windows"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CrossEncoderWindows:
        # Its model can be trained.
        return replace(self, model=copy.deepcopy(self.model, memo))

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class; the model is saved below the folder."""
        self.model.save(folder / FOLDER)
        return {"type": type(self).__name__, "k": self.k}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        """See the base class."""
        return cls(config["k"], LongDocReranker.load(folder / FOLDER))
