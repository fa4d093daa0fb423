"""External scorers: they receive windows as texts and return a score for each.

An external scorer replaces the backbone. For the heads, its scores are window vectors with one feature, and their last
layer is the identity.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..common.arguments import argument, validate
from ..common.coverage import Coverage
from ..common.files import full_name
from ..common.language import named_tokenizer
from .backbones.architectures import InputRules
from .encoder import BLOCK_CHARACTERS
from .heads.base import WarmStart
from .inputs import CPU, Encoded, Input, Settings, to_dense
from .reader import NOTHING, PairInputs, Reader, Specials
from .windows import WholeText, Windows
from .words import Words

ASSUMED_INPUT = 512
"""The longest input, in tokens, if it is not known and windows have no given size: BERT's."""

WORDS_PER_TOKEN = 0.75
"""For windows in words of no given size: OpenAI's rule of thumb for English."""

SPARE_TOKENS = 8
"""How many more tokens a window may have by itself than in its document: its ends may cut words in two."""


@dataclass(frozen=True, kw_only=True)
class ExternalScorer(ABC):
    """Base of the external scorers, which replace a backbone.

    Args:
        tokenizer: a fast Hugging Face tokenizer or its name. Windows and queries are measured in its tokens, and fit
            into the maximum input length if it is known. None counts words.
        longest_input: the maximum number of tokens of a query and a window, special tokens included; None if it is
            unknown.
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
    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> np.ndarray:
        """Return the `(P,)` finite float64 scores of P distinct pairs, scored at most `batch_size` at a time."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description of everything on which a score depends; ValueError if it is unknown."""


NO_INPUT = Input(NOTHING, (0, 0), (0, 0))


class ExternalReader(Reader):
    """Reads texts instead of token ids; tokens are only counted."""

    def __init__(self, encoder: ExternalEncoder, settings: Settings) -> None:
        self.counts_words = encoder.scorer.tokenizer is None
        self.assumed = int((encoder.scorer.longest_input or ASSUMED_INPUT) * WORDS_PER_TOKEN)
        super().__init__(encoder, settings)
        self.needs_offsets = True

    def make_specials(self, backbone: Any) -> Specials:
        """Return as many tokens as the tokenizer adds; they are only counted."""
        return Specials((0,) * backbone.tokenizer.num_special_tokens_to_add(pair=True))

    def limits(self) -> tuple[int, int, int] | None:
        return (self.assumed, self.assumed, self.assumed) if self.counts_words else super().limits()

    def adapt(self) -> tuple[Windows, int | None]:
        """See the base class. Windows without a size get a number of words that usually fits; a given size is kept."""
        if not self.counts_words:
            return super().adapt()
        windows, max_query_len = self.requested()
        has_size = windows.resized(sys.maxsize) == windows
        if not has_size and not (self.longest is None and isinstance(windows, WholeText)):
            windows, _ = super().adapt()
        return windows, max_query_len

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an empty input, because the scorer reads texts."""
        return NO_INPUT


class ExternalEncoder(nn.Module):
    """Calls a scorer for windows, once for each distinct pair of a run."""

    block_characters = BLOCK_CHARACTERS
    supports_openvino = False
    computed_in = None, None
    head_dtype = torch.float64  # so that the score of a document with one window is the scorer's
    rules = InputRules()

    settings: Settings
    reader: ExternalReader

    def __init__(self, scorer: ExternalScorer) -> None:
        super().__init__()
        choice = scorer.tokenizer
        tokenizer = named_tokenizer(choice) if isinstance(choice, str | Path) else choice
        if not (choice is None or hasattr(tokenizer, "backend_tokenizer")):
            raise ValueError(f"tokenizer={choice!r} must be a fast Hugging Face tokenizer, or its name")
        self.scorer = scorer
        self.tokenizer = Words() if choice is None else tokenizer
        longest = scorer.longest_input
        self.longest_input = None if longest is None else longest - SPARE_TOKENS
        self._scores: dict[bytes, float] = {}

    def use(self, settings: Settings, needs: str) -> None:
        """Apply settings; rerankers combine it only with heads that need no more than scores."""
        self.settings = replace(settings, device=CPU, dtype=torch.float32)
        self.reader = ExternalReader(self, self.settings)

    def refresh(self) -> None:
        """Discard the scores of an earlier run, which can have changed."""
        self._scores = {}  # a run in another thread keeps its own

    def initial_weights(self, backbone: Any, tokenizer: Any) -> WarmStart:
        """Return the identity as the last layer, because the vector of a window is its score."""
        final = nn.Linear(1, 1)
        nn.init.ones_(final.weight)
        nn.init.zeros_(final.bias)
        return WarmStart(final, torch.zeros(1), torch.zeros(1))

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Return the scores of the windows of P pairs: `cls (P, N, 1)` in float64, and `mask (P, N)`."""
        questions = []
        for pair in pairs:
            questions += [(pair.query.text_read, pair.text.input_text(span)) for span in pair.spans]
        known, keys = self._scores, []
        for query, text in questions:  # hashes, because the texts of a long run would take more memory
            keys.append(blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest())
        new_questions = {key: pair for key, pair in zip(keys, questions, strict=True) if key not in known}
        if new_questions:
            queries, texts = zip(*new_questions.values(), strict=True)
            # Weights that it loads in inference mode could not be trained later.
            with torch.inference_mode(False):
                scores = self.scorer.score(queries, texts, self.settings.batch_size)
            known |= zip(new_questions, scores.tolist(), strict=True)
        values = torch.tensor([known[key] for key in keys], dtype=torch.float64)
        return to_dense(values.unsqueeze(1), [len(pair.spans) for pair in pairs])

    def describe_weights(self, model: Any) -> dict[str, Any]:
        """Return the scorer's description instead of weights."""
        return self.scorer.describe()

    def explain(self, pairs: Sequence[PairInputs], encoded: Encoded, head: Any) -> list[dict[str, Any]]:
        """Return no explanations."""
        return [{} for _ in pairs]
