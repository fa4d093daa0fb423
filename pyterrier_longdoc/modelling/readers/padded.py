"""The papers' fixed layout (Boytsov et al. 2025, as in FlexNeuART): query and window are padded in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..inputs import Input, Settings
from .base import Reader, Specials, specials_of_pair


class PaddedReader(Reader):
    """Pads the query to `max_query_len` and the window to its largest size, so that all tokens have fixed positions.

    RoBERTa's inputs also have one separator. Backbones that number positions by token ids either count the padding
    inside an input (`positions="columns"`) or, as they do by default, skip it (`"real tokens"`).
    """

    follows_layout = True

    def __init__(self, backbone: Any, settings: Settings) -> None:
        self.first_position = first_position(backbone, settings)
        super().__init__(backbone, settings)
        self.query_size, self.window_size = self.max_query_len, self._size_of(self.windows)

    def make_specials(self, backbone: Any) -> Specials:
        return one_separator(specials_of_pair(backbone))

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        one = self.specials.around(query, content, self.query_size or 0, self.window_size)
        return with_positions(one, self.first_position, self.settings.layout.positions)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "window": self.window_size, "positions": self.settings.layout.positions}


def first_position(backbone: Any, settings: Settings) -> int | None:
    """Return the first position of a backbone that numbers them by token ids, else None; ValueError for its layout."""
    first: int | None = backbone.first_position
    if first is None and settings.layout.positions != "columns":
        raise ValueError(
            "positions='real tokens' is for backbones that number positions by token ids, such as RoBERTa and "
            "Longformer, not for this one: use positions='columns'"
        )
    return first


def one_separator(specials: Specials) -> Specials:
    """Return special tokens as in the papers, also for RoBERTa."""
    parts = {name: getattr(specials, name)[:1] for name in ("prefix", "middle", "suffix")}
    return replace(specials, **parts, types=None if specials.types is None else (0, 0, 0, 1, 1))


def with_positions(one: Input, first: int | None, positions: str) -> Input:
    """Return a padded input with its positions, if the backbone would number them by token ids."""
    if first is None:
        return one
    columns = np.arange(len(one), dtype=np.int32)
    if positions == "real tokens" and one.mask is not None:
        # The positions of padding do not matter: it has that of the real token before it.
        columns = (one.mask.cumsum(dtype=np.int32) - 1).clip(min=0)
    return replace(one, positions=columns + np.int32(first))
