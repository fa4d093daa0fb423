"""Scores that somebody else gives: windows go out as texts, and a score for each comes back.

A scorer of this kind stands where a backbone would. To the heads its scores are window vectors of one number, and their
last layer is the identity, so that they aggregate as they always do.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.arguments import argument, validate
from ..common.coverage import Coverage
from ..common.language import named_tokenizer
from .encoder import BLOCK_CHARACTERS
from .heads.base import WarmStart
from .inputs import Encoded, InputFormat, Settings, to_dense
from .windows import WholeText
from .words import Words

ASSUMED_INPUT = 512
"""Tokens of the longest input, where nobody tells and the size of windows is left open: BERT's."""

WORDS_PER_TOKEN = 0.75
"""For sizes in words that are left open: OpenAI's rule of thumb for English."""

SPARE_TOKENS = 8
"""So many more tokens may a window have by itself than within its document, which may have cut a word in two."""


class Limits(NamedTuple):
    """How much a scorer takes, as far as it is known: tokens of a query and a window, and windows at a time."""

    longest_input: int | None = None
    batch_size: int | None = None


class Scores(NamedTuple):
    """What a scorer says of P pairs: `(P,)` float64, and how many of the windows it is known to have cut."""

    values: np.ndarray
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class ExternalScorer(ABC):
    """Base of what may stand in place of a backbone: scores queries and texts, in a way that is not known here.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or its name: windows and queries are then counted in its tokens, and
            fit into the longest input if that is known. None counts words.
        longest_input: most tokens of a query and a window, special ones included; None if it is not known.
    """

    tokenizer: Any = None
    longest_input: int | None = argument(None, at_least=1)

    hidden_size: ClassVar[int] = 1
    channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        validate(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExternalScorer:
        # It never changes, and a copy would hold somebody's weights twice.
        return self

    @abstractmethod
    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> Scores:
        """Return a finite score for each of some different pairs, asked for at most `batch_size` at a time."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return a JSON-able description of all that a score depends on; ValueError if that cannot be told."""

    def limits(self) -> Limits:
        """Return how much it takes, as far as that can be found out."""
        return Limits(self.longest_input)

    def warning(self) -> str | None:
        """Return what a user should know of texts that it may cut without a word."""
        return None


class ExternalEncoder(nn.Module):
    """Asks a scorer about windows; each distinct pair of a run once."""

    block_characters = BLOCK_CHARACTERS
    reads_text = True

    settings: Settings

    def __init__(self, scorer: ExternalScorer) -> None:
        super().__init__()
        given = scorer.tokenizer
        found = named_tokenizer(given) if isinstance(given, str | Path) else given
        if not (given is None or hasattr(found, "backend_tokenizer")):
            raise ValueError(f"tokenizer={given!r} must be a fast Hugging Face tokenizer, or its name")
        self.scorer = scorer
        self.tokenizer = Words() if given is None else found
        self.limits = scorer.limits()
        specials = self.tokenizer.num_special_tokens_to_add(pair=True)
        longest = None if self.limits.longest_input is None else self.limits.longest_input - SPARE_TOKENS
        self.format = InputFormat((0,) * specials, (), (), None, 0, longest=longest)
        self._known: dict[bytes, float] = {}

    def check_needs(self, needs: str) -> None:
        """Refuse nothing: only heads that need no more than scores stand behind it."""

    def use(self, settings: Settings) -> None:
        """Score by these settings from now on."""
        if self.scorer.tokenizer is None:
            self.settings = self._in_words(settings)
        else:
            self.settings, _ = self.format.fit(settings)

    def _in_words(self, settings: Settings) -> Settings:
        """Give windows of no given size as many words as mostly fit; a given size is the user's to choose."""
        windows, longest = settings.windows, self.limits.longest_input
        if windows.within(sys.maxsize) == windows or (longest is None and isinstance(windows, WholeText)):
            return settings
        words = int((longest or ASSUMED_INPUT) * WORDS_PER_TOKEN)
        fitted, _ = InputFormat((), (), (), None, 0, longest=words).fit(settings)
        return replace(settings, windows=fitted.windows)

    def refresh(self) -> None:
        """Forget, at the start of a run, what was asked in an earlier one: it may be scored otherwise now."""
        self._known.clear()

    def take_over(self, backbone: Any, tokenizer: Any) -> WarmStart:
        """Return the identity for a last layer: a window's vector is its score."""
        final = nn.Linear(1, 1)
        nn.init.ones_(final.weight)
        nn.init.zeros_(final.bias)
        return WarmStart(final, torch.zeros(1), torch.zeros(1))

    def forward(self, read: Any, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Return the scores of the windows of a `model.Read`: `cls (P, N, 1)` in float64, and `mask (P, N)`."""
        shown = [list(map(text.shown, spans)) for text, spans in zip(read.texts, read.spans, strict=True)]
        asked = list(zip(read.query, read.document, strict=True))
        pairs = [(read.asked[query], window) for query, document in asked for window in shown[document]]
        keys = [_key(*pair) for pair in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        if new:
            queries, texts = zip(*new.values(), strict=True)
            size = min(self.settings.batch_size, self.limits.batch_size or self.settings.batch_size)
            # What it loads could not be trained later if it were loaded in the caller's inference mode.
            with torch.inference_mode(False):
                scores = self.scorer.score(queries, texts, size)
            if coverage is not None:
                coverage.windows_cut += scores.cut
            self._known |= zip(new, scores.values.tolist(), strict=True)
        values = torch.tensor([self._known[key] for key in keys], dtype=torch.float64)
        return to_dense(values.unsqueeze(1), read.counts)


def _key(query: str, text: str) -> bytes:
    """Return a hash, as the texts of a long run would take more memory."""
    return blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest()
