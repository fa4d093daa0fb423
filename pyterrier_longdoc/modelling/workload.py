"""How much a run has to compute, told before it begins, so that a progress bar counts what is left and not rows.

Documents come longest first, and one may have a hundred times the windows of another: shares of rows say nothing about
the time that is left, shares of tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..common.documents import Text, as_document
from .batching import PairLayout
from .preselection import KeyBlocks, WindowSelector
from .settings import Settings
from .texts import Block, numbered, tokenize
from .windows import GreedyChunks

SAMPLE_TEXTS, SAMPLE_CHARACTERS = 32, 2000
"""So many texts, evenly spread, and so much of each tell how many characters a token has."""


class Workload:
    """The tokens that a run has to encode, distinct windows with their queries, by the lengths of its texts.

    An estimate: texts are taken to have equally long tokens, queries to be equally long, windows of words or sentences
    to be as long as they may be. What a preselection computes does not count, nor what is remembered.

    Args:
        tokenizer: of the texts.
        layout: how a window becomes an input.
        settings: what is read.
        query_length: tokens of a query; 0 where windows are encoded without one.
        query_of_row: for each row the number of its query; zeros where a window is encoded once for all queries.
        texts: for each row its text.

    Attributes:
        total: of all rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        layout: PairLayout,
        settings: Settings,
        query_length: float,
        query_of_row: np.ndarray,
        texts: Sequence[Text],
    ) -> None:
        self._layout, self._settings, self._query_length = layout, settings, query_length
        self._known: dict[int, float] = {}
        self._once = not query_of_row.any()
        distinct, text_of_row = numbered(texts)
        documents = list(map(as_document, distinct[:: len(distinct) // SAMPLE_TEXTS + 1]))
        sample = [document.text[:SAMPLE_CHARACTERS] for document in documents]
        tokens = sum(map(len, tokenize(tokenizer, sample)))
        self._tokens_of_character = tokens / max(1, sum(map(len, sample)))
        repeated = map(len, tokenize(tokenizer, [document.repeated for document in documents]))
        self._repeated = sum(min(own, settings.repeat_tokens) for own in repeated) / max(1, len(documents))
        pairs = np.unique(query_of_row * len(distinct) + text_of_row)
        number = np.bincount(pairs % max(1, len(distinct)), minlength=len(distinct))
        self.total = float(sum(times * self._of_text(text) for text, times in zip(distinct, number, strict=True)))

    def of(self, block: Block) -> float:
        """The tokens of a block."""
        if self._once:
            return sum(map(self._of_text, block.texts))
        return sum(self._of_text(block.texts[text]) for text in block.text)

    def _of_text(self, text: Text) -> float:
        characters = len(text)
        if characters not in self._known:
            sizes = window_sizes(self._settings, round(characters * self._tokens_of_character))
            lengths = self._layout.length(self._query_length, np.array(sizes) + self._repeated)
            self._known[characters] = float(lengths.sum())
        return self._known[characters]


def window_sizes(settings: Settings, tokens: int) -> list[int]:
    """About how many tokens the windows have that are read of a text of so many tokens."""
    windows, preselect = settings.windows, settings.preselect
    tokens = min(tokens, settings.max_doc_len or tokens)
    if isinstance(preselect, KeyBlocks):
        tokens = min(tokens, preselect.selector.k * (preselect.blocks.largest or tokens))
    if windows.needs_text:
        windows = GreedyChunks(windows.largest, max_windows=windows.max_windows)
    spans = windows(range(tokens))
    if isinstance(preselect, WindowSelector):
        spans = spans[: preselect.k]
    return [end - start for start, end in spans]
