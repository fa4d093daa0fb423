"""Tokenising texts once, and walking through many (query, text) pairs in bounded memory."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from ..common.caches import EmbeddingCache
from ..common.documents import Text, on_lines
from ..common.language import named_tokenizer, sentence_starts, token_spans

Span = tuple[int, int]
"""Half-open: start and end of a window, in tokens or characters."""

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Context:
    """What is read with a window besides its own tokens: a title, for instance.

    Attributes:
        ids: its tokens, and what stands between it and the window.
        text: of which these are the tokens, as far as they are read.
        tokens: how many the whole of it has.
        tokens_read: how many of these are read.
    """

    ids: np.ndarray
    text: str
    tokens: int
    tokens_read: int


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens, without special tokens.

    Attributes:
        ids: `(L,)` int32 token ids.
        text: the text the tokens come from.
        offsets: `(L, 2)` int32 characters at which each token begins and ends; None if they were not asked for.
        context: what is read with each of its windows; None if nothing is.
        follows: `(L,)` bool, whether each token stands behind the one before it in the text; None if all do.
    """

    ids: np.ndarray
    text: str = ""
    offsets: np.ndarray | None = None
    context: Context | None = None
    follows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, span: Span) -> np.ndarray:
        """The token ids of a window as it is read: those of its context, then its own."""
        own = self.ids[slice(*span)]
        return own if self.context is None else np.concatenate([self.context.ids, own])

    def shown(self, span: Span) -> str:
        """The text of a window as it is read: its context on lines of their own, then the window."""
        return on_lines("" if self.context is None else self.context.text, self.written(span))

    def head(self, length: int) -> TokenizedText:
        """The same text, of which only the first `length` tokens are kept."""
        return self if len(self) <= length else self._at(slice(length))

    def only(self, spans: Sequence[Span]) -> TokenizedText:
        """The same text, of which only the tokens in these windows are kept, in order and each once."""
        keep = np.zeros(len(self), dtype=bool)
        for start, end in spans:
            keep[start:end] = True
        return replace(self._at(keep), follows=(keep & np.roll(keep, 1))[keep])

    def with_sentences_marked(self, mark: int) -> TokenizedText:
        """The same text with a token before each sentence, whose characters are those of the sentence's first token.

        Args:
            mark: id of that token.
        """
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
        """The characters of a window; parts between which `only` left something out are joined by a space."""
        start, end = span
        follows = [] if self.follows is None else self.follows[start + 1 : end].tolist()
        edges = [start, *(place for place, own in enumerate(follows, start + 1) if not own), end]
        parts = [self.characters(part) for part in itertools.pairwise(edges)]
        return " ".join(self.text[first:last] for first, last in parts)

    def characters(self, span: Span) -> Span:
        """The character offsets `(start, end)` of a window; an empty one stands where the token before it ends."""
        offsets = self._known_offsets()
        window = offsets[slice(*span)]
        if not len(window):
            before = int(offsets[: span[0], 1].max(initial=0))
            return before, before
        return int(window[0, 0]), int(window[:, 1].max())

    def tokens_before(self, characters: int | Sequence[int]) -> np.ndarray:
        """How many tokens end before each character offset, or with it: byte-level tokens begin with a space."""
        return np.searchsorted(np.maximum.accumulate(self._known_offsets()[:, 1]), characters, side="right")

    def tokens_begun(self, character: int) -> int:
        """How many tokens begin before a character offset."""
        return int(np.searchsorted(self._known_offsets()[:, 0], character, side="left"))

    def _known_offsets(self) -> np.ndarray:
        if self.offsets is None:
            raise ValueError("this text was tokenised without character offsets")
        return self.offsets


def tokenize(tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = "") -> list[TokenizedText]:
    """Token ids, without special tokens and without a limit on their number.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        texts: any texts, empty ones included.
        offsets: also keep the character offsets of each token (needed for windows in words or sentences and for
            showing a window to a reader; costs several times the time).
        lead: put before every text that is not empty; offsets do not count it.
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
    found = []
    for row, text, pairs in zip(ids, texts, encoded["offset_mapping"], strict=True):
        characters = np.maximum(np.asarray(pairs, dtype=np.int32).reshape(-1, 2) - len(lead), 0)
        found.append(TokenizedText(row, text, characters))
    return found


def tokenized(tokenizer: Any, text: str) -> TokenizedText:
    """A text's tokens with their characters, by a fast Hugging Face tokenizer; words and punctuation marks for None."""
    if isinstance(tokenizer, str | Path):
        tokenizer = named_tokenizer(tokenizer)
    if tokenizer is not None:
        return tokenize(tokenizer, [text], offsets=True)[0]
    spans = np.array(token_spans(text), dtype=np.int32).reshape(-1, 2)
    return TokenizedText(np.zeros(len(spans), dtype=np.int32), text, spans)


@dataclass(frozen=True, eq=False)
class Block:
    """Some of the distinct (query, text) pairs of a run.

    Attributes:
        texts: distinct texts, of like length.
        query: for each pair the number of its query among the distinct ones.
        text: for each pair the number of its text among `texts`.
        rows: for each pair the rows of the input that ask for it.
    """

    texts: list[Text]
    query: list[int]
    text: list[int]
    rows: list[list[int]]


