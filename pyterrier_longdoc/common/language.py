"""Words, sentences and tokens: positions in a text, counts, and normalization."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from .files import full_name
from .packaged import encoder_folder

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？।؟])|\n\s*\n)")  # noqa: RUF001
_SPACE = re.compile(r"\s+")

TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")
"""A word or a punctuation mark, as in BERT's basic tokenizer."""

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Scripts without spaces, as a character range; each of their characters counts as a word."""

SPACED_WORD = rf"[{UNSPACED}]|[^\s{UNSPACED}]+"
"""A word between white space, including punctuation."""

_VOWELS = "\u0900-\u0963\u0966-\u0dff"  # Indic signs, which \w does not include
_ASCII_TERM = re.compile(r"\w+", re.ASCII)
_TERM = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+(?:[{_VOWELS}]+[^\W{UNSPACED}]*)*")

Counter = Callable[[Sequence[str]], list[int]]
"""Returns the number of tokens of each text."""


def sentence_starts(text: str) -> list[int]:
    """Return the characters at which the second and later sentences of a text begin.

    Example:
        >>> sentence_starts("One. Two! Three")
        [5, 10]
    """
    return [match.end() for match in _SENTENCE_END.finditer(text) if match.end() < len(text)]


def word_starts(text: str) -> list[int]:
    """Return the characters at which the second and later words of a text begin; words are separated by white space.

    Example:
        >>> word_starts("One, two  three")
        [5, 10]
    """
    return [match.end() for match in _SPACE.finditer(text) if match.start() > 0 and match.end() < len(text)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text without surrounding white space.

    Example:
        >>> sentences("One. Two! Three")
        ['One.', 'Two!', 'Three']
    """
    starts = sentence_starts(text)
    pieces = (text[start:end].strip() for start, end in zip([0, *starts], [*starts, len(text)], strict=True))
    return [piece for piece in pieces if piece]


def count_tokens(text: str) -> int:
    """Count the words and punctuation marks of a text, as in BERT's basic tokenizer.

    This needs no vocabulary; the number of word pieces is at least as large.

    Example:
        >>> count_tokens("Return a_b.")
        5
    """
    return len(TOKEN.findall(text))


def counted(number: int, singular: str, plural: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "query", "queries"), counted(2, "query", "queries")
        ('1 query', '2 queries')
    """
    return f"{number} {singular if number == 1 else plural}"


class _Letters(dict[int, str]):
    """The result of `normalized` for each character seen so far."""

    def __missing__(self, code: int) -> str:
        parts = unicodedata.normalize("NFKD", chr(code))
        self[code] = "".join(part for part in parts if part in "\t\n\r" or not _is_dropped(part)).casefold()
        return self[code]


def _is_dropped(character: str) -> bool:
    return character == "\ufffd" or unicodedata.category(character) in ("Mn", "Cc", "Cf", "Co")


def is_visible(text: str) -> bool:
    """Return whether a text has characters other than white space and those dropped by an uncased BERT.

    Example:
        >>> is_visible("\u200b \ufeff"), is_visible("?")
        (False, True)
    """
    return any(not (character.isspace() or _is_dropped(character)) for character in text)


_LETTERS = _Letters()


def normalized(text: str) -> str:
    """Normalize a text as the tokenizer of an uncased BERT does, and convert it to plain letters.

    Letter case, accents and vowel signs (Mn), and control, format and private-use characters are removed. Ligatures and
    full-width letters become plain letters, as in other tokenizers.

    Example:
        >>> normalized("CAFE\u0301, co\u00adope\ufb01sh")
        'cafe, coopefish'
    """
    return text.translate(_LETTERS)


def words(text: str) -> list[str]:
    """Return the `normalized` words of a text: runs of letters and digits, or characters of scripts without spaces.

    Example:
        >>> words("The cat's 2nd café; 猫犬")
        ['the', 'cat', 's', '2nd', 'cafe', '猫', '犬']
    """
    plain = normalized(text)
    return _pattern(plain).findall(plain)


def word_spans(text: str) -> tuple[list[str], np.ndarray]:
    """Return the words of a text and their `(N, 2)` character spans.

    Example:
        >>> word_spans("cafe\u0301 au")[1].tolist()
        [[0, 5], [6, 8]]
    """
    plain = normalized(text)
    matches = list(_pattern(plain).finditer(plain))
    spans = np.array([match.span() for match in matches], dtype=np.int64).reshape(-1, 2)
    lengths = {character: len(_LETTERS[ord(character)]) for character in set(text)}
    if any(length != 1 for length in lengths.values()):
        ends = np.cumsum([lengths[character] for character in text])
        starts, after = np.searchsorted(ends, spans, side="right").T
        # If a character is normalized to several, such as 1/2, a word can be only the first of them.
        spans = np.stack([starts, np.maximum(after, np.searchsorted(ends, spans[:, 1]) + 1)], axis=1)
    return [match.group() for match in matches], spans


def _pattern(plain: str) -> re.Pattern[str]:
    return _ASCII_TERM if plain.isascii() else _TERM


def digest(text: str) -> int:
    """Return a fingerprint of a text that ignores white space and differences removed by `normalized`."""
    content = " ".join(normalized(text).split()).encode("utf-8", "replace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big", signed=True)


_PROBE = 'Die Größe: 1,024 naïve cafés in São Paulo; Москва, Ελλάδα, 東京 & "don\'t" (e.g. U.S.) re-read 3.14%?!'

_CURE = 'set "tokenizer_class" to "PreTrainedTokenizerFast" in tokenizer_config.json'


def load_tokenizer(name: str, **options: Any) -> Any:
    """Load the tokenizer of a folder or of the hub, and check it with `check_tokenizer`."""
    from transformers import AutoTokenizer

    try:
        # By its absolute path, because explanations, for example, refer to it by this name.
        tokenizer = AutoTokenizer.from_pretrained(full_name(name), **options)
    except Exception as error:  # tokenizers raises nothing more specific for damaged files
        is_mismatch = isinstance(error, TypeError | KeyError)
        hint = f". If tokenizer.json is not of the class's kind, {_CURE}" if is_mismatch else ""
        raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {error}{hint}") from error
    check_tokenizer(name, tokenizer)
    return tokenizer


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer without words, or one that does not split texts like its tokenizer.json.

    Transformers uses the tokenizer class in tokenizer_config.json or that of the architecture, and only reads the
    vocabulary from tokenizer.json.
    """
    from tokenizers import Tokenizer

    from .hub import find_file

    # Without files, transformers creates a tokenizer that only has special tokens and maps all words to [UNK].
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"the tokenizer of {name!r} has no words: its files (tokenizer.json, for instance) are missing"
        )
    file = find_file(name, "tokenizer.json") if tokenizer.is_fast else None
    if file is None:
        return
    loaded, stored = tokenizer.backend_tokenizer, Tokenizer.from_file(str(file))
    if type(stored.normalizer) is type(loaded.normalizer):
        stored.normalizer = loaded.normalizer  # `do_lower_case`, for instance, is set in tokenizer_config.json
    if _probe_ids(loaded) != _probe_ids(stored):
        raise ValueError(
            f"the tokenizer of {name!r} is loaded as a {type(tokenizer).__name__}, which does not split words as its "
            f"tokenizer.json does: {_CURE}"
        )


