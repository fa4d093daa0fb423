"""In whose tokens the positions of a collection in files are: what is written of a tokenizer, and read back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common.arguments import check_choice
from ..common.files import read_jsonl
from ..common.language import Counter, named_tokenizer, token_counter

WORDS, NAMED, UNNAMED = "words", "named", "unnamed"


@dataclass(frozen=True)
class RecordedTokenizer:
    """What was recorded of a tokenizer; as a tokenizer itself, it is loaded when it is to count a text.

    Args:
        tokens: `"words"` and punctuation marks, or the tokens of a `"named"` or an `"unnamed"` tokenizer.
        name: by which it is loaded; of an unnamed one what it is called in messages.
    """

    tokens: str
    name: str

    def __post_init__(self) -> None:
        check_choice("tokens", self.tokens, (WORDS, NAMED, UNNAMED))

    @classmethod
    def of(cls, tokenizer: Any) -> RecordedTokenizer:
        """What is recorded of a tokenizer as `token_counter` takes it."""
        if tokenizer is None or isinstance(tokenizer, cls):
            return tokenizer or cls(WORDS, "")
        name = str(tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", ""))
        return cls(NAMED, name) if name else cls(UNNAMED, getattr(tokenizer, "__qualname__", type(tokenizer).__name__))

    def __str__(self) -> str:
        return "words and punctuation marks" if self.tokens == WORDS else f"tokens of {self.name!r}"

    @property
    def is_named(self) -> bool:
        """Whether the same name stands for the same tokenizer."""
        return self.tokens != UNNAMED

    def __call__(self, text: str) -> int:
        """The number of tokens of a text.

        Raises:
            ValueError: if the tokenizer cannot be loaded.
        """
        return self._count([text])[0]

    @cached_property
    def _count(self) -> Counter:
        return token_counter(self.load())

    def load(self) -> Any:
        """The tokenizer itself; None where words and punctuation marks are counted.

        Raises:
            ValueError: if it cannot be loaded.
        """
        advice = f"this collection was written in {self}; read it with tokenizer=, by which all is counted anew"
        if not self.is_named:
            raise ValueError(f"{advice}: that tokenizer has no name by which it could be loaded")
        try:
            return named_tokenizer(self.name) if self.tokens == NAMED else None
        except (ValueError, ImportError) as error:
            raise ValueError(f"{advice}: {error}") from error


def recorded_tokenizers(files: Iterable[Path]) -> list[RecordedTokenizer]:
    """What is recorded in files of one row each, without duplicates."""
    rows = (row for file in files for _, row in read_jsonl(file, ("tokens", "name")))
    return list(dict.fromkeys(RecordedTokenizer(row["tokens"], row["name"]) for row in rows))
