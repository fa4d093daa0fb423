"""Window rules: how a document is divided into windows.

A window is a half-open span of token positions `(start, end)` in a tokenized document. Every class here is a frozen
dataclass. Called with a tokenized document, even an empty one, it returns at least one window. Without `max_windows`,
the windows cover every token, including the end of the document.

Sources: greedy chunks and sliding token windows, Boytsov et al. 2025 (A.1.3 and their configurations);
windows in words and the choice of first, last and random middle passages, Li et al. (PARADE), section 3.1.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..common.arguments import argument, validate
from ..common.language import sentence_starts, word_starts
from ..common.presentation import ReprMixin
from ..common.registry import CLASSES, register
from .tokens import Span, TokenizedText

CHUNK_TOKENS = 477
"""512 positions - 32 query tokens - 3 special tokens: the papers' document budget of one BERT input."""

SELECTIONS = ("first", "first_last_random")


@dataclass(frozen=True, kw_only=True, repr=False)
class Windows(ReprMixin, ABC):
    """Base of the window rules, which divide a tokenized document into windows.

    A new rule is a frozen dataclass with `spans` and `largest`. It sets `needs_text` if it needs the text, and
    `overlaps` if windows can share tokens. Models with it can be saved, and loaded wherever the class is defined.

    Args:
        max_windows: the maximum number of windows per document; None keeps all.
        selection: which windows to keep: `"first"`, or `"first_last_random"` (PARADE: the first, the last and a random
            choice of the others, in document order). The choice depends only on the document's tokens and `seed`, so a
            document always has the same windows.
        seed: the seed of that choice.
    """

    max_windows: int | None = argument(None, at_least=1)
    selection: str = argument("first", choices=SELECTIONS)
    seed: int = 42

    needs_text: ClassVar[bool] = False
    """Whether the windows depend on the text and its character offsets, not on the number of tokens alone."""

    @property
    def overlaps(self) -> bool:
        """Whether windows can share tokens."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            raise TypeError(f"{cls.__name__} defines __init__, whose arguments would not be saved: make it a dataclass")
        if not cls.__name__.startswith("_"):
            register(CLASSES["windows"], "windows", cls.__name__, cls)

    def __post_init__(self) -> None:
        validate(self)

    def __call__(self, tokens: Sequence[int] | TokenizedText) -> list[Span]:
        """Return at least one window, in document order; token ids suffice unless `needs_text` is set."""
        return self.selected(self.every(tokens), tokens)

    def every(self, tokens: Sequence[int] | TokenizedText) -> list[Span]:
        """Return all windows, at least one, before `max_windows` drops any."""
        length, most = len(tokens), self.largest or len(tokens)
        spans = []
        for start, end in self.spans(tokens):
            stop = min(end, length)
            if not 0 <= start <= end or stop - start > most:
                raise ValueError(
                    f"{type(self).__name__}.spans returned the window {(start, end)}: windows must begin at 0 or "
                    f"later, not after their end, and have at most {most} tokens, the value of largest"
                )
            if start < stop:
                spans.append((start, stop))
        return spans or [(0, 0)]

    @abstractmethod
    def spans(self, tokens: Any) -> list[Span]:
        """Return all windows in document order; the caller drops empty ones."""

    @property
    @abstractmethod
    def largest(self) -> int | None:
        """The maximum size of a window in tokens; None if only the backbone limits it."""

    def resized(self, capacity: int) -> Windows:
        """Return windows that fit into `capacity` document tokens; ValueError if they do not fit."""
        if self.largest is not None and self.largest > capacity:
            raise ValueError(
                f"{self!r} does not fit: its windows have up to {self.largest} tokens, but next to the query and the "
                f"special tokens the backbone takes {capacity} document tokens. Use smaller windows, lower "
                f"max_query_len or repeat_tokens, or use another backbone"
            )
        return self

    def selected(self, spans: list[Span], tokens: Sequence[int] | TokenizedText) -> list[Span]:
        """Return those of all windows of a text that are kept."""
        if self.max_windows is None or len(spans) <= self.max_windows:
            return spans
        if self.selection == "first" or self.max_windows == 1:
            return spans[: self.max_windows]
        ids = tokens.ids if isinstance(tokens, TokenizedText) else tokens
        document = zlib.crc32(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
        middle = random.Random(f"{self.seed}:{document}").sample(range(1, len(spans) - 1), self.max_windows - 2)
        return [spans[0], *(spans[i] for i in sorted(middle)), spans[-1]]


@dataclass(frozen=True, repr=False)
class _TokenWindows(Windows):
    """Windows of a number of tokens."""

    size: int | None = argument(None, at_least=1)

    @property
    def largest(self) -> int:
        return self.size or CHUNK_TOKENS

    def resized(self, capacity: int) -> Windows:
        if self.size is None:
            return replace(self, size=min(CHUNK_TOKENS, capacity))
        return super().resized(capacity)


@dataclass(frozen=True, repr=False)
class Truncate(_TokenWindows):
    """One window: the first `size` tokens (FirstP, and LongP with a large size).

    Args:
        size: tokens in a window; None for 477 (512 - 32 - 3), or less if the backbone cannot take as many.

    Example:
        >>> Truncate(4)([1, 2, 3, 4, 5])
        [(0, 4)]
    """

    def spans(self, tokens: Any) -> list[Span]:
        return [(0, min(len(tokens), self.largest))]


@dataclass(frozen=True, repr=False)
class GreedyChunks(_TokenWindows):
    """Disjoint chunks of `size` tokens; the last one may be shorter (AvgP, CEDR, Neural Model 1).

    Args:
        size: tokens in a window; None for 477 (512 - 32 - 3), or less if the backbone cannot take as many.

    Example:
        >>> GreedyChunks(2)([1, 2, 3, 4, 5])
        [(0, 2), (2, 4), (4, 5)]
    """

    def spans(self, tokens: Any) -> list[Span]:
        return _slide(len(tokens), self.largest, self.largest)


@dataclass(frozen=True, repr=False)
class SlidingWindows(_TokenWindows):
    """Windows of `size` tokens that begin every `stride` tokens (MaxP, SumP, PARADE).

    A document of `D` tokens has `ceil(max(0, D - size) / stride) + 1` windows. The last one ends with the document.

    Args:
        size: tokens in a window.
        stride: tokens from one window's start to the next one's, at most `size`.

    Example:
        >>> SlidingWindows(4, 2)(range(7))
        [(0, 4), (2, 6), (4, 7)]
    """

    size: int = argument(150, at_least=1)
    stride: int = argument(75, at_least=1, at_most="size")

    @property
    def overlaps(self) -> bool:
        return self.stride < self.size

    def spans(self, tokens: Any) -> list[Span]:
        return _slide(len(tokens), self.size, self.stride)


@dataclass(frozen=True, repr=False)
class FixedGrid(SlidingWindows):
    """The same number of windows for every document, even if some contain only padding (FlexNeuART).

    Boytsov et al. 2022 and 2025 evaluated their models in this way. They pad documents to `length` tokens, so the last
    windows of a shorter document repeat tokens of the window before or are empty. These windows are scored like any
    other, so scores depend on `length`. To reproduce published figures, use the papers' fixed input layout, which pads
    windows. Explanations show empty windows at the end of the text.

    Args:
        size: tokens in a window.
        stride: tokens from one window's start to the next one's.
        length: the length in tokens to which documents are padded or truncated; 1,431 = 3 x 477 in both papers.

    Example:
        >>> FixedGrid(4, 2, 8)(range(5))
        [(0, 4), (2, 5), (4, 5)]
        >>> FixedGrid(4, 2, 8)(range(1))
        [(0, 1), (1, 1), (1, 1)]
    """

    length: int = argument(1431, at_least=1)

    def every(self, tokens: Sequence[int] | TokenizedText) -> list[Span]:
        return self.spans(tokens)

    def spans(self, tokens: Any) -> list[Span]:
        end = min(len(tokens), self.length)
        return [(min(a, end), min(b, end)) for a, b in _slide(self.length, self.size, self.stride)]


@dataclass(frozen=True, repr=False)
class WholeText(Windows):
    """One window: as much of the text as the backbone takes (LongP).

    Args:
        size: the maximum number of tokens; the backbone limits None and larger sizes.

    Example:
        >>> WholeText()([1, 2, 3, 4, 5])
        [(0, 5)]
    """

    size: int | None = argument(None, at_least=1)

    @property
    def largest(self) -> int | None:
        return self.size

    def resized(self, capacity: int) -> Windows:
        return replace(self, size=min(self.size or capacity, capacity))

    def spans(self, tokens: Any) -> list[Span]:
        return [(0, min(len(tokens), self.size or len(tokens)))]


class _TextWindows(Windows):
    """Windows of words or sentences with at most `max_tokens` tokens."""

    needs_text: ClassVar[bool] = True
    max_tokens: int | None  # each subclass's own field: the order of their arguments differs

    @property
    def largest(self) -> int | None:
        return self.max_tokens

    def resized(self, capacity: int) -> Windows:
        if self.max_tokens is None:
            return replace(self, max_tokens=capacity)  # type: ignore[call-arg]
        return super().resized(capacity)


@dataclass(frozen=True, repr=False)
class SlidingWords(_TextWindows):
    """Windows of `size` whitespace-separated words that begin every `stride` words (PARADE, section 3.1).

    Differs from PARADE: a window with more tokens than the backbone takes is divided, not truncated.

    Args:
        size: words in a window.
        stride: words from one window's start to the next one's, at most `size`.
        max_tokens: the maximum number of tokens in a window; None for what the backbone takes.
    """

    size: int = argument(150, at_least=1)
    stride: int = argument(100, at_least=1, at_most="size")
    max_tokens: int | None = argument(None, at_least=1)

    @property
    def overlaps(self) -> bool:
        return self.stride < self.size

    def spans(self, tokens: Any) -> list[Span]:
        first = _first_tokens(tokens, [0, *word_starts(tokens.text)])
        spans = [(first[a], first[b]) for a, b in _slide(len(first) - 1, self.size, self.stride)]
        return _divide(spans, self.max_tokens)


@dataclass(frozen=True, repr=False)
class SentenceWindows(_TextWindows):
    """Disjoint windows of whole sentences (BeST; with one sentence each, Birch).

    Sentences end at `.`, `!` or `?` followed by white space, at their CJK, Arabic and Indic counterparts, and at blank
    lines. A sentence is divided only if it is longer than `max_tokens`.

    Args:
        max_tokens: the maximum number of tokens in a window; None for what the backbone takes.
        max_sentences: the maximum number of sentences in a window; None for as many as fit.

    Example:
        `ld.MaxP(windows=ld.SentenceWindows(max_tokens=200))`
    """

    max_tokens: int | None = argument(None, at_least=1)
    max_sentences: int | None = argument(None, at_least=1)

    def spans(self, tokens: Any) -> list[Span]:
        ends = _first_tokens(tokens, [0, *sentence_starts(tokens.text)])[1:]
        limit = self.max_tokens or len(tokens)
        spans: list[Span] = []
        start = end = sentences = 0
        for sentence_end in ends:
            is_full = sentences == self.max_sentences or sentence_end - start > limit
            if is_full and end > start:
                spans.append((start, end))
                start, sentences = end, 0
            if sentence_end > end:
                end, sentences = sentence_end, sentences + 1
        return _divide([*spans, (start, end)], self.max_tokens)


def _slide(length: int, size: int, stride: int) -> list[Span]:
    count = -(-max(0, length - size) // stride) + 1
    return [(i * stride, min(i * stride + size, length)) for i in range(count)]


def _divide(spans: list[Span], limit: int | None) -> list[Span]:
    if limit is None:
        return spans
    return [(start + a, start + b) for start, end in spans for a, b in _slide(end - start, limit, limit)]


def _first_tokens(text: TokenizedText, characters: list[int]) -> list[int]:
    """Return the first token that ends after each character offset (0 for the first one), then the token count."""
    return [0, *text.tokens_before(characters[1:]).tolist(), len(text)]
