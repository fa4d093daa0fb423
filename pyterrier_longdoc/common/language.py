"""Sentences of texts, and their lengths in the tokens of any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？।؟])|\n\s*\n)")  # noqa: RUF001
_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")

Counter = Callable[[Sequence[str]], list[int]]
"""The number of tokens of each text."""


def sentence_starts(text: str) -> list[int]:
    """Character offsets at which the second and later sentences of `text` begin.

    Example:
        >>> sentence_starts("One. Two! Three")
        [5, 10]
    """
    return [match.end() for match in _SENTENCE_END.finditer(text) if match.end() < len(text)]


def count_tokens(text: str) -> int:
    """Number of words and punctuation marks in ``text``, as BERT's basic tokenizer splits them.

    A lower bound on the number of word pieces of any BERT vocabulary, and one that needs no vocabulary.

    Example:
        >>> count_tokens("Return a_b.")
        5
    """
    return sum(1 for _ in _TOKEN.finditer(text))


def token_spans(text: str) -> list[tuple[int, int]]:
    """The characters `(start, end)` of the words and punctuation marks that `count_tokens` counts."""
    return [match.span() for match in _TOKEN.finditer(text)]


def token_counter(tokenizer: Any = None) -> Counter:
    """Makes a counter of what is called a tokenizer in several libraries.

    Args:
        tokenizer: None counts words and punctuation marks (`count_tokens`: a lower bound on BERT's word pieces that
            needs no vocabulary); a Hugging Face tokenizer, or the name or folder of one; a `tokenizers.Tokenizer`;
            a tiktoken encoding; or a function that gives the number of tokens of one text. Special tokens are not
            counted and nothing is truncated.

    Raises:
        TypeError: if it is none of these.

    Example:
        >>> token_counter(lambda text: len(text.split()))(["two words", ""])
        [2, 0]
    """
    if tokenizer is None:
        tokenizer = count_tokens
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    kinds = (
        ("convert_tokens_to_ids", _hugging_face),
        ("encode_ordinary", _tiktoken),
        ("encode_batch", _rust),
        ("__call__", _function),
    )
    for needed, kind in kinds:
        if hasattr(tokenizer, needed):
            return partial(kind, tokenizer)
    raise TypeError(f"tokenizer={tokenizer!r} must be a tokenizer, its name, or a function from a text to a number")


def _hugging_face(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    if not texts:
        return []
    rows = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False
    )
    return [len(row) for row in rows["input_ids"]]


def _tiktoken(encoding: Any, texts: Sequence[str]) -> list[int]:
    # encode() refuses texts that spell a special token, such as "<|endoftext|>".
    return [len(encoding.encode_ordinary(text)) for text in texts]


def _rust(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    return [len(row.ids) for row in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _function(tokenizer: Callable[[str], int], texts: Sequence[str]) -> list[int]:
    return [int(tokenizer(text)) for text in texts]
