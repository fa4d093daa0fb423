"""Tokens of texts that were tokenised before: in the next run, for the next query, in the next epoch."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .caches import EmbeddingCache
from .texts import TokenizedText, tokenize

T = TypeVar("T")

CACHED_TOKEN_BYTES = 64 * 2**20
"""Most memory for remembered tokens of one model: 16 million tokens, a third of that with character offsets."""

ENTRY_BYTES = 400
"""About what an entry takes besides its tokens: key, hash and the two objects around the array."""

_CONTENTS: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...] | None, bytes | None]] = weakref.WeakKeyDictionary()


class TokenCache:
    """Tokenises texts, each distinct one once as long as its tokens are remembered.

    Texts are known by their hashes, so that they need not be kept. Everything is forgotten when the tokenizer is
    another one or has other settings, and nothing is remembered of one with BPE dropout, or with a step that is
    written in Python (RoFormer's), whose settings cannot be read. A copy starts empty.

    Args:
        max_bytes: most memory for tokens; the least recently used go first.
    """

    def __init__(self, max_bytes: int = CACHED_TOKEN_BYTES) -> None:
        self.cache = EmbeddingCache(max_bytes, entry_bytes=ENTRY_BYTES)
        self._tokenizer: Any = None
        self._settings: tuple[Any, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenCache:
        return TokenCache(self.cache.max_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache, (self.cache.max_bytes,)

    def __call__(
        self, tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = ""
    ) -> list[TokenizedText]:
        """As `texts.tokenize`; equal texts share one result."""
        remembers = self._forget_if_changed(tokenizer)
        hashes = {text: _hash(text) for text in dict.fromkeys(texts)}
        found = {
            text: self._recall(text, (lead, content), offsets) if remembers else None
            for text, content in hashes.items()
        }
        new = [text for text, tokens in found.items() if tokens is None]
        made = dict(zip(new, tokenize(tokenizer, new, offsets=offsets, lead=lead), strict=True))
        if remembers:
            for text, tokens in made.items():
                self.cache.put((lead, hashes[text], offsets), _as_array(tokens))
        known = {text: tokens for text, tokens in found.items() if tokens is not None} | made
        return [known[text] for text in texts]

    def _recall(self, text: str, key: tuple[str, bytes], offsets: bool) -> TokenizedText | None:
        kept = self.cache.get((*key, True))
        if kept is not None:
            return TokenizedText(kept[0], text, kept[1], kept[2])
        kept = None if offsets else self.cache.get((*key, False))
        return None if kept is None else TokenizedText(kept[0], text)

    def _forget_if_changed(self, tokenizer: Any) -> bool:
        """Forgets what another tokenizer has made; returns whether this one makes the same of a text every time."""
        settings = tokenizer_settings(tokenizer)
        if tokenizer is not self._tokenizer or settings != self._settings:
            self.cache.clear()
            self._tokenizer, self._settings = tokenizer, settings
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return settings is not None and not getattr(getattr(backend, "model", None), "dropout", None)


def tokenizer_settings(tokenizer: Any) -> tuple[Any, ...] | None:
    """What of a tokenizer can be changed in place: added tokens, and the steps around its model; None if unreadable."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ()
    around = (backend.normalizer, backend.pre_tokenizer)
    steps = [b"" if step is None else _read(step.__getstate__) for step in around]
    if None in steps:
        return None
    added = tuple(sorted((number, str(token)) for number, token in backend.get_added_tokens_decoder().items()))
    return (added, backend.encode_special_tokens, *steps)


def as_json(tokenizer: Any) -> str | None:
    """All of a fast tokenizer; None if a step of it is written in Python."""
    return _read(tokenizer.backend_tokenizer.to_str)


def _read(read: Callable[[], T]) -> T | None:
    """What a tokenizer, or a step of it, writes down; None of what is written in Python."""
    try:
        return read()
    except Exception as error:  # tokenizers has no class of its own for it
        if "cannot be serialized" not in str(error):
            raise
        return None


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Whether two fast tokenizers are known to make the same of every text."""
    if tokenizer is other:
        return True
    content = _content(tokenizer)
    return content is not None and content == _content(other)


def _content(tokenizer: Any) -> bytes | None:
    """A hash of all of a fast tokenizer; writing it down takes long, so that it is remembered. None if unreadable."""
    settings = tokenizer_settings(tokenizer)
    known, content = _CONTENTS.get(tokenizer, (None, None))
    if settings is None or known != settings:
        written = as_json(tokenizer)
        content = None if written is None else hashlib.blake2b(written.encode()).digest()
        _CONTENTS[tokenizer] = settings, content
    return content


def _as_array(tokens: TokenizedText) -> np.ndarray:
    """`(1, L)` ids, or `(3, L)` ids, starts and ends."""
    if tokens.starts is None or tokens.ends is None:
        return tokens.ids[None]
    return np.stack([tokens.ids, tokens.starts, tokens.ends])


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
