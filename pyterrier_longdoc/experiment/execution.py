"""Runs pipelines stage by stage, so that first stages are shared and rerankers are measured alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pandas as pd
import pyterrier as pt

from .efficiency import Cost, add_coverage, forget_embeddings, measured

WARM_UP_TOPICS = 2
"""Run before measuring, so that weights are loaded and kernels compiled."""


class Executor:
    """Runs one pipeline after the other.

    The results of the stages before the last one are kept until a pipeline with other stages comes: with the same
    objects as first stage and text loader, these run once.

    Args:
        batch_size: so many topics at a time; None for all. With batches nothing is kept for the next pipeline.
        efficiency: warm up, and measure memory and what was read.
    """

    def __init__(self, *, batch_size: int | None = None, efficiency: bool = False) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1, or None for all topics at once")
        self.batch_size = batch_size
        self.efficiency = efficiency
        # The stages themselves are held: their ids could be given away otherwise.
        self._prefix: tuple[list[Any], pd.DataFrame] | None = None
        self._prefix_result: tuple[pd.DataFrame, float] | None = None

    def run(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """Runs a pipeline.

        Returns:
            The run, `qid, docno, score`, and its cost, without memory and coverage if these are not measured.
        """
        *prefix, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            last(self._candidates(prefix, topics.head(WARM_UP_TOPICS), keep=False)[0])
            forget_embeddings()
        cost, runs = Cost(queries=len(topics)), []
        for batch in self._batches(topics):
            candidates, seconds = self._candidates(prefix, batch, keep=self.batch_size is None and bool(prefix))
            part = Cost(documents=len(candidates) if prefix else 0)
            start = time.perf_counter()
            with measured(part) if self.efficiency else nullcontext():
                run = last(candidates)
            part.seconds = seconds + time.perf_counter() - start
            if self.efficiency:
                add_coverage(part, last)
            cost.add(part)
            runs.append(run[[column for column in ("qid", "docno", "score") if column in run.columns]])
        return pd.concat(runs, ignore_index=True), cost

    def _candidates(self, prefix: Sequence[Any], topics: pd.DataFrame, *, keep: bool) -> tuple[pd.DataFrame, float]:
        """A frame of one's own with the results of the stages before the last, and what they took."""
        if self._is_kept(prefix, topics) and self._prefix_result is not None:
            kept, seconds = self._prefix_result
            return kept.copy(), seconds
        start, frame = time.perf_counter(), topics.copy()
        for stage in prefix:
            frame = stage(frame)
        seconds = time.perf_counter() - start
        if not keep:
            return frame, seconds
        self._prefix, self._prefix_result = (list(prefix), topics), (frame, seconds)
        return frame.copy(), seconds

    def _is_kept(self, prefix: Sequence[Any], topics: pd.DataFrame) -> bool:
        if self._prefix is None:
            return False
        kept, of_topics = self._prefix
        return of_topics is topics and len(kept) == len(prefix) and all(a is b for a, b in zip(kept, prefix, strict=True))

    def _batches(self, topics: pd.DataFrame) -> Iterator[pd.DataFrame]:
        if self.batch_size is None:
            yield topics
            return
        for start in range(0, len(topics), self.batch_size):
            yield topics.iloc[start : start + self.batch_size]