def _probe_ids(tokenizer: Any) -> list[int] | None:
    """Return the tokens of a sentence without its first word, which `add_prefix_space` changes; None if it fails."""
    tokenizer.no_truncation()
    try:
        encoded = tokenizer.encode(_PROBE, add_special_tokens=False)
    except Exception:  # noqa: BLE001 - tokenizers has no class for a vocabulary without [UNK]
        return None
    return [token for token, (start, _) in zip(encoded.ids, encoded.offsets, strict=True) if start >= _PROBE.index(" ")]


@lru_cache(maxsize=4)
def named_tokenizer(name: str | Path) -> Any:
    """Load a tokenizer of the Hugging Face hub, a folder, or the packaged encoder (cached)."""
    from .hub import reachable

    try:
        return load_tokenizer(reachable(encoder_folder(str(name)), weights=False))
    except (ValueError, OSError) as error:
        raise ValueError(f"tokenizer={str(name)!r} cannot be loaded: {error}") from error


def token_counter(tokenizer: Any = None) -> Counter:
    """Return a function that counts tokens, without special tokens and without truncation.

    Args:
        tokenizer: a Hugging Face tokenizer or its name (a folder, a model on the hub, `"longdoc:minilm-l6"`); or a
            function that returns the number of tokens of a text, e.g. for another library:
            `lambda text: len(encoding.encode_ordinary(text))`. None counts words and punctuation marks
            (`count_tokens`).

    Example:
        >>> token_counter(lambda text: len(text.split()))(["two words", ""])
        [2, 0]
    """
    if tokenizer is None:
        tokenizer = count_tokens
    if isinstance(tokenizer, str | Path):
        tokenizer = named_tokenizer(full_name(tokenizer))
    is_function = not hasattr(tokenizer, "num_special_tokens_to_add")  # a method of Hugging Face tokenizers and `Words`
    return partial(_function if is_function else _hugging_face, tokenizer)


def _hugging_face(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    if not texts:
        return []
    rows = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False
    )
    return [len(row) for row in rows["input_ids"]]


def _function(tokenizer: Callable[[str], int], texts: Sequence[str]) -> list[int]:
    return [int(tokenizer(text)) for text in texts]
