"""What all readers share: tokens, windows that fit into the longest input, and how much of a text is read."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from ...common.coverage import Reading, tokens_in
from ...common.frames import Document, Text, as_document
from ..backbones.architectures import InputRules
from ..inputs import Input, PairInputs, Query, Settings
from ..tokens import Span, TokenizedText, tokenize, tokenize_documents
from ..windows import Windows

NOTHING = np.zeros(0, dtype=np.int32)
"""No tokens, for instance the query of an input that contains only a text."""


@dataclass(frozen=True)
class Specials:
    """Special tokens, and words of templates, around a query and a text: `prefix query middle content suffix`.

    Attributes:
        prefix: before the query, `[CLS]`.
        middle: between query and text, `[SEP]` (two for RoBERTa).
        suffix: after the text, `[SEP]`.
        types: segments of the prefix, query, middle, content and suffix; None if the backbone has no segments.
        pad_id: the id of the padding token.
    """

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    types: tuple[int, int, int, int, int] | None = None
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def around(self, query: np.ndarray, content: np.ndarray, query_size: int = 0, content_size: int = 0) -> Input:
        """Return an input, with query and content padded to these sizes."""
        parts: tuple[Any, ...] = (self.prefix, query, self.middle, content, self.suffix)
        lengths = list(map(len, parts))
        sizes = list(map(max, lengths, (0, query_size, 0, content_size, 0)))
        starts = [0, *accumulate(sizes)]
        # A model cannot read an empty input: without special tokens it reads padding.
        ids = np.full(starts[-1] or 1, self.pad_id, dtype=np.int32)
        mask = None if lengths == sizes else np.zeros(len(ids), dtype=bool)
        for part, start, length in zip(parts, starts, lengths, strict=False):
            ids[start : start + length] = part
            if mask is not None:
                mask[start : start + length] = True
        if mask is not None and not mask.any():
            mask[0] = True
        types = None if self.types is None else np.repeat(np.array(self.types, dtype=np.uint8), sizes)
        places = [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        return Input(ids, places[1], places[3], types, mask)


def specials_of_pair(backbone: Any) -> Specials:
    """Return the special tokens that a tokenizer adds around two texts."""
    encoded = backbone.tokenizer("a", "b")
    ids, sides, types = encoded["input_ids"], encoded.sequence_ids(), encoded.get("token_type_ids")
    first, second = sides.index(0), sides.index(1)
    middle, suffix = (len(sides) - sides[::-1].index(side) for side in (0, 1))
    segments = None
    if types is not None and backbone.has_segments:
        segments = types[0], types[first], types[middle], types[second], types[-1]
    pad_id = backbone.tokenizer.pad_token_id or 0
    return Specials(tuple(ids[:first]), tuple(ids[middle:second]), tuple(ids[suffix:]), segments, pad_id)


class Reader(ABC):
    """Base of the readers, which turn a query and a text into inputs of a backbone.

    A subclass defines `assemble`, and `room` if its inputs limit queries and windows. It can override how queries and
    texts are tokenized (`tokenize_queries`, `tokenize`) and how pairs are read (`read`).

    Args:
        tokenizer: the tokenizer of the backbone.
        settings: the model's settings.
        longest: the maximum input length in tokens; None without a limit.
        rules: the requirements of the architecture, see `InputRules`.

    Attributes:
        windows: the window rule, fitted into the maximum input length.
        max_query_len: the maximum number of tokens of a query; None without a limit.
        query_size: the number of tokens of every query, padding included, in the papers' layout; None otherwise.

    Raises:
        ValueError: if query, largest window and special tokens exceed the maximum input length.
    """

    follows_layout: ClassVar[bool] = False
    """Whether it supports layouts that pad queries or share a budget; otherwise they are rejected."""
    follows_template: ClassVar[bool] = False
    """Whether it supports templates."""

    query_size: int | None = None
    query_lead = text_lead = ""  # characters that are tokenized with a query, or a text, before it

    def __init__(self, tokenizer: Any, settings: Settings, *, longest: int | None = None, rules: Any = None) -> None:
        self.tokenizer, self.settings, self.longest = tokenizer, settings, longest
        self.rules = rules or InputRules()
        self.pad_id = tokenizer.pad_token_id or 0
        self.windows, self.max_query_len = self.fit()
        self.query_limit = self.max_query_len or sys.maxsize  # before a query shares an input with a text
        preselect = settings.preselect
        self.needs_offsets = self.windows.needs_text or self.rules.needs_offsets
        self.needs_offsets |= preselect is not None and preselect.needs_text
        # An empty query or text has the tokens of the white space that precedes other ones.
        self._empty = [tokenize(tokenizer, [lead])[0].ids for lead in (self.query_lead, self.text_lead)]
        rule = settings.windows_argument or "the maximum input length of the backbone"
        if rule == "window_size":
            rule = f"window_size={self.windows.largest}"
        choice = rule if settings.max_windows is None else f"max_windows={settings.max_windows}"
        self._windows_rule = rule
        self._choice = choice if settings.preselect is None else f"preselect={settings.preselect!r}"

    # The longest input.

    def room(self) -> tuple[int, int, int] | None:
        """Return the maximum tokens of a query, of a window with its title, and of both; None without a limit."""
        return None

    def special_tokens(self) -> int:
        """Return the number of tokens in an input that belong neither to the query nor to the text."""
        return 0

    def fit(self) -> tuple[Windows, int | None]:
        """Return windows that fit into the maximum input length, and the maximum tokens of a query.

        With `max_query_len=None`, queries can use the part of the input that windows of a given size leave, or a
        quarter of it if windows have no given size. This limit is the same for all queries of a model, so that no
        score depends on other queries.
        """
        (windows, max_query_len), room = self.asked(), self.room()
        if room is None:
            return windows, max_query_len
        query, window, both = room
        if max_query_len is not None:
            capacity = min(window, both - max_query_len)
            if capacity < 1 or max_query_len > query:
                raise ValueError(
                    f"max_query_len={max_query_len} leaves no room for a document: the backbone takes {self.longest} "
                    f"tokens, {self.special_tokens()} of them special; lower max_query_len"
                )
            return self.windows_within(windows, capacity), max_query_len
        fitted = self.windows_within(windows, min(window, both - 1))
        if fitted != windows and both < query + window:  # of no given size, and in one input with the query
            fitted = self.windows_within(windows, min(window, both - both // 4))
        return fitted, min(query, both - self._size_of(fitted))

    def asked(self) -> tuple[Windows, int | None]:
        """Return the window rule and the maximum tokens of a query before they are fitted."""
        return self.settings.windows, self.settings.max_query_len

    def windows_within(self, windows: Windows, room: int) -> Windows:
        """Fit windows into `room` tokens for a window and its title."""
        title = self.settings.repeat_tokens
        if title and room <= title:
            raise ValueError(f"repeat_tokens={title} leaves no room for windows in {room} tokens: lower repeat_tokens")
        return windows.resized(room - title)

    def _size_of(self, windows: Windows) -> int:
        """Return the maximum tokens of a window and its title; 0 if only the backbone limits it."""
        return 0 if windows.largest is None else windows.largest + self.settings.repeat_tokens

    # Tokens.

    def tokenize(self, texts: Sequence[Text], *, offsets: bool = False) -> list[TokenizedText]:
        """Tokenize texts with their titles; equal texts share one object."""
        documents = {text: as_document(text) for text in dict.fromkeys(texts)}
        if self.settings.layout.lowercase:
            documents = {
                k: Document(*self.settings.layout.normalized([d.text, d.repeated])) for k, d in documents.items()
            }
        tokens = tokenize_documents(
            self.tokenizer,
            list(documents.values()),
            self.settings.repeat_tokens,
            offsets=offsets or self.needs_offsets,
            lead=self.text_lead,
        )
        tokenized = dict(zip(documents, map(self.rules.tokens, tokens), strict=True))
        return [tokenized[text] for text in texts]

    def tokenize_queries(self, queries: Sequence[str]) -> list[Query]:
        """Tokenize and truncate queries; equal queries share one object."""
        distinct, limit = list(dict.fromkeys(queries)), self.query_limit
        tokens = tokenize(self.tokenizer, self.settings.layout.normalized(distinct), lead=self.query_lead)
        made = {
            text: Query(text, t.ids[:limit] if len(t) else self._empty[0], len(t), min(len(t), limit))
            for text, t in zip(distinct, tokens, strict=True)
        }
        return [made[query] for query in queries]

    # Inputs.

    @abstractmethod
    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an input from the tokens of a query and of a window with its title."""

    def read(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[PairInputs]:
        """Return the inputs of P pairs, with their windows and coverage."""
        pairs = []
        for query, text, (document, spans) in zip(queries, texts, self.cut(queries, texts), strict=True):
            windows = self.window_inputs(query, document, spans)
            pairs.append(PairInputs(query, document, spans, windows, self.row(query, text, document, spans)))
        return pairs

    def window_inputs(self, query: Query, document: TokenizedText, spans: list[Span]) -> list[Input]:
        """Return the inputs of the windows of a document, the part of a text that is read."""
        return [self.assemble(query.ids, self.content(document, span)) for span in spans]

    def cut(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[tuple[TokenizedText, list[Span]]]:
        """Return the part of the text that is read and its windows, for each of P pairs."""
        settings = self.settings
        limit = settings.max_doc_len or sys.maxsize
        heads = {text: text.head(limit) for text in dict.fromkeys(texts)}
        documents = [heads[text] for text in texts]
        if settings.preselect is None:
            spans_of = {document: self.windows(document) for document in heads.values()}
            return [(document, spans_of[document]) for document in documents]
        # The model of a selector has its own precision.
        with torch.autocast(settings.device.type, enabled=False):
            words = settings.layout.normalized([query.text for query in queries])
            return settings.preselect.cut(words, documents, self.windows)

    def content(self, document: TokenizedText, span: Span) -> np.ndarray:
        """Return the tokens of a window, preceded by those of its title."""
        ids = document.read(span)
        return ids if len(ids) else self._empty[1]

    def row(self, query: Query, text: TokenizedText, document: TokenizedText, spans: list[Span]) -> Reading:
        """Return the coverage of a pair, with the tokens that each argument truncated."""
        settings, read, cut = self.settings, tokens_in(spans), Counter[str]()
        if read < len(text):
            within_limit = covered = min(len(text), settings.max_doc_len or len(text))
            if settings.preselect is None:
                covered = self.windows.reach(within_limit)
            cut[f"max_doc_len={settings.max_doc_len}"] += len(text) - within_limit
            cut[self._windows_rule] += within_limit - covered
            cut[self._choice] += covered - read
        if document.title is not None:
            cut[f"repeat_tokens={settings.repeat_tokens}"] += document.title.tokens - document.title.tokens_read
        query_cut_by = ""
        if query.tokens_read < query.tokens:
            query_cut_by = f"max_query_len={settings.max_query_len}"
            if settings.max_query_len is None:
                query_cut_by = f"the checkpoint's maximum query length of {self.max_query_len}"
        sizes = len(text), read, len(spans), query.tokens, query.tokens_read
        return Reading(query.text, *sizes, query_cut_by, dict(+cut))

    def describe(self) -> dict[str, Any]:
        """Return everything on which inputs depend apart from tokens and windows, JSON-able."""
        return {"class": type(self).__name__, "leads": [self.query_lead, self.text_lead], "size": self.query_size}
