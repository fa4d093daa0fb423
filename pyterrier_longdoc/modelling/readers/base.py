"""What all readers share: tokens, windows that fit into the longest input, and how much of a text is read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...common.coverage import PairCoverage, tokens_in
from ...common.frames import Document, Instructed, Question, Text, as_document, words_of_query
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
        types: segments of the five parts in order; None if the backbone has no segments.
        pad_id: the id of the padding token.
        text_first: whether the text stands in the place of the query, and the query in its place.
    """

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    types: tuple[int, int, int, int, int] | None = None
    pad_id: int = 0
    text_first: bool = False

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def around(self, query: np.ndarray, content: np.ndarray, query_size: int = 0, content_size: int = 0) -> Input:
        """Return an input, with query and content padded to these sizes."""
        slots = [(query, query_size), (content, content_size)]
        (first, first_size), (second, second_size) = reversed(slots) if self.text_first else slots
        parts: tuple[Any, ...] = (self.prefix, first, self.middle, second, self.suffix)
        lengths = list(map(len, parts))
        sizes = list(map(max, lengths, (0, first_size, 0, second_size, 0)))
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
        query_place, content_place = places[3:0:-2] if self.text_first else places[1:4:2]
        return Input(ids, query_place, content_place, types, mask)


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


class TokenLimits(NamedTuple):
    """The maximum tokens of a query, of a window with its title, and of both."""

    query: int
    window: int
    both: int


