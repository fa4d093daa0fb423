"""Code of a user's own that is edited: the same names, module and arguments, and other scores.

Each function makes its class anew, as a notebook's cell or a new process does; `sign` is what was edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import pyterrier_longdoc as ld

SMALL: dict[str, Any] = {"max_query_len": 8}


def with_head(sign: int, backbone: str, **options: Any) -> Any:
    class EditedHead(ld.Head, name="edited"):
        from_scores = True

        def forward(self, encoded):
            scores = self.score(encoded.cls).masked_fill(~encoded.mask, float("-inf"))
            return sign * scores.max(1).values

    @dataclass(eq=False, repr=False)
    class WithEditedHead(ld.CrossEncoder):
        head_name = "edited"

        def default_windows(self):
            return ld.GreedyChunks(8)

    return WithEditedHead(backbone, **SMALL, **options)


def with_windows(sign: int, backbone: str, **options: Any) -> Any:
    @dataclass(frozen=True)
    class EditedWindows(ld.Windows):
        @property
        def largest(self):
            return 4

        def resized(self, capacity):
            return self

        def spans(self, tokens):
            return [(0, 4)] if sign > 0 else [(max(0, len(tokens) - 4), len(tokens))]

    return ld.MaxP(backbone, windows=EditedWindows(), **SMALL, **options)


def with_selector(sign: int, backbone: str, **options: Any) -> Any:
    @dataclass(frozen=True)
    class EditedSelector(ld.modelling.preselection.WindowSelector):
        needs_text = False

        def scores(self, queries, documents, spans):
            return [-sign * np.arange(len(windows), dtype=float) for windows in spans]

    return ld.MaxP(backbone, window_size=4, stride=4, preselect=EditedSelector(1), **SMALL, **options)


def with_class(sign: int, backbone: str, **options: Any) -> Any:
    @dataclass(eq=False, repr=False)
    class EditedMaxP(ld.MaxP):
        def score(self, queries, texts, bar=None):
            scored = super().score(queries, texts, bar)
            scored.scores *= sign
            return scored

    return EditedMaxP(backbone, window_size=4, stride=4, **SMALL, **options)


EDITED = {
    "head": (with_head, "WithEditedHead"),
    "windows": (with_windows, "EditedWindows"),
    "selector": (with_selector, "EditedSelector"),
    "subclass": (with_class, "EditedMaxP"),
}
"""By what is the user's own: what makes a model of it, and the name of the class."""
