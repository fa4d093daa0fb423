"""Queries and windows as separate inputs, so that a window's states serve all queries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...common.caches import EmbeddingCache
from ...common.frames import Text
from ..inputs import Input, PairInputs, Query, Settings
from ..templates import prefix_tokens
from ..tokens import TokenizedText
from ..windows import Windows
from .base import NOTHING, Reader, Specials, TokenLimits


class SeparateReader(Reader):
    """Reads queries and windows as separate inputs, each optionally after a prefix.

    Args:
        backbone: the encoder.
        settings: the model's settings.
        prefixes: the texts before every query and before every window.
        lengths: the maximum number of tokens of a query and of a window in the checkpoint's training, special ones
            included; used if no argument gives a size. None if only the backbone limits them.

    Attributes:
        cache: keeps tokenized texts for later queries; an encoder gives the cache of its states.
    """

    def __init__(
        self,
        backbone: Any,
        settings: Settings,
        *,
        prefixes: tuple[str, str] = ("", ""),
        lengths: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.prefixes, self.lengths, self.cache = prefixes, lengths, EmbeddingCache(0)
        super().__init__(backbone, settings)

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around windows; set those around queries, and the white space before both."""
        found = [specials_of_text(backbone, prefix) for prefix in self.prefixes]
        for name, prefix, (specials, _) in zip(("query_prefix", "passage_prefix"), self.prefixes, found, strict=True):
            if self.longest is not None and len(specials) >= self.longest:
                raise ValueError(f"{name}={prefix!r} fills the backbone's {self.longest} tokens")
        (self.query_specials, self.query_lead), (specials, self.text_lead) = found
        return specials

    def token_limits(self) -> TokenLimits | None:
        if self.longest is None:
            return None
        query, window = self.longest - len(self.query_specials), self.longest - len(self.specials)
        return TokenLimits(query, window, query + window)

    def requested(self) -> tuple[Windows, int | None]:
        """See the base class; the checkpoint's lengths apply if no argument gives a size."""
        (windows, query), (query_length, length) = super().requested(), self.lengths
        longest = self.longest or sys.maxsize
        if query is None and query_length:
            query = max(1, min(query_length, longest) - len(self.query_specials))
        has_size = windows.resized(windows.largest or sys.maxsize) == windows
        if length and not has_size:
            windows = self.windows_within(windows, max(1, min(length, longest) - len(self.specials)))
        return windows, query

    def tokenize(self, texts: Sequence[Text], *, offsets: bool = False) -> list[TokenizedText]:
        distinct = list(dict.fromkeys(texts))

        def tokenize(new: list[int]) -> list[TokenizedText]:
            return super(SeparateReader, self).tokenize([distinct[i] for i in new], offsets=offsets)

        keys = [(self, offsets, text) for text in distinct]
        found = dict(zip(distinct, self.cache.get_or_compute(keys, tokenize), strict=True))
        return [found[text] for text in texts]

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return the input of a window, which does not depend on the query."""
        return self.specials.around(NOTHING, content)

    def assemble_query(self, query: np.ndarray) -> Input:
        """Return the input of a query."""
        return self.query_specials.around(NOTHING, query)

    def read(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[PairInputs]:
        """See the base class; each query and each window of a text is assembled once for all pairs."""
        cuts = self.split(queries, texts)
        query_inputs = {query: self.assemble_query(query.ids) for query in dict.fromkeys(queries)}
        windows = {
            window: self.assemble(NOTHING, self.content(*window))
            for window in dict.fromkeys((document, span) for document, spans in cuts for span in spans)
        }
        return [
            PairInputs(
                query,
                document,
                spans,
                [windows[document, span] for span in spans],
                self.row(query, text, document, spans),
                query_inputs[query],
            )
            for query, text, (document, spans) in zip(queries, texts, cuts, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "query_specials": asdict(self.query_specials)}


def specials_of_text(backbone: Any, prefix: str = "") -> tuple[Specials, str]:
    """Return the special tokens around a single text with a prefix, and the white space before the text."""
    encoded = backbone.tokenizer("a")
    ids, sides = encoded["input_ids"], encoded.sequence_ids()
    prefix_ids, lead = prefix_tokens(backbone.tokenizer, prefix) if prefix else ((), "")
    start, end = sides.index(0), len(sides) - sides[::-1].index(0)
    types = (0, 0, 0, 0, 0) if backbone.has_segments and encoded.get("token_type_ids") is not None else None
    pad_id = backbone.tokenizer.pad_token_id or 0
    return Specials((*ids[:start], *prefix_ids), (), tuple(ids[end:]), types, pad_id), lead
