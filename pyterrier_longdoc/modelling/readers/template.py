"""Words around query and window: a template, or the prompt of a checkpoint of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...common.frames import Question, words_of_query
from ..inputs import Query
from ..templates import Slot, Wording, joined, prefix_tokens, wording
from ..tokens import Span, TokenizedText, tokenize
from .base import Reader, Specials, specials_of_pair

INSTRUCTION_TOKENS = 256
"""The tokens that every window leaves to an instruction of a column; longer ones are refused."""


class TemplateReader(Reader):
    """Reads a query and a window between the words of a template, or after a prompt."""

    follows_template = True

    text_slot = Slot()  # what is tokenized with a window
    _room = 0  # tokens that are joined to query and window, and those of an instruction

    def make_specials(self, backbone: Any) -> Specials:
        tokenizer, prompt, self.template = backbone.tokenizer, backbone.prompt, backbone.template
        if self.template is None:
            specials = specials_of_pair(backbone)
            ids, self.query_lead = prefix_tokens(tokenizer, prompt)
            return replace(specials, prefix=(*specials.prefix, *ids))
        self.takes_instruction = self.template.takes_instruction
        words, instruction = wording(tokenizer, self.template), self.settings.instruction
        self.query_lead, self.text_lead, self.text_slot = words.query.lead, words.text.lead, words.text
        specials = self._specials(words)
        instructed = self._specials(self._wording(instruction))
        if self.settings.instruction_field:
            self._wording("a.")  # templates that cannot be read with it are refused now, not during a run
        column = INSTRUCTION_TOKENS if self.settings.instruction_field else 0
        apart = tokenize(tokenizer, [*words.query[1:], *words.text[1:]])
        self._room = sum(map(len, apart)) + max(column, len(instructed) - len(specials))
        return specials

    def _wording(self, instruction: str) -> Wording:
        """Return the tokens around query and text; ValueError if the text would have others with this instruction."""
        words = wording(self.tokenizer, self.template, instruction)
        if words.text != self.text_slot:
            raise ValueError(
                f"with the instruction {instruction[:40]!r}, the words of the template would share tokens with query "
                f"or text: put a word or a line break between {{instruction}} and {{query}} or {{text}}"
            )
        return words

    def _specials(self, words: Wording) -> Specials:
        pad_id = self.tokenizer.pad_token_id or 0
        return Specials(words.prefix, words.middle, words.suffix, None, pad_id, words.text_first)

    def special_tokens(self) -> int:
        return super().special_tokens() + self._room

    def tokenize_queries(self, queries: Sequence[Question]) -> list[Query]:
        """Return the tokens of queries, and the words of the template with their instructions."""
        if self.template is None:
            return super().tokenize_queries(queries)
        made: dict[tuple[str, str], Query] = {}
        keys = [(words_of_query(query), self.instruction_of(query)) for query in queries]
        texts_of: dict[str, list[str]] = {}
        for text, instruction in keys:
            texts_of.setdefault(instruction, []).append(text)
        for instruction, texts in texts_of.items():
            words = self._wording(instruction)
            specials = self._specials(words)
            if len(specials) > self.special_tokens():
                raise ValueError(
                    f"the instruction {instruction[:40]!r}... in {self.settings.instruction_field!r} has more than "
                    f"{INSTRUCTION_TOKENS} tokens, for which windows leave room: shorten it"
                )
            for text, query in self.truncated_queries(texts, words.query.lead).items():
                ids = self._joined(query, words.query)
                made[text, instruction] = replace(
                    query, ids=ids, instruction=instruction, specials=specials if instruction else None
                )
        return [made[key] for key in keys]

    def _joined(self, query: Query, slot: Slot) -> np.ndarray:
        if query.tokens_read == query.tokens:
            return joined(self.tokenizer, query.ids, slot)
        # The token at which a query is cut stays as it is.
        breaks = tokenize(self.tokenizer, [slot.trail])[0].ids
        return np.concatenate([joined(self.tokenizer, query.ids, slot._replace(trail="")), breaks])

    def content(self, document: TokenizedText, span: Span) -> np.ndarray:
        return joined(self.tokenizer, super().content(document, span), self.text_slot)
