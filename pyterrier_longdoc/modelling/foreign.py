"""Scores that somebody else gives: windows go out as texts, and a score for each comes back.

A scorer of this kind stands where a backbone would. To the heads its scores are window vectors of one number, and their
last layer is the identity, so that they aggregate as they always do.

Shapes: P pairs, B documents, N windows of the longest document.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.arguments import check_positive
from ..common.coverage import Coverage, Work
from ..common.documents import Text
from ..common.language import named_tokenizer
from .batching import Encoded, PairLayout, for_each_window, to_dense
from .checkpoint import HeadSpec, Weights, seeded_head
from .encoder import BLOCK_CHARACTERS
from .heads.base import WarmStart
from .scorer import LongDocScorer, Read
from .settings import Settings
from .texts import TokenizedText, each_once
from .windows import WholeText
from .words import Words

ASSUMED_INPUT = 512
"""Tokens of the longest input, where nobody tells and the size of windows is left open: BERT's."""

WORDS_PER_TOKEN = 0.75
"""For sizes in words that are left open: OpenAI's rule of thumb for English."""

SPARE_TOKENS = 8
"""So many more tokens may a window have by itself than within its document, which may have cut a word in two."""


class Limits(NamedTuple):
    """How much a scorer takes.

    Attributes:
        longest_input: most tokens of a query and a window, special ones included; None if it is not known.
        batch_size: most windows at a time; None if nothing limits it.
    """

    longest_input: int | None = None
    batch_size: int | None = None


class Scores(NamedTuple):
    """What a scorer says of P pairs.

    Attributes:
        values: `(P,)` float64.
        cut: how many of the windows it is known to have cut.
    """

    values: np.ndarray
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class ForeignScorer(ABC):
    """Base of what may stand in place of a backbone: scores queries and texts, in a way that is not known here.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or its name: windows and queries are then counted in its tokens, and
            fit into the longest input if that is known. None counts words.
        longest_input: most tokens of a query and a window, special ones included; None if it is not known.
    """

    tokenizer: Any = None
    longest_input: int | None = None

    hidden_size: ClassVar[int] = 1
    channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_positive(longest_input=self.longest_input)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignScorer:
        # It never changes, and a copy would hold somebody's weights twice.
        return self

    @abstractmethod
    def score(
        self, queries: Sequence[str], texts: Sequence[str], batch_size: int, done: Callable[[int], None]
    ) -> Scores:
        """The scores of P different pairs, all of them finite.

        Args:
            queries: P queries.
            texts: P texts.
            batch_size: most pairs at a time.
            done: is told how many more pairs have their scores.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON-able description of all that a score depends on.

        Raises:
            ValueError: if that cannot be told.
        """

    def limits(self) -> Limits:
        """How much it takes, as far as that can be found out."""
        return Limits(self.longest_input)

    def warning(self) -> str | None:
        """What a user should know of texts that it may cut without a word."""
        return None


