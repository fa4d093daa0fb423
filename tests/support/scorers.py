"""Models put together by hand, what they read, and what passes through their backbones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyterrier_longdoc.common.coverage import Explanation
from pyterrier_longdoc.modelling.backbones.load import Backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.inputs import InputFormat, Settings
from pyterrier_longdoc.modelling.layout import resolve_layout
from pyterrier_longdoc.modelling.model import Model, ReadPairs
from pyterrier_longdoc.modelling.windows import SlidingWords, Truncate, Windows


def scorer_of(backbone: Backbone, windows: Windows, head, *, encoder=WindowEncoder, layout="pair", **settings) -> Model:
    """A model in evaluation mode; the layout may be given by name."""
    settings = Settings(windows, layout=resolve_layout(layout), **settings)
    return Model(encoder(backbone), backbone.tokenizer, head, settings, backbone=backbone).eval()


def padded(form: InputFormat, query: int, window: int | None, layout="padded") -> InputFormat:
    """A format with queries, and windows unless they are of no given size, of so many tokens."""
    windows = SlidingWords() if window is None else Truncate(window)
    return form.fit(Settings(windows, max_query_len=query, layout=resolve_layout(layout)))[1]


def read_of(model: Model, queries: Sequence[str], texts: Sequence) -> ReadPairs:
    """What is read of as many pairs as there are queries."""
    everyone = range(len(queries))
    return model.read(model.read_queries(queries), everyone, model.tokenize(texts), everyone)


def explained(scorer: Model, queries, texts) -> tuple[np.ndarray, list[Explanation]]:
    """Scores, and how windows contributed."""
    scored = scorer.score(queries, texts, explain=True)
    return scored.scores, scored.explanations


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
