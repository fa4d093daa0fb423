"""Words around query and window: a template, or the prompt of a checkpoint of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..inputs import Query
from ..templates import prefix_tokens, wording
from ..tokens import tokenize
from .base import Reader, Specials, specials_of_pair


class TemplateReader(Reader):
    """Reads a query and a window between the words of a template, or after a prompt."""

    follows_template = True

    query_trail = ""  # line breaks after a query, tokenized with it
    _trail_size = 0  # the number of their tokens without a query

    def make_specials(self, backbone: Any) -> Specials:
        tokenizer, prompt = backbone.tokenizer, backbone.prompt
        if backbone.template is None:
            specials = specials_of_pair(backbone)
            ids, self.query_lead = prefix_tokens(tokenizer, prompt)
            return replace(specials, prefix=(*specials.prefix, *ids))
        words = wording(tokenizer, backbone.template)
        self.query_lead, self.text_lead = words.query_lead, words.text_lead
        self.query_trail, self._trail_size = words.query_trail, words.query_trail_size
        return Specials(words.prefix, words.middle, words.suffix, None, tokenizer.pad_token_id or 0)

    def special_tokens(self) -> int:
        return super().special_tokens() + self._trail_size

    def tokenize_queries(self, queries: Sequence[str]) -> list[Query]:
        """Return the tokens of queries with the text that the template attaches to them."""
        made = super().tokenize_queries(queries)
        if not self.query_trail:
            return made
        distinct = list(dict.fromkeys(made))
        texts = self.settings.layout.normalized([query.text for query in distinct])
        strings = [f"{self.query_lead}{text}{self.query_trail}" for text in texts]
        *whole, trail = (tokens.ids for tokens in tokenize(self.tokenizer, [*strings, self.query_trail]))
        with_trail = {}
        for query, ids in zip(distinct, whole, strict=True):
            fits = len(ids) <= len(query.ids) + len(trail)
            with_trail[query] = replace(query, ids=ids if fits else np.concatenate([query.ids, trail]))
        return [with_trail[query] for query in made]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "trail": self.query_trail}
