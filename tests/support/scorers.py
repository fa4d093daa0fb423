"""Models put together by hand, what they read, and what passes through their backbones."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pyterrier_longdoc.modelling.backbones.backbone import Backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.inputs import Settings
from pyterrier_longdoc.modelling.layout import resolve_layout
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.windows import Windows


def scorer_of(backbone: Backbone, windows: Windows, head, *, encoder=WindowEncoder, layout="pair", **settings) -> Model:
    """A model in evaluation mode; the layout may be given by name."""
    settings = Settings(windows, layout=resolve_layout(layout), **settings)
    return Model(encoder(backbone), backbone.tokenizer, head, settings, backbone=backbone).eval()


def explained(scorer: Model, queries, texts) -> tuple[np.ndarray, list]:
    """Scores, and the columns that explain each of them."""
    scored = scorer.score(queries, texts, explain=True)
    return scored.scores, list(pd.DataFrame(scored.columns, dtype=object).itertuples(index=False))


class Passes:
    """Records the inputs of each pass through a model's backbone."""

    def __init__(self, scorer: Model) -> None:
        self.inputs: list[dict] = []
        scorer.encoder.backbone.register_forward_pre_hook(
            lambda _, args, kwargs: self.inputs.append(kwargs), with_kwargs=True
        )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Windows and tokens of each pass."""
        return [tuple(inputs["input_ids"].shape) for inputs in self.inputs]

    @property
    def windows(self) -> int:
        """Windows of all passes."""
        return sum(rows for rows, _ in self.shapes)
