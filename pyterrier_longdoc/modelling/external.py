"""Scores from outside: windows go out as texts, and a score for each comes back.

Such a scorer takes the place of a backbone. To the heads its scores are window vectors of one number, and their last
layer is the identity, so that they aggregate as always.
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
from ..common.files import full_name
from ..common.language import named_tokenizer
from .encoder import BLOCK_CHARACTERS
from .heads.base import WarmStart
from .inputs import Encoded, InputFormat, Settings, to_dense
from .windows import WholeText
from .words import Words

ASSUMED_INPUT = 512
"""The longest input, in tokens, if it is not known and windows have no given size: BERT's."""

WORDS_PER_TOKEN = 0.75
"""For windows in words of no given size: OpenAI's rule of thumb for English."""

SPARE_TOKENS = 8
"""How many more tokens a window may have by itself than in its document: its ends may cut words in two."""


class Limits(NamedTuple):
    """How much a scorer takes, if known: tokens of a query and a window, and windows at a time."""

    longest_input: int | None = None
    batch_size: int | None = None


class Scores(NamedTuple):
    """The `(P,)` float64 scores of P pairs, and how many windows the scorer is known to have cut."""

    values: np.ndarray
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class ExternalScorer(ABC):
    """Base of the scorers that take the place of a backbone: they score queries and texts by means of their own.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or its name: windows and queries are counted in its tokens and fit
            into the longest input if that is known. None counts words.
        longest_input: most tokens of a query and a window, special ones included; None if it is not known.
    """

    tokenizer: Any = None
    longest_input: int | None = argument(None, at_least=1)

    hidden_size: ClassVar[int] = 1
    channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "tokenizer", full_name(self.tokenizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExternalScorer:
        # It never changes, and a copy might hold weights twice.
        return self

    @abstractmethod
    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> Scores:
        """Return a finite score for each of P distinct pairs, scored at most `batch_size` at a time."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return a JSON-able description of all that a score depends on; ValueError if it is not known."""

    def limits(self) -> Limits:
        """Return how much it takes, if known."""
        return Limits(self.longest_input)

    def warning(self) -> str | None:
        """Return a warning for users if it may cut texts silently."""
        return None


class ExternalEncoder(nn.Module):
    """Asks a scorer about windows; each distinct pair of a run once."""

    block_characters = BLOCK_CHARACTERS
    reads_text = True
    is_exported = False

    settings: Settings

    def __init__(self, scorer: ExternalScorer) -> None:
        super().__init__()
        choice = scorer.tokenizer
        tokenizer = named_tokenizer(choice) if isinstance(choice, str | Path) else choice
        if not (choice is None or hasattr(tokenizer, "backend_tokenizer")):
            raise ValueError(f"tokenizer={choice!r} must be a fast Hugging Face tokenizer, or its name")
        self.scorer = scorer
        self.tokenizer = Words() if choice is None else tokenizer
        self.limits = scorer.limits()
        specials = self.tokenizer.num_special_tokens_to_add(pair=True)
        longest = None if self.limits.longest_input is None else self.limits.longest_input - SPARE_TOKENS
        self.format = InputFormat((0,) * specials, (), (), None, 0, longest=longest)
        self._scores: dict[bytes, float] = {}

    def check_needs(self, needs: str) -> None:
        """Accept any need: rerankers combine it only with heads that need no more than scores."""

    def use(self, settings: Settings) -> None:
        """Score by these settings from now on."""
        if self.scorer.tokenizer is None:
            self.settings = self._in_words(settings)
        else:
            self.settings, _ = self.format.fit(settings)

    def _in_words(self, settings: Settings) -> Settings:
        """Give windows without a size as many words as mostly fit; keep a given size."""
        windows, longest = settings.windows, self.limits.longest_input
        if windows.within(sys.maxsize) == windows or (longest is None and isinstance(windows, WholeText)):
            return settings
        words = int((longest or ASSUMED_INPUT) * WORDS_PER_TOKEN)
        fitted, _ = InputFormat((), (), (), None, 0, longest=words).fit(settings)
        return replace(settings, windows=fitted.windows)

    def refresh(self) -> None:
        """Forget, at the start of a run, the scores of an earlier one: they may have changed."""
        self._scores = {}  # a run in another thread keeps its own

    def take_over(self, backbone: Any, tokenizer: Any) -> WarmStart:
        """Return the identity for a last layer: a window's vector is its score."""
        final = nn.Linear(1, 1)
        nn.init.ones_(final.weight)
        nn.init.zeros_(final.bias)
        return WarmStart(final, torch.zeros(1), torch.zeros(1))

    def forward(self, pairs: Any, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Return the scores of the windows of `model.ReadPairs`: `cls (P, N, 1)` in float64, and `mask (P, N)`."""
        windows = [list(map(text.input_text, spans)) for text, spans in zip(pairs.texts, pairs.spans, strict=True)]
        numbers = list(zip(pairs.query, pairs.document, strict=True))
        questions = [(pairs.query_texts[query], window) for query, document in numbers for window in windows[document]]
        keys, known = [_key(*pair) for pair in questions], self._scores
        new_questions = {key: pair for key, pair in zip(keys, questions, strict=True) if key not in known}
        if new_questions:
            queries, texts = zip(*new_questions.values(), strict=True)
            size = min(self.settings.batch_size, self.limits.batch_size or self.settings.batch_size)
            # Weights that it loads in inference mode could not be trained later.
            with torch.inference_mode(False):
                scores = self.scorer.score(queries, texts, size)
            if coverage is not None:
                coverage.windows_cut += scores.cut
            known |= zip(new_questions, scores.values.tolist(), strict=True)
        values = torch.tensor([known[key] for key in keys], dtype=torch.float64)
        return to_dense(values.unsqueeze(1), pairs.counts)


def _key(query: str, text: str) -> bytes:
    """Return a hash, because the texts of a long run would take more memory."""
    return blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest()
