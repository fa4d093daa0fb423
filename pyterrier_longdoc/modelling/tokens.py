"""Tokenized texts, with character offsets and the titles that are prepended to their windows.

A window with a title is read as `title, line break, window`. The parts are tokenized separately, so that a text has the
same tokens and windows with and without a title; only a template is tokenized as a whole. WordPiece has no token for a
line break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import full_name
from ..common.frames import Document, join_lines
from ..common.language import TOKEN, named_tokenizer, sentence_starts

Span = tuple[int, int]
"""Half-open: start and end of a window, in tokens or characters."""


@dataclass(frozen=True, eq=False)
class Title:
    """The title that is prepended to each window of a text."""

    ids: np.ndarray  # its tokens, and the line break before the window
    text: str  # the text of these tokens
    tokens: int  # how many the whole title has
    tokens_read: int  # how many of these are read


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens, without special tokens.

    Attributes:
        ids: `(L,)` int32 token ids.
        text: the text of the tokens.
        offsets: `(L, 2)` int32 characters at which each token begins and ends; None if they are not needed.
        title: the title that is prepended to each window; None without one.
    """

    ids: np.ndarray
    text: str = ""
    offsets: np.ndarray | None = None
    title: Title | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """The size in memory, without a title."""
        return self.ids.nbytes + len(self.text) + (0 if self.offsets is None else self.offsets.nbytes)

    def read(self, span: Span) -> np.ndarray:
        """Return the token ids of a window, preceded by those of its title."""
        ids = self.ids[slice(*span)]
        return ids if self.title is None else np.concatenate([self.title.ids, ids])

    def input_text(self, span: Span) -> str:
        """Return the text of a window, preceded by its title on separate lines."""
        return join_lines("" if self.title is None else self.title.text, self.window_text(span))

    def head(self, length: int) -> TokenizedText:
        """Return the text truncated to its first `length` tokens."""
        if len(self) <= length:
            return self
        offsets = None if self.offsets is None else self.offsets[:length]
        return replace(self, ids=self.ids[:length], offsets=offsets)

    def beginning(self, length: int) -> str:
        """Return the text of the first `length` tokens, or the whole text if it is shorter."""
        return self.text if len(self) <= length else self.text[: self.characters((0, length))[1]]

    def with_sentences_marked(self, mark: int) -> TokenizedText:
        """Return the same text with a mark before each sentence, which has the offsets of the following token."""
        starts = np.unique([0, *self.tokens_before(sentence_starts(self.text))])
        starts = starts[starts < len(self)]
        offsets = self._required_offsets()
        return replace(
            self, ids=np.insert(self.ids, starts, mark), offsets=np.insert(offsets, starts, offsets[starts], axis=0)
        )

    def window_text(self, span: Span) -> str:
        """Return the text of a window."""
        return self.text[slice(*self.characters(span))]

    def characters(self, span: Span) -> Span:
        """Return the characters of a window; for an empty window, the end of the token before it."""
        offsets = self._required_offsets()
        window = offsets[slice(*span)]
        if not len(window):
            before = int(offsets[: span[0], 1].max(initial=0))
            return before, before
        return int(window[0, 0]), int(window[:, 1].max())

    def tokens_before(self, characters: int | Sequence[int]) -> np.ndarray:
        """Return the number of tokens that end at or before each offset (byte-level tokens begin with a space)."""
        return np.searchsorted(np.maximum.accumulate(self._required_offsets()[:, 1]), characters, side="right")

    def tokens_begun(self, character: int) -> int:
        """Return the number of tokens that begin before a character offset."""
        return int(np.searchsorted(self._required_offsets()[:, 0], character, side="left"))

    def _required_offsets(self) -> np.ndarray:
        if self.offsets is None:
            raise ValueError("this text was tokenised without character offsets")
        return self.offsets


def tokenize(tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = "") -> list[TokenizedText]:
    """Tokenize texts without special tokens, each after a `lead` whose characters do not count in offsets.

    White space at its end belongs to the text. Tokens of words before it are left out, which needs offsets.
    """
    if not texts:
        return []
    encoded = tokenizer(
        [lead + text if text else text for text in texts],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        truncation=False,
        verbose=False,
    )
    ids = [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
    if not offsets:
        return [TokenizedText(row, text) for row, text in zip(ids, texts, strict=True)]
    results, words = [], len(lead.rstrip(" "))
    for row, text, pairs in zip(ids, texts, encoded["offset_mapping"], strict=True):
        characters = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
        first = np.searchsorted(np.maximum.accumulate(characters[:, 1]), words, side="right") if words else 0
        results.append(TokenizedText(row[first:], text, np.maximum(characters[first:] - len(lead), 0)))
    return results


def tokenized(tokenizer: Any, text: str) -> TokenizedText:
    """Tokenize a text with a fast tokenizer; None splits it into words and punctuation marks."""
    if isinstance(tokenizer, str | Path):
        tokenizer = named_tokenizer(full_name(tokenizer))
    if tokenizer is not None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"tokenizer={tokenizer!r} must be None, a fast Hugging Face tokenizer, or its name")
        return tokenize(tokenizer, [text], offsets=True)[0]
    spans = np.array([match.span() for match in TOKEN.finditer(text)], dtype=np.int32).reshape(-1, 2)
    return TokenizedText(np.zeros(len(spans), dtype=np.int32), text, spans)


def serialized(part: Any) -> bytes | None:
    """Return a tokenizer's backend, or a step of it, as bytes; None if it is Python code."""
    try:
        return b"" if part is None else part.__getstate__()
    except Exception as error:  # tokenizers has no class for this error
        if "cannot be serialized" not in str(error):
            raise
        return None


# Titles, which are read with each window of a text.


def tokenize_documents(
    tokenizer: Any, documents: Sequence[Document], repeat_tokens: int, *, offsets: bool = False, lead: str = ""
) -> list[TokenizedText]:
    """Tokenize texts and their titles; titles have at most `repeat_tokens` tokens including a line break."""
    bodies = tokenize(tokenizer, [document.text for document in documents], offsets=offsets, lead=lead)
    titles = list(dict.fromkeys(doc.repeated for doc in documents if doc.repeated)) if repeat_tokens else []
    if not titles:
        return bodies
    word, with_break, *tokenized = tokenize(tokenizer, ["a", "a\n", *titles], offsets=offsets, lead=lead)
    line_break = with_break.ids[len(word) :]
    title_of = {}
    for title, whole in zip(titles, tokenized, strict=True):
        head = whole.head(max(0, repeat_tokens - len(line_break)))
        is_cut = len(head) < len(whole) and head.offsets is not None
        text = whole.text[: head.characters((0, len(head)))[1]] if is_cut else whole.text
        title_of[title] = Title(np.concatenate([head.ids, line_break]), text, len(whole), len(head))
    return [replace(body, title=title_of.get(doc.repeated)) for body, doc in zip(bodies, documents, strict=True)]