class Reader:
    """Turns a query and a text into inputs of a backbone: query and window in the tokenizer's layout for two texts.

    Other layouts are subclasses, which override `make_specials` or `assemble`, and `room` if a query and a window have
    other limits. They can also override how queries and texts are tokenized (`tokenize_queries`, `tokenize`) and how
    pairs are read (`read`).

    Args:
        backbone: the backbone, with its tokenizer, its maximum input length and the rules of its architecture.
        settings: the model's settings.

    Attributes:
        longest: the maximum input length in tokens; None without a limit.
        specials: the special tokens around a query and a window.
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
    takes_instruction: bool = False
    """Whether its inputs have a place for an instruction."""

    query_size: int | None = None
    query_lead = text_lead = ""  # characters that are tokenized with a query, or a text, before it

    def __init__(self, backbone: Any, settings: Settings) -> None:
        self.tokenizer, self.settings, self.rules = backbone.tokenizer, settings, backbone.rules
        self.longest: int | None = backbone.longest_input
        self.pad_id = self.tokenizer.pad_token_id or 0
        self.specials = self.make_specials(backbone)
        self.windows, self.max_query_len = self.adapt()
        self.query_limit = self.max_query_len or sys.maxsize  # before a query shares an input with a text
        preselect = settings.preselect
        self.needs_offsets = self.windows.needs_text or self.rules.needs_offsets
        self.needs_offsets |= preselect is not None and preselect.needs_text
        self._empty = self._empty_after(self.text_lead)
        rule = settings.windows_argument or "the maximum input length of the backbone"
        if "=" not in settings.windows_argument and settings.windows_argument:
            rule = f"{rule}={self.windows.largest}"
        choice = rule if settings.max_windows is None else f"max_windows={settings.max_windows}"
        self._windows_rule = rule
        self._choice = choice if settings.preselect is None else f"preselect={settings.preselect!r}"

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around query and window."""
        return specials_of_pair(backbone)

    # The longest input.

    def special_tokens(self) -> int:
        """Return the number of tokens in an input that belong neither to the query nor to the text."""
        return len(self.specials)

    def token_limits(self) -> TokenLimits | None:
        """Return the limits of a query and a window; None without a limit."""
        return None if self.longest is None else TokenLimits(*[self.longest - self.special_tokens()] * 3)

    def adapt(self) -> tuple[Windows, int | None]:
        """Return windows that fit into the maximum input length, and the maximum tokens of a query.

        With `max_query_len=None`, queries can use the part of the input that windows of a given size leave, or a
        quarter of it if windows have no given size. This limit is the same for all queries of a model, so that no
        score depends on other queries.
        """
        (windows, max_query_len), room = self.requested(), self.token_limits()
        if room is None:
            return windows, max_query_len
        query = 1 if max_query_len is None else max_query_len
        capacity = min(room.window, room.both - query)
        if capacity < 1 or query > room.query:
            cure = "shorten instruction, or " if self.settings.instruction else ""
            raise ValueError(
                f"max_query_len={max_query_len} leaves no room for a document: the backbone takes {self.longest} "
                f"tokens, {self.special_tokens()} of them special; {cure}lower max_query_len"
            )
        if max_query_len is not None:
            return self.windows_within(windows, capacity), max_query_len
        fitted = self.windows_within(windows, capacity)
        if fitted != windows and room.both < room.query + room.window:  # of no given size, in one input with the query
            fitted = self.windows_within(windows, min(room.window, room.both - room.both // 4))
        return fitted, min(room.query, room.both - self._size_of(fitted))

    def requested(self) -> tuple[Windows, int | None]:
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

    def tokenize_queries(self, queries: Sequence[Question]) -> list[Query]:
        """Tokenize and truncate queries; equal queries share one object."""
        made = self.truncated_queries(list(map(words_of_query, queries)), self.query_lead)
        return [made[words_of_query(query)] for query in queries]

    def instruction_of(self, query: Question) -> str:
        """Return the instruction of a query; without its own, that of the settings."""
        return query.instruction if isinstance(query, Instructed) else self.settings.instruction

    def truncated_queries(self, queries: Sequence[str], lead: str) -> dict[str, Query]:
        """Return the tokens of distinct queries with the white space before them, truncated."""
        distinct, limit, empty = list(dict.fromkeys(queries)), self.query_limit, self._empty_after(lead)
        tokens = tokenize(self.tokenizer, self.settings.layout.normalized(distinct), lead=lead)
        return {
            text: Query(text, t.ids[:limit] if len(t) else empty, len(t), min(len(t), limit))
            for text, t in zip(distinct, tokens, strict=True)
        }

    def _empty_after(self, lead: str) -> np.ndarray:
        """Return the tokens of an empty query or text: those of the white space that precedes other ones."""
        return tokenize(self.tokenizer, [lead])[0].ids

    def words(self, query: Query) -> str:
        """Return the truncated text of a query."""
        (tokens,) = tokenize(self.tokenizer, self.settings.layout.normalized([query.text]), offsets=True)
        return tokens.beginning(query.tokens_read)

    # Inputs.

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an input from the tokens of a query and of a window with its title."""
        return self.specials.around(query, content)

    def read(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[PairInputs]:
        """Return the inputs of P pairs, with their windows and coverage."""
        pairs = []
        for query, text, (document, spans) in zip(queries, texts, self.split(queries, texts), strict=True):
            assemble = self.assemble if query.specials is None else query.specials.around
            windows = [assemble(query.ids, self.content(document, span)) for span in spans]
            pairs.append(PairInputs(query, document, spans, windows, self.row(query, text, document, spans)))
        return pairs

    def split(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[tuple[TokenizedText, list[Span]]]:
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
            return list(zip(documents, settings.preselect.select(words, documents, self.windows), strict=True))

    def content(self, document: TokenizedText, span: Span) -> np.ndarray:
        """Return the tokens of a window, preceded by those of its title."""
        ids = document.read(span)
        return ids if len(ids) else self._empty

    def row(self, query: Query, text: TokenizedText, document: TokenizedText, spans: list[Span]) -> PairCoverage:
        """Return the coverage of a pair, with the tokens that each argument truncated."""
        settings, read, truncated = self.settings, tokens_in(spans), Counter[str]()
        if read < len(text):
            within_limit = covered = min(len(text), settings.max_doc_len or len(text))
            if settings.preselect is None:
                covered = self.windows.covered_tokens(within_limit)
            truncated[f"max_doc_len={settings.max_doc_len}"] += len(text) - within_limit
            truncated[self._windows_rule] += within_limit - covered
            truncated[self._choice] += covered - read
        if document.title is not None:
            truncated[f"repeat_tokens={settings.repeat_tokens}"] += document.title.tokens - document.title.tokens_read
        query_truncated_by = ""
        if query.tokens_read < query.tokens:
            query_truncated_by = f"max_query_len={settings.max_query_len}"
            if settings.max_query_len is None:
                query_truncated_by = f"the checkpoint's maximum query length of {self.max_query_len}"
        sizes = len(text), read, len(spans), query.tokens, query.tokens_read
        return PairCoverage(query.text, *sizes, query_truncated_by, dict(+truncated))

    def describe(self) -> dict[str, Any]:
        """Return everything on which inputs depend apart from tokens and windows, JSON-able."""
        return {
            "class": type(self).__name__,
            "leads": [self.query_lead, self.text_lead],
            "size": self.query_size,
            "specials": asdict(self.specials),
        }