class ForeignEncoder(nn.Module):
    """Asks a scorer about windows; each distinct pair of a run once.

    Args:
        scorer: whom to ask.

    Raises:
        ValueError: for a tokenizer that cannot be loaded, or is not a fast one.
    """

    block_characters = BLOCK_CHARACTERS
    once_for_all_queries = False

    def __init__(self, scorer: ForeignScorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.tokenizer = _tokenizer_of(scorer)
        self.limits = scorer.limits()
        self._known: dict[bytes, float] = {}

    def serve(self, needs: str) -> None:
        """Nothing to refuse: only heads that need no more than scores stand behind it."""

    def prepare(self, settings: Settings) -> tuple[Settings, PairLayout]:
        """The settings with windows that fit, and a layout in which special tokens have no names.

        Raises:
            ValueError: if query and largest window, counted in the scorer's own tokens, exceed its longest input.
        """
        longest, specials = self.limits.longest_input, self.tokenizer.num_special_tokens_to_add(pair=True)
        layout = PairLayout((0,) * specials, (), (), None, 0)
        if self.scorer.tokenizer is None:
            return self._in_words(settings), layout
        room = None if longest is None else longest - specials - SPARE_TOKENS
        return settings.within(longest, room, specials), layout

    def _in_words(self, settings: Settings) -> Settings:
        """Windows of no given size get as many words as mostly fit; a given size is the user's to choose."""
        windows, longest = settings.windows, self.limits.longest_input
        if windows.within(sys.maxsize) == windows or (longest is None and isinstance(windows, WholeText)):
            return settings
        longest = longest or ASSUMED_INPUT
        return replace(settings, windows=settings.within(longest, int(longest * WORDS_PER_TOKEN), 0).windows)

    def begin(self, settings: Settings) -> None:
        """At the start of a run: what was asked in an earlier one may be scored otherwise now."""
        self._known.clear()

    def forward(self, queries: Sequence[str], windows: Sequence[Sequence[str]], batch_size: int, work: Work) -> Encoded:
        """The scores of the windows of B documents, each with its query.

        Args:
            queries: B queries.
            windows: of each document at least one text.
            batch_size: most windows at a time.
            work: counts what is done.

        Returns:
            `cls (B, N, 1)` in float64, the windows' scores, and `mask (B, N)`.
        """
        pairs = list(zip(for_each_window(queries, windows), chain.from_iterable(windows), strict=True))
        keys = [_key(*pair) for pair in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        if new:
            asked, texts = zip(*new.values(), strict=True)
            size = min(batch_size, self.limits.batch_size or batch_size)
            # What it loads could not be trained later if it were loaded in the caller's inference mode.
            with torch.inference_mode(False):
                scores = self.scorer.score(asked, texts, size, lambda number: work.advance(number, len(new)))
            work.coverage.windows_cut += scores.cut
            self._known |= zip(new, scores.values.tolist(), strict=True)
        values = torch.tensor([self._known[key] for key in keys], dtype=torch.float64)
        return to_dense(values.unsqueeze(1), list(map(len, windows)))


def _tokenizer_of(scorer: ForeignScorer) -> Any:
    given = scorer.tokenizer
    if given is None:
        return Words()
    found = named_tokenizer(given) if isinstance(given, str | Path) else given
    if not hasattr(found, "backend_tokenizer"):
        raise ValueError(f"tokenizer={given!r} must be a fast Hugging Face tokenizer, or its name; None counts words")
    return found


def _key(query: str, text: str) -> bytes:
    """Texts of a long run would take more memory than their hashes."""
    first = query.encode()
    return blake2b(len(first).to_bytes(8, "little") + first + text.encode(), digest_size=16).digest()


class TextScorer(LongDocScorer):
    """As `LongDocScorer`, by a scorer that reads texts; cannot be trained.

    Heads work in float64, so that a single window's score is what the scorer says.
    """

    def use(self, settings: Settings) -> None:
        super().use(settings)
        self.precision = None
        self.double()

    def tokenize(self, texts: Sequence[Text], *, offsets: bool = False) -> list[TokenizedText]:
        return super().tokenize(texts, offsets=True)

    def read(self, queries: Sequence[str], query_ids: Sequence[np.ndarray], texts: Sequence[TokenizedText]) -> Read:
        read = super().read(queries, query_ids, texts)
        return replace(read, asked=each_once(queries, self._as_read))

    def _as_read(self, query: str) -> str:
        """A query as far as it is read: as it is, or up to its last token that is read."""
        limit = self.settings.max_query_len
        (tokens,) = self.tokens(self.tokenizer, self.settings.layout.read([query]), offsets=True)
        return tokens.text if limit is None or len(tokens) <= limit else tokens.text[: tokens.characters((0, limit))[1]]

    def encode(self, read: Read, work: Work | None = None) -> Encoded:
        windows = each_once(read.cuts, lambda cut: [cut[0].shown(span) for span in cut[1]])
        work = Work(Coverage()) if work is None else work
        encoded: Encoded = self.encoder(read.asked, windows, self.settings.batch_size, work)
        return encoded

    def take_over(self, backbone: Any) -> WarmStart:
        """The identity: a window's vector is its score."""
        final = nn.Linear(1, 1)
        nn.init.ones_(final.weight)
        nn.init.zeros_(final.bias)
        return WarmStart(final, torch.zeros(1), torch.zeros(1))


def foreign_weights(
    scorer: ForeignScorer, head: HeadSpec, settings: Settings, *, made_for: dict[str, Any], seed: int
) -> Weights:
    """Puts a head on somebody else's scores: there are no weights, but whoever holds some need not know."""
    encoder: Any = ForeignEncoder(scorer)
    model = TextScorer(encoder, encoder.tokenizer, seeded_head(head, scorer.hidden_size, seed), settings)
    backbone: Any = scorer
    return Weights(model.eval(), backbone, made_for, head, ready=model.warm_start(backbone))
