"""Words around query and window: a template, or the prompt of a checkpoint of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..inputs import Query
from ..templates import joined, prefix_tokens, wording
from ..tokens import Span, TokenizedText, tokenize
from .base import Reader, Specials, specials_of_pair


class TemplateReader(Reader):
    """Reads a query and a window between the words of a template, or after a prompt."""

    follows_template = True

    query_trail = text_trail = ""  # line breaks after a query, or a window, which are tokenized with it

    def make_specials(self, backbone: Any) -> Specials:
        tokenizer, prompt = backbone.tokenizer, backbone.prompt
        if backbone.template is None:
            specials = specials_of_pair(backbone)
            ids, self.query_lead = prefix_tokens(tokenizer, prompt)
            return replace(specials, prefix=(*specials.prefix, *ids))
        words = wording(tokenizer, backbone.template)
        (self.query_lead, self.query_trail), (self.text_lead, self.text_trail) = words.query, words.text
        pad_id = tokenizer.pad_token_id or 0
        return Specials(words.prefix, words.middle, words.suffix, None, pad_id, words.text_first)

    def special_tokens(self) -> int:
        breaks = tokenize(self.tokenizer, [self.query_trail, self.text_trail])
        return super().special_tokens() + sum(map(len, breaks))

    def tokenize_queries(self, queries: Sequence[str]) -> list[Query]:
        """Return the tokens of queries with the line breaks that the template attaches to them."""
        made = super().tokenize_queries(queries)
        with_trail = {
            query: replace(query, ids=joined(self.tokenizer, query.ids, self.query_trail))
            for query in dict.fromkeys(made)
        }
        return [with_trail[query] for query in made]

    def content(self, document: TokenizedText, span: Span) -> np.ndarray:
        return joined(self.tokenizer, super().content(document, span), self.text_trail)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "trails": [self.query_trail, self.text_trail]}
