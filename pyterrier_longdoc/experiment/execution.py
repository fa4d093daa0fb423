"""Runs pipelines stage by stage, so that first stages are shared and rerankers are measured alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.caches import forget_embeddings
from .efficiency import Cost, add_coverage, measured
from .extras import required

WARM_UP_TOPICS = 2
"""Run before measuring, so that weights are loaded and kernels compiled."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """What some stages made of some topics, and how long it took."""

    stages: Sequence[Any]
    topics: pd.DataFrame
    frame: pd.DataFrame
    seconds: float


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
        if efficiency:
            required("psutil")
        self._kept: _Kept | None = None

    def run(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """Runs a pipeline.

        Returns:
            The run, `qid, docno, score`, and its cost, without memory and coverage if these are not measured.
        """
        *prefix, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            last.transform(self._candidates(prefix, topics.head(WARM_UP_TOPICS), keep=False)[0])
            forget_embeddings()
        cost, runs = Cost(queries=len(topics)), []
        for batch in self._batches(topics):
            candidates, seconds = self._candidates(prefix, batch, keep=self.batch_size is None and bool(prefix))
            part = Cost(documents=len(candidates) if prefix else 0)
            start = time.perf_counter()
            with measured(part) if self.efficiency else nullcontext():
                run = last.transform(candidates)
            part.seconds = seconds + time.perf_counter() - start
            if self.efficiency:
                add_coverage(part, last)
            cost.add(part)
            runs.append(run[[column for column in ("qid", "docno", "score") if column in run.columns]])
        return pd.concat(runs, ignore_index=True), cost

    def _candidates(self, prefix: Sequence[Any], topics: pd.DataFrame, *, keep: bool) -> tuple[pd.DataFrame, float]:
        """A frame of one's own with the results of the stages before the last, and what they took."""
        kept = self._kept
        if kept is not None and kept.topics is topics and _same(kept.stages, prefix):
            return kept.frame.copy(), kept.seconds
        start, frame = time.perf_counter(), topics.copy()
        for stage in prefix:
            frame = stage.transform(frame)
        seconds = time.perf_counter() - start
        if not keep:
            return frame, seconds
        self._kept = _Kept(prefix, topics, frame, seconds)
        return frame.copy(), seconds

    def _batches(self, topics: pd.DataFrame) -> Iterator[pd.DataFrame]:
        if self.batch_size is None:
            yield topics
            return
        for start in range(0, len(topics), self.batch_size):
            yield topics.iloc[start : start + self.batch_size]


def _same(stages: Sequence[Any], others: Sequence[Any]) -> bool:
    # The same objects: equality of transformers may not look at weights.
    return len(stages) == len(others) and all(a is b for a, b in zip(stages, others, strict=True))
