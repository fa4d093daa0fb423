"""Texts as tokens: each tokenised once, with its characters, and with the title that is read with its windows.

A window with a title is read as `title, line break, window`, each tokenized by itself, so that a text has the same
tokens and windows with a title and without. Word pieces have no token for a line break: with these nothing stands
between the two.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from ..common.caches import EmbeddingCache
from ..common.frames import Text, as_document, on_lines
from ..common.language import named_tokenizer, sentence_starts, token_spans

Span = tuple[int, int]
"""Half-open: start and end of a window, in tokens or characters."""


@dataclass(frozen=True, eq=False)
class Title:
    """The title that is read with each window of a text."""

    ids: np.ndarray  # its tokens, and what stands between it and the window
    text: str  # of which these are the tokens, as far as they are read
    tokens: int  # how many the whole of it has
    tokens_read: int  # how many of these are read


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens, without special tokens.

    Attributes:
        ids: `(L,)` int32 token ids.
        text: the text the tokens come from.
        offsets: `(L, 2)` int32 characters at which each token begins and ends; None if they were not asked for.
        title: read with each of its windows; None if nothing is.
        follows: `(L,)` bool, whether each token stands behind the one before it in the text; None if all do.
    """

    ids: np.ndarray
    text: str = ""
    offsets: np.ndarray | None = None
    title: Title | None = None
    follows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, span: Span) -> np.ndarray:
        """Return the token ids of a window as it is read: those of its title, then its own."""
        own = self.ids[slice(*span)]
        return own if self.title is None else np.concatenate([self.title.ids, own])

    def shown(self, span: Span) -> str:
        """Return the text of a window as it is read: its title on lines of its own, then the window."""
        return on_lines("" if self.title is None else self.title.text, self.written(span))

    def head(self, length: int) -> TokenizedText:
        """Return the same text with its first `length` tokens alone."""
        return self if len(self) <= length else self._at(slice(length))

    def beginning(self, length: int) -> str:
        """Return the text up to its token number `length`; the whole text if it has no more."""
        return self.text if len(self) <= length else self.text[: self.characters((0, length))[1]]

    def only(self, spans: Sequence[Span]) -> TokenizedText:
        """Return the same text with the tokens in these windows alone, in order and each once."""
        keep = np.zeros(len(self), dtype=bool)
        for start, end in spans:
            keep[start:end] = True
        return replace(self._at(keep), follows=(keep & np.roll(keep, 1))[keep])

    def with_sentences_marked(self, mark: int) -> TokenizedText:
        """Return the same text with a token before each sentence, at the characters of its first token."""
        starts = np.unique([0, *self.tokens_before(sentence_starts(self.text))])
        starts = starts[starts < len(self)]
        offsets = self._known_offsets()
        return replace(
            self, ids=np.insert(self.ids, starts, mark), offsets=np.insert(offsets, starts, offsets[starts], axis=0)
        )

    def _at(self, places: slice | np.ndarray) -> TokenizedText:
        offsets, follows = (None if each is None else each[places] for each in (self.offsets, self.follows))
        return replace(self, ids=self.ids[places], offsets=offsets, follows=follows)

    def written(self, span: Span) -> str:
        """Return the characters of a window; parts between which `only` left something out are joined by a space."""
        start, end = span
        follows = [] if self.follows is None else self.follows[start + 1 : end].tolist()
        edges = [start, *(place for place, own in enumerate(follows, start + 1) if not own), end]
        parts = [self.characters(part) for part in itertools.pairwise(edges)]
        return " ".join(self.text[first:last] for first, last in parts)

    def characters(self, span: Span) -> Span:
        """Return where a window starts and ends in characters; an empty one stands where the token before it ends."""
        offsets = self._known_offsets()
        window = offsets[slice(*span)]
        if not len(window):
            before = int(offsets[: span[0], 1].max(initial=0))
            return before, before
        return int(window[0, 0]), int(window[:, 1].max())

    def tokens_before(self, characters: int | Sequence[int]) -> np.ndarray:
        """Return how many tokens end before each character offset, or with it: byte-level tokens begin with a space."""
        return np.searchsorted(np.maximum.accumulate(self._known_offsets()[:, 1]), characters, side="right")

    def tokens_begun(self, character: int) -> int:
        """Return how many tokens begin before a character offset."""
        return int(np.searchsorted(self._known_offsets()[:, 0], character, side="left"))

    def _known_offsets(self) -> np.ndarray:
        if self.offsets is None:
            raise ValueError("this text was tokenised without character offsets")
        return self.offsets


def tokenize(tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = "") -> list[TokenizedText]:
    """Return all tokens without special ones; `lead` is put before each text, and offsets do not count it."""
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
    found = []
    for row, text, pairs in zip(ids, texts, encoded["offset_mapping"], strict=True):
        characters = np.maximum(np.asarray(pairs, dtype=np.int32).reshape(-1, 2) - len(lead), 0)
        found.append(TokenizedText(row, text, characters))
    return found


