"""From queries and texts to the inputs of a backbone: tokens, windows that fit into the longest input, special tokens.

A query and a window become one input (`Reader`, and `TemplateReader` with the words of a prompt around them), or an
input each (`SeparateReader`). Shapes: P pairs of a query and a text, T tokens of an input.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ..common.caches import EmbeddingCache
from ..common.coverage import PairCoverage, tokens_in
from ..common.frames import Document, Question, join_lines
from .inputs import Input, Settings
from .layout import layout_name
from .tokens import Span, TokenizedText, tokenize, tokenize_documents
from .windows import Windows

logger = logging.getLogger(__name__)

NOTHING = np.zeros(0, dtype=np.int32)
"""No tokens, for instance the query of an input that contains only a text."""

PUBLISHED_SPECIALS = 3
"""The special tokens in the limit of the shared layout, even if the tokenizer adds another number (Llama's: two)."""

INSTRUCTION_TOKENS = 256
"""The tokens that every window leaves to an instruction of a column; longer ones are refused."""


@dataclass(frozen=True, eq=False, slots=True)
class Query:
    """A query, truncated to the tokens that are read."""

    text: str  # the whole query
    ids: np.ndarray  # the tokens that are read
    tokens: int  # how many the whole query has
    tokens_read: int  # how many of these are read
    text_read: str  # their text
    instruction: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class PairInputs:
    """The inputs of a query and a text."""

    query: Query
    text: TokenizedText  # what is read of the text: all, its beginning, or a selection
    spans: list[Span]  # the windows in it, in tokens
    windows: list[Input]  # one for each; empty ones for encoders that read texts in place of token ids
    row: PairCoverage  # how much is read, for the coverage
    query_input: Any = None  # the query's own `Input`; None where it shares those of the windows


Cut = tuple[TokenizedText, list[Span], Counter[str]]
"""The beginning of a text, the windows in it that are read, and how many tokens each argument leaves out."""


@dataclass(frozen=True)
class Specials:
    """Special tokens around a query and a text: `prefix query middle content suffix`.

    Attributes:
        prefix: before the query, `[CLS]`.
        middle: between query and text, `[SEP]` (two for RoBERTa).
        suffix: after the text, `[SEP]`.
        types: segments of the five parts in order; None if the backbone has no segments.
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
        sizes = [max(len(part), size) for part, size in zip(parts, (0, query_size, 0, content_size, 0), strict=True)]
        # A model cannot read an empty input: without special tokens it reads padding.
        ids = np.full(sum(sizes) or 1, self.pad_id, dtype=np.int32)
        real = np.zeros(len(ids), dtype=bool)
        places: list[Span] = []
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            places.append((start, start + len(part)))
            ids[start : start + len(part)] = part
            real[start : start + len(part)] = True
            start += size
        if not real.any():
            real[0] = True
        types = None if self.types is None else np.repeat(np.array(self.types, dtype=np.uint8), sizes)
        return Input(ids, places[1], places[3], types, None if real.all() else real)


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


def one_separator(specials: Specials) -> Specials:
    """Return special tokens as in the papers' fixed layout, also for RoBERTa."""
    parts = {name: getattr(specials, name)[:1] for name in ("prefix", "middle", "suffix")}
    return replace(specials, **parts, types=None if specials.types is None else (0, 0, 0, 1, 1))


def specials_of_text(backbone: Any, prefix: str = "") -> tuple[Specials, str]:
    """Return the special tokens around a single text with a prefix, and the white space before the text."""
    encoded = backbone.tokenizer("a")
    ids, sides = encoded["input_ids"], encoded.sequence_ids()
    prefix_ids, lead = prefix_tokens(backbone.tokenizer, prefix) if prefix else ((), "")
    start, end = sides.index(0), len(sides) - sides[::-1].index(0)
    types = (0, 0, 0, 0, 0) if backbone.has_segments and encoded.get("token_type_ids") is not None else None
    pad_id = backbone.tokenizer.pad_token_id or 0
    return Specials((*ids[:start], *prefix_ids), (), tuple(ids[end:]), types, pad_id), lead


def prefix_tokens(tokenizer: Any, prefix: str) -> tuple[tuple[int, ...], str]:
    """Return the tokens of a prefix, and the white space to put before a text after it.

    A byte-level tokenizer of words begins a word's token with the space before it, so that this space belongs to the
    text. Later windows of a text begin with their own tokens: one that begins with a word has its space, one that
    begins inside a word or at a punctuation mark follows the prefix without a space.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    whole = ids(f"{prefix}a")
    for lead in ("", prefix[len(prefix.rstrip()) :], " "):
        word = ids(f"{lead}a")
        if whole[-len(word) :] == word:
            return tuple(whole[: -len(word)]), lead
    logger.warning("prefix %r is tokenized separately from the text after it: end it with a space", prefix)
    return tuple(ids(prefix)), ""


class Reader:
    """Turns a query and a text into inputs of a backbone, each with the query and a window.

    An input is `[CLS] query [SEP] window [SEP]`, as the tokenizer makes it of two texts. In the papers' fixed layout
    (Boytsov et al. 2025, as in FlexNeuART), query and window are padded in place, so that all tokens have fixed
    positions. In the shared layout (JINA, MOSAIC, TinyLLAMA), a query and the beginning of its text have a common
    limit, as with the tokenizers' `truncation="longest_first"`.

    Subclasses override `make_specials` or `assemble`, and `limits` if a query and a window have other limits.

    Args:
        backbone: the backbone, with its tokenizer, its maximum input length and the rules of its architecture.
        settings: the model's settings.

    Attributes:
        longest: the maximum input length in tokens; None without a limit.
        specials: the special tokens around a query and a window.
        windows: the window rule, fitted into the maximum input length.
        max_query_len: the maximum number of tokens of a query; None without a limit.
        sizes: the sizes to which queries and windows are padded in the papers' layout; 0 without padding.

    Raises:
        ValueError: if query, largest window and special tokens exceed the maximum input length.
    """

    takes_instruction: bool = False
    """Whether its inputs have a place for an instruction."""

    query_lead = text_lead = ""  # characters that are tokenized with a query, or a text, before it

    def __init__(self, backbone: Any, settings: Settings) -> None:
        layout, preselect = settings.layout, settings.preselect
        self.tokenizer, self.settings, self.rules = backbone.tokenizer, settings, backbone.rules
        self.longest: int | None = backbone.longest_input
        self.pad_id = self.tokenizer.pad_token_id or 0
        # That of a backbone that numbers positions by token ids, which would skip the padding inside an input.
        self.first_position: int | None = backbone.first_position if layout.pad_query else None
        if self.first_position is None and layout.positions != "columns":
            raise ValueError(
                "positions='real tokens' is for backbones that number positions by token ids, such as RoBERTa and "
                "Longformer, not for this one: use positions='columns'"
            )
        self.specials = self.make_specials(backbone)
        self.known: dict[tuple[bool, Document], TokenizedText] | None = None  # the texts of the last block in a run
        self.windows, self.max_query_len = self.adapt()
        self.sizes = (self.max_query_len or 0, self._size_of(self.windows)) if layout.pad_query else (0, 0)
        self.needs_offsets = self.windows.needs_text or self.rules.needs_offsets
        self.needs_offsets |= preselect is not None and preselect.needs_text
        rule = settings.windows_argument or "the maximum input length of the backbone"
        if "=" not in settings.windows_argument and settings.windows_argument:
            rule = f"{rule}={self.windows.largest}"
        choice = rule if settings.max_windows is None else f"max_windows={settings.max_windows}"
        self._windows_rule = rule
        self._query_rule = f"the {self.max_query_len} tokens that {rule} leaves for a query"
        self._choice = choice if preselect is None else f"preselect={preselect!r}"

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around query and window."""
        specials = specials_of_pair(backbone)
        if self.settings.layout.pad_query:
            return one_separator(specials)
        if backbone.prompt:
            ids, self.query_lead = prefix_tokens(self.tokenizer, backbone.prompt)
            return replace(specials, prefix=(*specials.prefix, *ids))
        return specials

    # The longest input.

    def special_tokens(self) -> int:
        """Return the number of tokens in an input that belong neither to the query nor to the text."""
        return len(self.specials)

    def limits(self) -> tuple[int, int, int] | None:
        """Return the maximum tokens of a query, of a window with its title, and of both; None without a limit."""
        if self.longest is None:
            return None
        room = self.longest - self.special_tokens()
        return room, room, room

    def adapt(self) -> tuple[Windows, int | None]:
        """Return windows that fit into the maximum input length, and the maximum tokens of a query.

        With `max_query_len=None`, queries can use the part of the input that windows of a given size leave, or a
        quarter of it if windows have no given size. This limit is the same for all queries of a model, so that no
        score depends on other queries.
        """
        (windows, max_query_len), limits = self.requested(), self.limits()
        if limits is None:
            return windows, max_query_len
        of_query, of_window, of_both = limits
        query = 1 if max_query_len is None else max_query_len
        capacity = min(of_window, of_both - query)
        if capacity < 1 or query > of_query:
            cure = "shorten instruction, or " if self.settings.instruction else ""
            raise ValueError(
                f"max_query_len={max_query_len} leaves no room for a document: the backbone takes {self.longest} "
                f"tokens, {self.special_tokens()} of them special; {cure}lower max_query_len"
            )
        fitted = self.windows_within(windows, capacity)
        if max_query_len is not None:
            return fitted, max_query_len
        if fitted != windows and of_both < of_query + of_window:  # of no given size, in one input with the query
            fitted = self.windows_within(windows, min(of_window, of_both - of_both // 4))
        return fitted, min(of_query, of_both - self._size_of(fitted))

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

    def tokenize(self, texts: Sequence[Document], *, offsets: bool = False) -> list[TokenizedText]:
        """Tokenize texts with their titles; equal texts share one object, also those of the previous call.

        The pairs of a long text can be in several blocks.
        """
        offsets, known = offsets or self.needs_offsets, self.known or {}
        keys = [(offsets, text) for text in texts]
        new = [key for key in dict.fromkeys(keys) if key not in known]
        documents, layout = [text for _, text in new], self.settings.layout
        if layout.lowercase:
            documents = [Document(*layout.normalized([text.text, text.repeated])) for text in documents]
        tokens = tokenize_documents(
            self.tokenizer, documents, self.settings.repeat_tokens, offsets=offsets, lead=self.text_lead
        )
        every = {**known, **dict(zip(new, map(self.rules.tokens, tokens), strict=True))}
        found = {key: every[key] for key in keys}
        if self.known is not None:
            self.known = found
        return [found[key] for key in keys]

    def tokenize_queries(self, queries: Sequence[Question]) -> list[Query]:
        """Tokenize and truncate queries; equal queries share one object."""
        distinct, settings = list(dict.fromkeys(queries)), self.settings
        # The shared layout cuts a query with its text.
        limit = sys.maxsize if settings.layout.shared_budget else self.max_query_len or sys.maxsize
        texts = settings.layout.normalized([query.text for query in distinct])
        made = {}
        for query, tokens in zip(
            distinct, tokenize(self.tokenizer, texts, offsets=True, lead=self.query_lead), strict=True
        ):
            made[query] = Query(
                query.text,
                self._or_space(tokens.ids[:limit], self.query_lead),
                len(tokens),
                min(len(tokens), limit),
                tokens.beginning(limit),
                settings.instruction if query.instruction is None else query.instruction,
            )
        return [made[query] for query in queries]

    def _or_space(self, ids: np.ndarray, lead: str) -> np.ndarray:
        """Return tokens or, if there are none, those of the white space that precedes a query or text."""
        return ids if len(ids) or not lead.isspace() else tokenize(self.tokenizer, [lead])[0].ids

    # Inputs.

    def read(
        self, queries: Sequence[Question], texts: Sequence[Document], *, offsets: bool = False
    ) -> list[PairInputs]:
        """Return the inputs of P pairs, with their windows and coverage; `offsets` adds the characters of windows."""
        asked, tokenized = self.tokenize_queries(queries), self.tokenize(texts, offsets=offsets)
        if self.settings.layout.shared_budget:
            return [self._within_budget(query, text) for query, text in zip(asked, tokenized, strict=True)]
        cuts = self.split(asked, tokenized)
        return [
            PairInputs(query, document, spans, windows, self.row(query, text, spans, left_out))
            for query, text, (document, spans, left_out), windows in zip(
                asked, tokenized, cuts, self.inputs(asked, cuts), strict=True
            )
        ]

    def split(self, queries: Sequence[Query], texts: Sequence[TokenizedText]) -> list[Cut]:
        """Return the part of the text that is read, its windows, and what is left out, for each of P pairs."""
        settings = self.settings
        heads = {text: text.head(settings.max_doc_len or sys.maxsize) for text in dict.fromkeys(texts)}
        documents = [heads[text] for text in texts]
        if settings.preselect is None:
            divided = {document: self._divided(document) for document in heads.values()}
            parts = [divided[document] for document in documents]
        else:
            # The model of a selector has its own precision.
            with torch.autocast(settings.device.type, enabled=False):
                words = settings.layout.normalized([query.text for query in queries])
                selected = settings.preselect.select(words, documents, self.windows)
            parts = [
                (spans, {self._choice: len(document) - tokens_in(spans)})
                for document, spans in zip(documents, selected, strict=True)
            ]
        cuts = []
        for text, document, (spans, by_argument) in zip(texts, documents, parts, strict=True):
            left_out = Counter({f"max_doc_len={settings.max_doc_len}": len(text) - len(document)})
            left_out.update(by_argument)
            if text.title is not None:
                left_out[f"repeat_tokens={settings.repeat_tokens}"] = text.title.tokens - text.title.tokens_read
            cuts.append((document, spans, left_out))
        return cuts

    def _divided(self, document: TokenizedText) -> tuple[list[Span], dict[str, int]]:
        """Return the windows of a text, and what the window rule and the choice of windows leave out."""
        every = self.windows.every(document)
        spans = self.windows.selected(every, document)
        covered, read = tokens_in(every), tokens_in(spans)
        left_out = Counter({self._windows_rule: len(document) - covered})
        left_out[self._choice] += covered - read
        return spans, left_out

    def inputs(self, queries: Sequence[Query], cuts: Sequence[Cut]) -> list[list[Input]]:
        """Return the inputs of the windows of P pairs."""
        return [
            [self.assemble(query.ids, self.content(document, span)) for span in spans]
            for query, (document, spans, _) in zip(queries, cuts, strict=True)
        ]

    def content(self, document: TokenizedText, span: Span) -> np.ndarray:
        """Return the tokens of a window, preceded by those of its title."""
        return self._or_space(document.read(span), self.text_lead)

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an input from the tokens of a query and of a window with its title."""
        return self.placed(self.specials.around(query, content, *self.sizes))

    def placed(self, one: Input) -> Input:
        """Return a padded input with its positions, if the backbone would number them by token ids."""
        if self.first_position is None:
            return one
        columns = np.arange(len(one), dtype=np.int32)
        if self.settings.layout.positions == "real tokens" and one.mask is not None:
            # The positions of padding do not matter: it has that of the real token before it.
            columns = (one.mask.cumsum(dtype=np.int32) - 1).clip(min=0)
        return replace(one, positions=columns + np.int32(self.first_position))

    def _within_budget(self, query: Query, text: TokenizedText) -> PairInputs:
        """Return the input of a pair in the shared layout.

        It has up to `max_query_len` + `max_doc_len` + 3 tokens, special ones included; the longer one is truncated
        first. A query is not truncated to `max_query_len`, and after a short one the text may be longer.
        """
        size = min(filter(None, (self.windows.largest, self.settings.max_doc_len)), default=sys.maxsize)
        longest = min((self.max_query_len or 0) + size + PUBLISHED_SPECIALS, self.longest or sys.maxsize)
        query_size, size = longest_first(query.tokens, len(text), longest - len(self.specials))
        read = replace(query, ids=query.ids[:query_size], tokens_read=query_size)
        cut_by = f"layout={layout_name(self.settings.layout)}"
        row = self.row(read, text, [(0, size)], Counter({cut_by: len(text) - size}))
        row = replace(row, query_truncated_by=cut_by if query_size < query.tokens else "")
        return PairInputs(read, text, [(0, size)], [self.assemble(read.ids, text.ids[:size])], row)

    def row(self, query: Query, text: TokenizedText, spans: list[Span], left_out: Counter[str]) -> PairCoverage:
        """Return the coverage of a pair, with the tokens that each argument truncated."""
        limit = self.settings.max_query_len
        rule = self._query_rule if limit is None else f"max_query_len={limit}"
        query_truncated_by = rule if query.tokens_read < query.tokens else ""
        sizes = len(text), tokens_in(spans), len(spans), query.tokens, query.tokens_read
        return PairCoverage(query.text, *sizes, query_truncated_by, dict(+left_out))

    def describe(self) -> dict[str, Any]:
        """Return everything on which inputs depend apart from tokens and windows, JSON-able."""
        return {
            "class": type(self).__name__,
            "leads": [self.query_lead, self.text_lead],
            "sizes": self.sizes,
            "layout": asdict(self.settings.layout),
            "specials": asdict(self.specials),
        }


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


class TemplateReader(Reader):
    """Fills query and window into a template and tokenizes the whole, as the owners of the models do.

    A window follows the words of the template as it follows the text before it: one that begins inside a word, or at a
    punctuation mark, has no space before it.
    """

    def __init__(self, backbone: Any, settings: Settings) -> None:
        self.template = backbone.template
        self.takes_instruction = self.template.takes_instruction
        super().__init__(backbone, settings)
        self.needs_offsets = True  # windows are filled in as texts

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around an input; query and text are measured after the words before them."""
        for part in self.template.parts:
            words, places = self.template.fill_part(part, "", "", self.settings.instruction)
            if "{query}" in places:
                self.query_lead = words[: places["{query}"][0]]
            if "{text}" in places:
                self.text_lead = words[: places["{text}"][0]]
        return specials_of_text(backbone)[0] if self.template.special_tokens else Specials()

    def special_tokens(self) -> int:
        """See the base class; with a column of instructions, there is room for long ones."""
        without, instructed = self._words_around(""), self._words_around(self.settings.instruction)
        return max(instructed, without + (INSTRUCTION_TOKENS if self.settings.instruction_field else 0))

    def _words_around(self, instruction: str) -> int:
        """Return the number of tokens around query and text; a space before either belongs to it."""
        pieces = [piece for part in self.template.parts for piece in self.template.pieces(part, instruction)]
        tokens = tokenize(self.tokenizer, [piece.removesuffix(" ") for piece in pieces])
        return len(self.specials) + sum(map(len, tokens))

    def tokenize_queries(self, queries: Sequence[Question]) -> list[Query]:
        made, column = super().tokenize_queries(queries), self.settings.instruction_field
        for instruction in dict.fromkeys(query.instruction for query in made if column):
            if self._words_around(instruction) > self.special_tokens():
                raise ValueError(
                    f"the instruction {instruction[:40]!r}... in {column!r} has more than {INSTRUCTION_TOKENS} tokens, "
                    f"for which windows leave room: shorten it"
                )
        return made

    def read(
        self, queries: Sequence[Question], texts: Sequence[Document], *, offsets: bool = False
    ) -> list[PairInputs]:
        """See the base class; a window ends earlier if its prompt has more tokens than its parts and is too long."""
        pairs, longest = super().read(queries, texts, offsets=offsets), self.longest or sys.maxsize
        return [self._shortened(pair) if max(map(len, pair.windows)) > longest else pair for pair in pairs]

    def _shortened(self, pair: PairInputs) -> PairInputs:
        spans, windows = [], []
        for (start, end), window in zip(pair.spans, pair.windows, strict=True):
            while (excess := len(window) - (self.longest or sys.maxsize)) > 0 and start < end:
                end = max(start, end - excess)
                [window] = self.filled([self._prompt(pair.query, pair.text, (start, end))])
            spans.append((start, end))
            windows.append(window)
        read, cause = tokens_in(spans), "the maximum input length of the backbone"
        truncated = Counter(pair.row.truncated) + Counter({cause: pair.row.tokens_read - read})
        row = replace(pair.row, tokens_read=read, truncated=dict(truncated))
        return replace(pair, spans=spans, windows=windows, row=row)

    def inputs(self, queries: Sequence[Query], cuts: Sequence[Cut]) -> list[list[Input]]:
        pairs = list(zip(queries, cuts, strict=True))
        prompts = [self._prompt(query, document, span) for query, (document, spans, _) in pairs for span in spans]
        inputs = iter(self.filled(prompts))
        return [[next(inputs) for _ in spans] for _, spans, _ in cuts]

    def _prompt(self, query: Query, document: TokenizedText, span: Span) -> tuple[str, str, str, bool]:
        """Return the query, a window with its title, the instruction, and whether the window begins inside a text."""
        start, end = document.characters(span)
        if span[0] == 0:
            start = 0
        elif start < end:  # the space before a word is part of its token, but not of all tokenizers' offsets
            start = min(start, document.characters((span[0] - 1, span[0]))[1])
        if start < end and span[1] == len(document) and not document.text[end:].strip():
            end = len(document.text)  # white space without tokens, or outside their offsets
        text, inside = document.text[start:end], 0 < span[0] < span[1]
        if document.title is not None:
            text, inside = join_lines(document.title.text, text.removeprefix(" ") if inside else text), False
        return query.text_read, text, query.instruction, inside

    def filled(self, prompts: Sequence[tuple[str, str, str, bool]]) -> list[Input]:
        """Return the inputs of queries, texts, instructions, and whether the texts begin inside others."""
        prefix, suffix = (np.array(ids, dtype=np.int32) for ids in (self.specials.prefix, self.specials.suffix))
        rows: list[list[np.ndarray]] = [[prefix] for _ in prompts]
        places: list[dict[str, Span]] = [{} for _ in prompts]
        for part in self.template.parts:
            filled = [self.template.fill_part(part, *prompt) for prompt in prompts]
            strings = list(dict.fromkeys(string for string, _ in filled))
            tokens_of = dict(zip(strings, tokenize(self.tokenizer, strings, offsets=True), strict=True))
            for row, place, (string, slots) in zip(rows, places, filled, strict=True):
                tokens, before = tokens_of[string], sum(map(len, row))
                for slot, (start, end) in slots.items():
                    first = int(tokens.tokens_before(start))
                    place[slot] = before + first, before + max(first, tokens.tokens_begun(end))
                row.append(tokens.ids)
        padding = np.array([self.pad_id], dtype=np.int32)  # for an empty prompt, because a model cannot read nothing
        ids = [np.concatenate([*row, suffix]) for row in rows]
        return [
            Input(own if len(own) else padding, place["{query}"], place["{text}"])
            for own, place in zip(ids, places, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "template": asdict(self.template)}


class SeparateReader(Reader):
    """Reads queries and windows as separate inputs, each optionally after a prefix.

    A window's states thus serve all queries.

    Args:
        backbone: the encoder.
        settings: the model's settings.
        prefixes: the texts before every query and before every window.
        lengths: the maximum number of tokens of a query and of a window in the checkpoint's training, special ones
            included; used if no argument gives a size. None if only the backbone limits them.

    Attributes:
        query_specials: the special tokens around a query.
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
        self._query_rule = f"the checkpoint's maximum query length of {self.max_query_len}"

    def make_specials(self, backbone: Any) -> Specials:
        """Return the special tokens around windows; set those around queries, and the white space before both."""
        found = [specials_of_text(backbone, prefix) for prefix in self.prefixes]
        for name, prefix, (specials, _) in zip(("query_prefix", "passage_prefix"), self.prefixes, found, strict=True):
            if self.longest is not None and len(specials) >= self.longest:
                raise ValueError(f"{name}={prefix!r} fills the backbone's {self.longest} tokens")
        (self.query_specials, self.query_lead), (specials, self.text_lead) = found
        return specials

    def limits(self) -> tuple[int, int, int] | None:
        if self.longest is None:
            return None
        query, window = self.longest - len(self.query_specials), self.longest - len(self.specials)
        return query, window, query + window

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

    def tokenize(self, texts: Sequence[Document], *, offsets: bool = False) -> list[TokenizedText]:
        distinct = list(dict.fromkeys(texts))

        def tokenize(new: list[int]) -> list[TokenizedText]:
            return super(SeparateReader, self).tokenize([distinct[i] for i in new], offsets=offsets)

        keys = [(self, offsets, text) for text in distinct]
        found = dict(zip(distinct, self.cache.get_or_compute(keys, tokenize), strict=True))
        return [found[text] for text in texts]

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return the input of a window, which does not depend on the query."""
        return self.placed(self.specials.around(NOTHING, content, 0, self.sizes[1]))

    def assemble_query(self, query: np.ndarray) -> Input:
        """Return the input of a query."""
        return self.placed(self.query_specials.around(NOTHING, query, 0, self.sizes[0]))

    def inputs(self, queries: Sequence[Query], cuts: Sequence[Cut]) -> list[list[Input]]:
        """See the base class; each window of a text is assembled once for all pairs."""
        windows = {
            window: self.assemble(NOTHING, self.content(*window))
            for window in dict.fromkeys((document, span) for document, spans, _ in cuts for span in spans)
        }
        return [[windows[document, span] for span in spans] for document, spans, _ in cuts]

    def read(
        self, queries: Sequence[Question], texts: Sequence[Document], *, offsets: bool = False
    ) -> list[PairInputs]:
        """See the base class; each query is assembled once for all pairs."""
        pairs = super().read(queries, texts, offsets=offsets)
        of_query = {query: self.assemble_query(query.ids) for query in dict.fromkeys(pair.query for pair in pairs)}
        return [replace(pair, query_input=of_query[pair.query]) for pair in pairs]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "query_specials": asdict(self.query_specials)}


def reader_of(backbone: Any, settings: Settings) -> Reader:
    """Return a backbone's reader of a query and a window in one input; ValueError if the settings do not fit it."""
    if settings.layout.is_for_pairs and (backbone.template is not None or backbone.prompt):
        raise ValueError(
            f"{settings.layout!r} is for [CLS] query [SEP] text [SEP]; this backbone has a template: use layout='pair'"
        )
    return Reader(backbone, settings) if backbone.template is None else TemplateReader(backbone, settings)
