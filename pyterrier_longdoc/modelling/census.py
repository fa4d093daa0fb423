"""Counts what is read in a run, a training or a survey: each distinct query, and pair of it and a text, once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..common.coverage import Coverage, Reading
from ..common.documents import Text
from .batching import ApartLayout, PairLayout
from .settings import Settings


class Census:
    """Counts what is read of queries and texts.

    Args:
        settings: by which they are read.
        layout: how a query and a window become one input.
        dtype: the precision to note; None for none.

    Attributes:
        coverage: the counts.
        windows: of each pair that was counted.
    """

    def __init__(self, settings: Settings, layout: PairLayout | ApartLayout, dtype: str | None) -> None:
        self.coverage = Coverage(dtype=dtype)
        self.windows: list[int] = []
        self._settings = settings
        self._budget = layout.budget if isinstance(layout, PairLayout) else None
        self._queries: set[str] = set()
        self._pairs: set[int] = set()  # hashes: augmented texts are as many as draws
        self._lost: dict[str, int] = {}

    def add_queries(self, queries: Sequence[str], lengths: Sequence[int], limit: int) -> None:
        """Counts queries of these lengths in tokens, of which at most `limit` are read whatever the text."""
        new = {query: tokens for query, tokens in zip(queries, lengths, strict=True) if query not in self._queries}
        self._queries.update(new)
        self.coverage.add_queries(list(new.values()), limit)

    def add(
        self,
        queries: Sequence[str],
        texts: Sequence[Text],
        query_ids: Sequence[np.ndarray],
        readings: Sequence[Reading],
    ) -> None:
        """Counts P pairs of a query and a text.

        Args:
            queries: P queries.
            texts: P texts.
            query_ids: token ids of the queries as `read_queries` gives them.
            readings: what is read of each text.
        """
        for query, text, ids, reading in zip(queries, texts, query_ids, readings, strict=True):
            pair = hash((query, text))
            if pair not in self._pairs:
                self._pairs.add(pair)
                self.windows.append(reading.windows)
                self.coverage.add(reading, self._settings.left_out(reading))
            if self._budget is not None:
                # A query counts with the text that leaves it the least.
                before, lost = self._lost.get(query, 0), len(ids) + reading.tokens_read - self._budget
                if lost > before:
                    self._lost[query] = lost
                    self.coverage.queries_cut += before == 0
                    self.coverage.query_tokens_read -= lost - before
