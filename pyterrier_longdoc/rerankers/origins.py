"""The two origins of a cross-encoder's scores: a checkpoint with weights, and an external scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pyterrier as pt

from ..common.arguments import arguments_of, changed_names, check_checkpoint
from ..common.frames import TruncationWarning
from ..common.warnings import warn_once
from ..modelling.encoder import WindowEncoder
from ..modelling.external import ExternalEncoder, ExternalScorer
from ..modelling.heads import registered_heads
from ..modelling.layout import resolve_layout


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint, whose weights this package trains and saves."""

    reranker: Any
    has_weights: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return str(self.reranker.backbone)

    def check(self) -> None:
        """Raise ValueError if the backbone cannot be the name of a checkpoint."""
        backbone = self.reranker.backbone
        if isinstance(backbone, pt.Transformer) or (callable(backbone) and not isinstance(backbone, type)):
            raise ValueError(f"backbone={backbone!r} is not a checkpoint: use ld.PairScorer(...)")
        if str(backbone).startswith(("http://", "https://")):
            raise ValueError("backbone is an address: use ld.ScoreServer(url)")
        check_checkpoint(backbone=backbone)

    def load(self) -> tuple[Any, Any]:
        """Return the backbone, and the class of the encoder that it becomes."""
        return self.reranker.load_backbone(), self.reranker.encoder_class

    def need_weights(self, what: str) -> None:
        """Do nothing, because a checkpoint has weights."""


@dataclass(frozen=True)
class Scorer:
    """An external scorer without weights: a served model, a function or a transformer."""

    reranker: Any
    has_weights: ClassVar[bool] = False
    name: ClassVar[str] = ""

    def check(self) -> None:
        """Raise ValueError if the model's head needs more than scores, or if arguments would have no effect."""
        reranker, scorer = self.reranker, self.reranker.backbone
        head = registered_heads().get(reranker.head_spec()[0])
        if reranker.encoder_class is not WindowEncoder or not getattr(head, "from_scores", False):
            raise ValueError(
                f"{type(reranker).__name__} needs more than a score per window, and {scorer!r} gives no more: use "
                f"FirstP, MaxP, SumP, AvgP, KMaxP, SoftMaxP, Birch or LongP (your own head: from_scores = True)"
            )
        names = arguments_of(reranker, "weights", "computing").keys() - {"batch_size", "seed"}
        unused = changed_names(reranker, names)
        unused += ["layout"] if resolve_layout(reranker.layout).is_for_pairs else []
        if unused:
            raise ValueError(
                f"{', '.join(sorted(unused))} would have no effect: {scorer!r} alone decides how a query and "
                f"a window are read and scored"
            )

    def load(self) -> tuple[Any, Any]:
        """Return the scorer, and the class of the encoder that calls it; warn if it may truncate windows."""
        warning = self.reranker.backbone.warning()
        if warning is not None:
            warn_once(self.reranker, warning, TruncationWarning)
        return self.reranker.backbone, ExternalEncoder

    def need_weights(self, what: str) -> None:
        """Raise TypeError, because an external scorer has no weights."""
        scorer = self.reranker.backbone
        raise TypeError(
            f"{self.reranker!r} cannot be {what}: it has no weights, because {scorer!r} computes its scores"
        )


def origin_of(reranker: Any) -> Checkpoint | Scorer:
    """Return the origin of the scores of a cross-encoder."""
    return (Scorer if isinstance(reranker.backbone, ExternalScorer) else Checkpoint)(reranker)
