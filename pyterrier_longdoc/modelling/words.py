"""Words as tokens, for scorers with unknown tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from ..common.language import SPACED_WORD

_WORD = re.compile(SPACED_WORD)


class Words:
    """Splits texts at white space; in scripts without spaces each character is a word.

    It has the parts of a fast Hugging Face tokenizer that this package uses. The id of a word is a checksum: equal
    words have equal ids.

    Example:
        >>> Words()(["A cat, 猫猫."], return_offsets_mapping=True)["offset_mapping"]
        [[(0, 1), (2, 6), (7, 8), (8, 9), (9, 10)]]
    """

    pad_token_id = None

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
        self.backend_tokenizer.pre_tokenizer = Split(Regex(SPACED_WORD), "removed", invert=True)

    def __call__(self, texts: Sequence[str], *, return_offsets_mapping: bool = False, **_: Any) -> dict[str, Any]:
        """Return the ids of the words of each text, and optionally the characters at which they begin and end."""
        matches = [list(_WORD.finditer(text)) for text in texts]
        ids = [[crc32(match.group().encode()) & 0x7FFFFFFF for match in row] for row in matches]
        if not return_offsets_mapping:
            return {"input_ids": ids}
        return {"input_ids": ids, "offset_mapping": [[match.span() for match in row] for row in matches]}

    def num_special_tokens_to_add(self, *, pair: bool) -> int:
        """Return 0: the scorer adds its own."""
        return 0
