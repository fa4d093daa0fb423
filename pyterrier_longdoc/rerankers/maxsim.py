"""Late interaction over long documents."""

# Without `from __future__ import annotations`: modules of subclasses need the types of the fields, too.
from dataclasses import KW_ONLY, dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from ..common.arguments import Without, argument
from ..modelling.backbones.backbone import Backbone
from ..modelling.encoder import WindowEncoder
from ..modelling.inputs import Settings
from ..modelling.maxsim import MaxSimEncoder, load_token_backbone
from ..modelling.model import Model
from ..modelling.weights import HeadSpec
from ..modelling.windows import GreedyChunks, SlidingWindows, Windows
from ..training import TrainingArgs
from .export import export_vectors
from .models import SeparateReranker

DEFAULT_LATE_INTERACTION = "lightonai/GTE-ModernColBERT-v1"
"""A public late-interaction model (149M parameters, vectors of 128 numbers)."""


@dataclass(eq=False, repr=False)
class MaxSim(SeparateReranker):
    """Late interaction: sums each query token's best match among all document tokens (Khattab & Zaharia 2020).

    `score = sum_q max_t q . t`, over the vectors `q` of the query's tokens and `t` of the tokens of all windows.

    Windows are encoded without the query, and their vectors are cached for all queries. The checkpoint's own prompts or
    marker tokens, query expansion, skip list, projection, normalization and lengths apply.

    Args:
        backbone: a late-interaction checkpoint of sentence-transformers, PyLate or Stanford's ColBERT; any other
            encoder gets a random projection to 128 features and must be trained.
        aggregation: `"document"` for each query token's maximum over all windows, or `"max"` for the best window's
            score.
        window_size: tokens in a window; None for the checkpoint's document length, at most 477.
        stride: tokens from one window's start to the next one's; None for no overlap, which a maximum does not need.
        max_query_len: truncates queries to this many tokens; None for the checkpoint's query length. Query expansion
            still fills up short queries to the checkpoint's length.
        token_pooling: how many similar tokens share a vector, e.g. 2 (Clavié et al. 2024); None for the checkpoint's
            value.
        cached_bytes: the maximum memory in bytes for cached windows and the tokens of their texts. With 128 features,
            a token takes 512 bytes. What is cached is computed again when weights change, except through `.data` (use
            `torch.no_grad()`).
        training: the recipe for `fit`; None for `TrainingArgs()` with learning rates of 1e-5, and 1e-4 for the
            projection.

    `explain=True` adds `term_places`: `(token, start, end, part)` for each token of the query as it is read, with the
    characters of its best match. If tokens are pooled, these are the characters of the window. There are none for
    special tokens and titles.

    Example:
        `bm25 >> dataset.text_loader() >> ld.MaxSim("colbert-ir/colbertv2.0")`
    """

    backbone: str | Path = argument(DEFAULT_LATE_INTERACTION, role="checkpoint")
    _: KW_ONLY
    aggregation: str = argument("document", role="head", choices=("document", "max"))
    window_size: int | None = argument(None, role="windows", at_least=1)  # type: ignore[assignment]
    stride: int | None = argument(None, role="windows", at_least=1, needs="window_size")  # type: ignore[assignment]
    max_query_len: int | None = argument(None, role="input", at_least=1)
    token_pooling: float | None = argument(None, role="input", at_least=1, below=inf)
    layout: ClassVar[Any] = Without("pair")  # type: ignore[misc]

    papers: ClassVar[tuple[str, ...]] = ("khattab-2020-colbert", "santhanam-2022-colbertv2")
    _trained_hint: ClassVar[str] = (
        "it needs no training if the backbone is a late-interaction checkpoint with its own projection"
    )
    encoder_class: ClassVar[type[WindowEncoder]] = MaxSimEncoder

    def cited(self) -> list[str]:
        """Return the keys of the papers behind this model and the pooling of tokens."""
        return [*super().cited(), *(["clavie-2024-reducing"] if (self.token_pooling or 1) > 1 else [])]

    def default_windows(self) -> Windows:
        if self.stride is None or self.window_size is None:
            return GreedyChunks(self.window_size)
        return SlidingWindows(self.window_size, self.stride)

    def head_spec(self) -> HeadSpec:
        return "maxsim", {"aggregation": self.aggregation}

    def load_backbone(self) -> Backbone:
        return load_token_backbone(str(self.backbone), seed=self.seed, trust_remote_code=self.trust_remote_code)

    def default_training(self) -> TrainingArgs:
        return TrainingArgs(learning_rates={"encoder.": 1e-5, "encoder.representation.": 1e-4, "": 1e-4})

    def _set_up(self, model: Model | None, settings: Settings) -> Model:
        model = super()._set_up(model, settings)
        encoder: Any = model.encoder
        encoder.token_pooling = self.token_pooling
        return model

    def export(self, folder: str | Path) -> None:
        """Export a standard checkpoint: a `MultiVectorEncoder` of sentence-transformers 6.2 or later.

        Its similarity of a query and a passage equals the score of a document with one window. `token_pooling` is
        exported, but windows are not.

        Args:
            folder: a new or an empty folder.

        Raises:
            ValueError: if the projection was not trained, or if the folder is not empty.
            ImportError: without sentence-transformers.
        """
        export_vectors(self, folder)