class Pace:
    """How many characters a block may have so that it takes about so many seconds, as far as the blocks before tell.

    The first block is one pair, the longest.

    Args:
        most: characters of a block at most, however fast it is.
        seconds: None for no limit on the time.

    Attributes:
        characters: of the next block.
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        self._most, self._seconds = most, seconds
        self.characters = most if seconds is None else 1
        self._since = time.monotonic()

    def note(self, block: Block) -> None:
        """A block is done."""
        if self._seconds is None:
            return
        now = time.monotonic()
        took, self._since = max(now - self._since, 1e-3), now
        size = len(block.rows) * max(len(block.texts[0]), 1)
        self.characters = max(1, min(self._most, int(size / took * self._seconds)))


def numbered(values: Sequence[Value]) -> tuple[list[Value], np.ndarray]:
    """The distinct values in order of appearance, and for each value its number among them, `(R,)` int64."""
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    number, distinct = pd.factorize(objects)  # its table takes a fifth of the memory of a dict
    return distinct.tolist(), number.astype(np.int64, copy=False)


def blocks(
    query_of_row: Sequence[int] | np.ndarray, texts: Sequence[Text], *, characters: int | Pace, pairs: int
) -> Iterator[Block]:
    """Divides a run into blocks, longest texts first.

    A text's pairs stay together, so that it is tokenised once; texts of like length share a block, so that
    little is padded. Longest first lets a run that does not fit into memory fail at its start.

    Args:
        query_of_row: for each row, the index of its distinct query.
        texts: for each row, its text.
        characters: bound on the number of pairs times the characters of the longest text, which is what a block
            takes when padded; a single pair may exceed it. A `Pace` may change it from block to block.
        pairs: bound on the number of pairs.
    """
    distinct, text_of_row = numbered(texts)
    of_row = np.asarray(query_of_row, dtype=np.int64)
    lengths = np.fromiter(map(len, distinct), np.int64, len(distinct))
    # Arrays: an object for every pair would take more memory than the rest of a run.
    order = np.lexsort((of_row, text_of_row, -lengths[text_of_row]))
    block, last_text, last_pair = Block([], [], [], []), -1, (-1, -1)
    for row in order:
        number, query = int(text_of_row[row]), int(of_row[row])
        if (number, query) == last_pair:
            block.rows[-1].append(int(row))
            continue
        count = len(block.rows)
        limit = characters.characters if isinstance(characters, Pace) else characters
        if count and (count >= pairs or (count + 1) * len(block.texts[0]) > limit):
            yield block
            block = Block([], [], [], [])
        if number != last_text or not block.texts:
            block.texts.append(distinct[number])
        block.query.append(query)
        block.text.append(len(block.texts) - 1)
        block.rows.append([int(row)])
        last_text, last_pair = number, (number, query)
    if block.rows:
        yield block


CACHED_TOKEN_BYTES = 64 * 2**20
"""Most memory for remembered tokens of one model: 16 million tokens, a third of that with character offsets."""

ENTRY_BYTES = 400
"""About what an entry takes besides its tokens: key, hash and the two objects around the array."""


class TokenCache:
    """Tokenises texts, each distinct one once as long as its tokens are remembered.

    Texts are known by their hashes, so that they need not be kept. Everything is forgotten when the tokenizer is
    another one or has other settings, and nothing is remembered of one with BPE dropout, or with a step that is
    written in Python (RoFormer's), whose settings cannot be read. A copy starts empty.

    Args:
        max_bytes: most memory for tokens; the least recently used go first.
    """

    def __init__(self, max_bytes: int = CACHED_TOKEN_BYTES) -> None:
        self.cache = EmbeddingCache(max_bytes, ENTRY_BYTES)
        self._tokenizer: Any = None
        self._settings: list[Any] = []

    def __call__(
        self, tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = ""
    ) -> list[TokenizedText]:
        """As `texts.tokenize`; equal texts share one result."""
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
        """Forgets what another tokenizer has made; returns whether this one makes the same of a text every time."""
        steps = [written(backend.normalizer), written(backend.pre_tokenizer)]
        added = sorted(map(repr, backend.get_added_tokens_decoder().items()))
        dropout = getattr(backend.model, "dropout", None)
        settings = [*steps, *added, backend.encode_special_tokens, dropout]
        if backend is not self._tokenizer or settings != self._settings:
            self.cache.clear()
            self._tokenizer, self._settings = backend, settings
        return None not in steps and not dropout


def written(part: Any) -> bytes | None:
    """A tokenizer's backend, or a step of it, as bytes; None of what is written in Python."""
    try:
        return b"" if part is None else part.__getstate__()
    except Exception as error:  # tokenizers has no class of its own for it
        if "cannot be serialized" not in str(error):
            raise
        return None


def each_once(values: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """What is made of each value, of an object that stands there several times once: queries may share a text."""
    made: dict[int, Any] = {}
    for value in values:
        if id(value) not in made:
            made[id(value)] = make(value)
    return [made[id(value)] for value in values]
