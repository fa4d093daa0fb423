"""Counting tokens, shortening documents to a budget, and saying how much was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..common.coverage import Coverage
from .parallel import Lock
from .prompts import Message

CHARACTERS_PER_TOKEN = 4
"""Without a tokenizer: OpenAI's rule of thumb for English. Other scripts have fewer characters per token."""

TOKENS_PER_MESSAGE = 4
"""What chat templates add around a message: role and marks of begin and end."""


class Tokens:
    """Counts and cuts by the tokens of a model, as well as they are known.

    Args:
        tokenizer: a Hugging Face tokenizer, a tiktoken encoding, or a function from a text to its number of tokens;
            None counts four characters as a token.

    Raises:
        ValueError: if it is none of these.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._count = _counter(tokenizer)
        # Hugging Face tokenizers refuse to be used by two threads at the same time.
        self._lock = Lock()

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens."""
        with self._lock:
            return int(self._count(text))

    def cut(self, text: str, limit: int) -> str:
        """The longest beginning of a text that was found to have at most `limit` tokens."""
        end = max(limit, 1) * CHARACTERS_PER_TOKEN
        while end < len(text) and self.count(text[:end]) <= limit:
            end *= 2
        end = min(end, len(text))
        if self.count(text[:end]) <= limit:
            return text[:end]
        begin = 0  # the beginning fits, the end does not
        while end - begin > 1:
            middle = (begin + end) // 2
            if self.count(text[:middle]) <= limit:
                begin = middle
            else:
                end = middle
        return text[:begin]

    def of_messages(self, messages: Sequence[Message]) -> int:
        """Number of tokens of a conversation."""
        return sum(self.count(message["content"]) + TOKENS_PER_MESSAGE for message in messages)


def _counter(tokenizer: Any) -> Callable[[str], int]:
    if tokenizer is None:
        return _estimated
    if hasattr(tokenizer, "encode_ordinary"):
        return partial(_tiktoken_length, tokenizer)
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return partial(_huggingface_length, tokenizer)
    if callable(tokenizer):
        return tokenizer
    raise ValueError(
        f"tokenizer={tokenizer!r} must be a Hugging Face tokenizer, a tiktoken encoding or a function from a text to "
        f"its number of tokens"
    )


def _estimated(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def _tiktoken_length(encoding: Any, text: str) -> int:
    # encode() refuses texts that spell a special token, such as "<|endoftext|>".
    return len(encoding.encode_ordinary(text))


def _huggingface_length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def fair_limit(lengths: Sequence[int], budget: int) -> int:
    """The largest limit so that documents cut to it have at most `budget` tokens together: the longest shrink first.

    Example:
        >>> fair_limit([10, 100, 200], 150)
        70
    """
    left = budget
    for i, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - i)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


class DocumentReader:
    """Shortens the documents of a run and remembers how much of each was shown.

    Args:
        tokens: counts them.
        max_doc_tokens: show at most so many tokens of a document; None for no limit.
    """

    def __init__(self, tokens: Tokens, max_doc_tokens: int | None = None) -> None:
        self.tokens = tokens
        self.max_doc_tokens = max_doc_tokens
        self._length: dict[str, int] = {}
        self._least_shown: dict[str, int] = {}
        self._lock = Lock()

    def length(self, text: str) -> int:
        """Number of tokens of a text, counted once."""
        if text not in self._length:
            self._length[text] = self.tokens.count(text)
        return self._length[text]

    def fit(self, texts: Sequence[str], budget: int | None) -> list[str]:
        """Texts shortened to `max_doc_tokens` each, and to `budget` tokens together if there is one."""
        lengths = [self.length(text) for text in texts]
        limit = max(lengths, default=0) if self.max_doc_tokens is None else self.max_doc_tokens
        if budget is not None:
            limit = min(limit, fair_limit([min(length, limit) for length in lengths], budget))
        return [
            text if length <= limit else self.tokens.cut(text, limit)
            for text, length in zip(texts, lengths, strict=True)
        ]

    def note(self, texts: Sequence[str], shown: Sequence[str]) -> None:
        """Remembers what a model has read of texts."""
        for text, part in zip(texts, shown, strict=True):
            read = self.length(text) if part == text else self.tokens.count(part)
            with self._lock:
                self._least_shown[text] = min(read, self._least_shown.get(text, read))

    def coverage(self, queries: int) -> Coverage:
        """What was read of the distinct texts shown so far.

        A text that several prompts showed in different lengths counts with the shortest.
        """
        coverage = Coverage(queries=queries)
        for text, read in self._least_shown.items():
            coverage.add_document(self.length(text), [(0, read)])
        return coverage