def tokenized(tokenizer: Any, text: str) -> TokenizedText:
    """Return a text's tokens with their characters, by a fast tokenizer; None: words and punctuation marks."""
    if isinstance(tokenizer, str | Path):
        tokenizer = named_tokenizer(tokenizer)
    if tokenizer is not None:
        return tokenize(tokenizer, [text], offsets=True)[0]
    spans = np.array(token_spans(text), dtype=np.int32).reshape(-1, 2)
    return TokenizedText(np.zeros(len(spans), dtype=np.int32), text, spans)


CACHED_TOKEN_BYTES = 64 * 2**20
"""Most memory for remembered tokens of one model: 16 million tokens, a third of that with character offsets."""

ENTRY_BYTES = 400
"""About what an entry takes besides its tokens: key, hash and the two objects around the array."""


class TokenCache:
    """Tokenises texts, each distinct one once as long as its tokens are among the remembered `max_bytes`.

    Texts are known by their hashes, so that they need not be kept. Everything is forgotten when the tokenizer is
    another one or has other settings, and nothing is remembered of one with BPE dropout, or with a step that is
    written in Python (RoFormer's), whose settings cannot be read. A copy starts empty.
    """

    def __init__(self, max_bytes: int = CACHED_TOKEN_BYTES) -> None:
        self.cache = EmbeddingCache(max_bytes, ENTRY_BYTES)
        self._tokenizer: Any = None
        self._settings: list[Any] = []

    def __call__(
        self, tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = ""
    ) -> list[TokenizedText]:
        """Tokenise as `tokenize` does; equal texts share one result."""
        remembers = self._forget_if_changed(tokenizer.backend_tokenizer)
        known: dict[str, TokenizedText] = {}
        new: dict[str, bytes] = {}
        for text in dict.fromkeys(texts):
            content = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            found = self.cache.get((lead, content, True))
            if found is None and not offsets:
                found = self.cache.get((lead, content, False))
            if found is None:
                new[text] = content
            else:
                known[text] = TokenizedText(found[0], text, found[1:].T if len(found) > 1 else None)
        known |= zip(new, tokenize(tokenizer, list(new), offsets=offsets, lead=lead), strict=True)
        if remembers:
            for text, content in new.items():
                tokens = known[text]
                rows = [tokens.ids] if tokens.offsets is None else [tokens.ids, *tokens.offsets.T]
                self.cache.put((lead, content, offsets), np.stack(rows))
        return list(map(known.__getitem__, texts))

    def _forget_if_changed(self, backend: Any) -> bool:
        """Forget what another tokenizer has made; return whether this one makes the same of a text every time."""
        steps = [serialized(backend.normalizer), serialized(backend.pre_tokenizer)]
        added = sorted(map(repr, backend.get_added_tokens_decoder().items()))
        dropout = getattr(backend.model, "dropout", None)
        settings = [*steps, *added, backend.encode_special_tokens, dropout]
        if backend is not self._tokenizer or settings != self._settings:
            self.cache.clear()
            self._tokenizer, self._settings = backend, settings
        return None not in steps and not dropout


def serialized(part: Any) -> bytes | None:
    """Return a tokenizer's backend, or a step of it, as bytes; None if it is written in Python."""
    try:
        return b"" if part is None else part.__getstate__()
    except Exception as error:  # tokenizers has no class of its own for it
        if "cannot be serialized" not in str(error):
            raise
        return None


# Titles: what is read with each window of a text.

Tokenize = Callable[[Sequence[str]], list[TokenizedText]]


def tokenize_documents(tokenize: Tokenize, texts: Sequence[Text], repeat_tokens: int) -> list[TokenizedText]:
    """Return the tokens of texts with their titles, cut to so many tokens, line break included; 0 reads none."""
    documents = list(map(as_document, texts))
    read = tokenize(list(map(attrgetter("text"), documents)))
    if not repeat_tokens:
        return read
    titles = list(dict.fromkeys(own.repeated for own in documents if own.repeated))
    known = dict(zip(titles, _titles(tokenize, titles, repeat_tokens), strict=True))
    return [replace(body, title=known.get(own.repeated)) for body, own in zip(read, documents, strict=True)]


def _titles(tokenize: Tokenize, texts: Sequence[str], limit: int) -> list[Title]:
    """Return titles of at most so many tokens, line break included."""
    word, with_break, *tokenized = tokenize(["a", "a\n", *texts])
    line_break = with_break.ids[len(word) :]
    most = max(0, limit - len(line_break))
    found = []
    for whole in tokenized:
        head = whole.head(most)
        cut = len(head) < len(whole) and head.offsets is not None
        shown = whole.text[: head.characters((0, len(head)))[1]] if cut else whole.text
        found.append(Title(np.concatenate([head.ids, line_break]), shown, len(whole), len(head)))
    return found
