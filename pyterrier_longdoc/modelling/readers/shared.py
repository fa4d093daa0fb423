"""A common limit for query and text, as with the tokenizers' `truncation="longest_first"` (JINA, MOSAIC, TinyLLAMA)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ...common.coverage import PairCoverage
from ..inputs import PairInputs, Query, Settings
from ..layout import layout_name
from ..tokens import TokenizedText
from .base import Reader

PUBLISHED_SPECIALS = 3
"""The special tokens in the limit, even if the tokenizer adds another number (Llama's: two)."""


class SharedReader(Reader):
    """Reads up to `max_query_len` + `max_doc_len` + 3 tokens, special ones included; the longer one is truncated first.

    A query is not truncated to `max_query_len`, and after a short one the text may be longer.
    """

    follows_layout = True

    def __init__(self, backbone: Any, settings: Settings) -> None:
        super().__init__(backbone, settings)
        text = min(filter(None, (self.windows.largest, settings.max_doc_len)), default=sys.maxsize)
        longest = min((self.max_query_len or 0) + text + PUBLISHED_SPECIALS, self.longest or sys.maxsize)
        self.budget = longest - len(self.specials)
        self.query_limit = sys.maxsize
        self._cut_by = f"layout={layout_name(settings.layout)}"

    def read(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[PairInputs]:
        return [self._read(query, text) for query, text in zip(queries, texts, strict=True)]

    def _read(self, query: Query, text: TokenizedText) -> PairInputs:
        query_size, size = longest_first(query.tokens, len(text), self.budget)
        read = Query(query.text, query.ids[:query_size], query.tokens, query_size)
        row = PairCoverage(
            query.text,
            len(text),
            size,
            1,
            query.tokens,
            query_size,
            self._cut_by if query_size < query.tokens else "",
            {self._cut_by: len(text) - size} if size < len(text) else {},
        )
        window = self.assemble(read.ids, text.ids[:size])
        return PairInputs(read, text, [(0, size)], [window], row)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "budget": self.budget}


def longest_first(query: int, text: int, budget: int) -> tuple[int, int]:
    """Return how many tokens of a query and a text fit into a common limit; the longer one is truncated first.

    Example:
        >>> longest_first(8, 600, 509), longest_first(400, 600, 509), longest_first(400, 20, 509)
        ((8, 501), (254, 255), (400, 20))
    """
    shorter, longer = sorted((query, text))
    shorter = min(shorter, budget // 2)
    longer = min(longer, budget - shorter)
    return (longer, shorter) if query > text else (shorter, longer)
