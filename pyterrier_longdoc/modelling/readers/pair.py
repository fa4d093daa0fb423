"""The tokenizer's own layout of a query and a text: `[CLS] query [SEP] window [SEP]`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..inputs import Input, Settings
from .base import Reader, Specials, specials_of_pair


class PairReader(Reader):
    """Reads a query and a window in one input, in the tokenizer's layout for two texts."""

    def __init__(self, backbone: Any, settings: Settings) -> None:
        self.specials = self.make_specials(backbone)
        super().__init__(backbone.tokenizer, settings, longest=backbone.longest_input, rules=backbone.rules)

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around query and window."""
        return specials_of_pair(backbone)

    def special_tokens(self) -> int:
        return len(self.specials)

    def room(self) -> tuple[int, int, int] | None:
        room = None if self.longest is None else self.longest - self.special_tokens()
        return None if room is None else (room, room, room)

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        return self.specials.around(query, content)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "specials": asdict(self.specials)}
