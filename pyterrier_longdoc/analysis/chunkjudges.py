"""Which chunk of a document is the first relevant one, as told by a language model, a reranker or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..listwise.parallel import Lock, in_parallel
from .judging import UNJUDGED, RelevanceJudge

BLOCK_CHUNKS = 2048
"""Chunks that a reranker gets at a time: enough to fill its batches, few enough for a progress bar to move."""


@dataclass(frozen=True)
class ChunkJob:
    """A document to be judged.

    Attributes:
        qid: where a ledger enters the calls.
        query: the query's text.
        chunks: those to judge, from the start of the document; perhaps none.
    """

    qid: str
    query: str
    chunks: list[str]


@dataclass(frozen=True)
class FirstChunk:
    """What a judge says.

    Attributes:
        number: of the first relevant chunk, from 0; -1 if none is.
        grade: of that chunk.
        judged: number of chunks that were asked about.
        unjudged: how many of those, up to the first relevant one, had no readable grade.
    """

    number: int = -1
    grade: float = float("nan")
    judged: int = 0
    unjudged: int = 0


ChunkJudge = Callable[[Sequence[ChunkJob], Callable[[int], Any]], list[FirstChunk]]
"""Judges documents; the second argument is told the number of those that are done."""


def as_chunk_judge(judge: Any, threshold: float | None) -> ChunkJudge:
    """Makes a judge of chunks.

    Args:
        judge: a `RelevanceJudge`, a reranker, or a function `(query, chunk) -> number`.
        threshold: a chunk is relevant if its number is above; None is 0, but a reranker needs one.

    Raises:
        ValueError: for anything else, and for a reranker without threshold.
    """
    if threshold is not None and not np.isfinite(threshold):
        raise ValueError(f"threshold={threshold} must be a finite number")
    if isinstance(judge, RelevanceJudge):
        grade = lambda job, chunk: judge.grade(job.query, chunk, qid=job.qid)  # noqa: E731
        return OneByOne(grade, threshold or 0.0, judge.concurrency)
    if isinstance(judge, pt.Transformer):
        if threshold is None:
            raise ValueError(
                f"judge={judge!r} needs threshold=, the score above which a chunk is relevant: scores have no natural "
                f"zero. For a cross-encoder of one logit, trained with cross-entropy, 0 is a probability of 1/2"
            )
        return ByReranker(judge, threshold)
    if callable(judge):
        return OneByOne(lambda job, chunk: _number(judge, job.query, chunk), threshold or 0.0)
    raise ValueError(f"judge={judge!r} must be a RelevanceJudge, a reranker, or a function (query, chunk) -> number")


@dataclass(frozen=True)
class OneByOne:
    """Asks about one chunk after the other and stops at the first relevant one: calls may cost money.

    Args:
        grade: of a chunk.
        threshold: a chunk is relevant if its grade is above.
        concurrency: documents at the same time.
    """

    grade: Callable[[ChunkJob, str], float]
    threshold: float
    concurrency: int = 1

    def __call__(self, jobs: Sequence[ChunkJob], on_done: Callable[[int], Any]) -> list[FirstChunk]:
        """The first relevant chunk of each document."""
        lock = Lock()

        def judge(job: ChunkJob, check: Callable[[], None]) -> FirstChunk:
            found = self._first(job, check)
            with lock:
                on_done(1)
            return found

        return in_parallel(judge, jobs, self.concurrency)

    def _first(self, job: ChunkJob, check: Callable[[], None]) -> FirstChunk:
        unjudged = 0
        for number, chunk in enumerate(job.chunks):
            check()
            grade = self.grade(job, chunk)
            if grade > self.threshold:
                return FirstChunk(number, float(grade), number + 1, unjudged)
            unjudged += grade == UNJUDGED
        return FirstChunk(judged=len(job.chunks), unjudged=unjudged)


@dataclass(frozen=True)
class ByReranker:
    """Scores all chunks, many at a time.

    Args:
        reranker: reads `qid, query, docno, text` and sets `score`.
        threshold: a chunk is relevant if its score is above.
    """

    reranker: Any
    threshold: float

    def __call__(self, jobs: Sequence[ChunkJob], on_done: Callable[[int], Any]) -> list[FirstChunk]:
        """The first relevant chunk of each document.

        Raises:
            ValueError: if the reranker leaves out rows, or a score is no number.
        """
        found: list[FirstChunk] = []
        for block in _blocks(jobs):
            scores = self._scores(block)
            ends = np.cumsum([len(job.chunks) for job in block])
            for own in np.split(scores, ends[:-1]):
                above = np.flatnonzero(own > self.threshold)
                number = int(above[0]) if len(above) else -1
                grade = float(own[number]) if len(above) else float("nan")
                found.append(FirstChunk(number, grade, len(own)))
            on_done(len(block))
        return found

    def _scores(self, block: Sequence[ChunkJob]) -> np.ndarray:
        rows = [(job.qid, job.query, chunk) for job in block for chunk in job.chunks]
        if not rows:
            return np.zeros(0)
        frame = pd.DataFrame(rows, columns=["qid", "query", "text"])
        # Each chunk is a document of its own, whose name brings its score back in whatever order rows return.
        frame = frame.assign(docno=[str(number) for number in range(len(rows))], score=0.0)
        scored = self.reranker(pt.model.add_ranks(frame))
        by_name = dict(zip(scored["docno"].astype(str), scored["score"].astype("float64"), strict=True))
        scores = np.array([by_name.get(docno, np.nan) for docno in frame["docno"]])
        without = int((~np.isfinite(scores)).sum())
        if without:
            raise ValueError(f"judge={self.reranker!r} returned no finite score for {without} of {len(rows)} chunks")
        return scores


def _number(judge: Callable[[str, str], Any], query: str, chunk: str) -> float:
    value = judge(query, chunk)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if np.isnan(number):
        raise ValueError(f"judge={judge!r} returned {value!r}; it must return a number")
    return number


def _blocks(jobs: Sequence[ChunkJob]) -> Iterator[list[ChunkJob]]:
    block: list[ChunkJob] = []
    size = 0
    for job in jobs:
        if block and size + len(job.chunks) > BLOCK_CHUNKS:
            yield block
            block, size = [], 0
        block.append(job)
        size += len(job.chunks)
    if block:
        yield block
