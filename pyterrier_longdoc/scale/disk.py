"""Reranking on disk: block by block, in shards, going on after a kill."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.caches import forget_embeddings
from ..common.coverage import Coverage
from ..common.files import write_lines
from ..common.frames import as_strings, check_columns, numbers, with_scores
from ..common.notices import told_together
from ..common.progress import counting
from ..common.undisturbed import undisturbed
from ..experiment.identity import stages_of
from ..experiment.runs import run_lines
from .blocks import BlockFolder
from .candidates import BLOCKS, Candidates, FrameCandidates, Source, sample
from .job import Job, finished_blocks
from .tables import arrow

_SAMPLED = 16
_SAMPLE_SECONDS = 60.0


class Executor(Protocol):
    """Who computes blocks, here or elsewhere."""

    def map_blocks(
        self, transformer: pt.Transformer, blocks: Iterable[tuple[int, pd.DataFrame]]
    ) -> Iterator[tuple[int, pd.DataFrame]]:
        """The results of blocks with their keys, in any order.

        Args:
            transformer: what makes them.
            blocks: with keys; the next one is taken when there is somebody to work on it, so that few are in memory.
        """


class InThisProcess:
    """Computes one block after the other."""

    def map_blocks(
        self, transformer: pt.Transformer, blocks: Iterable[tuple[int, pd.DataFrame]]
    ) -> Iterator[tuple[int, pd.DataFrame]]:
        """The results, in the order of the blocks."""
        for key, frame in blocks:
            forget_embeddings()  # of other blocks, or the last digits would depend on which these were
            yield key, transformer.transform(frame)


@dataclass(frozen=True)
class Work:
    """What a call has done, or what it would do.

    Attributes:
        rows: that it scores.
        rows_before: of its shard that were scored already.
        seconds: that this takes one process.
        cost: of that time; None without a price.
        coverage: what the last model of this package in the pipeline has read of these rows; None where none has.
    """

    rows: int
    rows_before: int
    seconds: float
    cost: float | None
    coverage: Coverage | None = None


def rerank_to_disk(
    pipeline: pt.Transformer,
    run: pd.DataFrame | str | Path,
    out: str | Path,
    *,
    topics: pd.DataFrame | None = None,
    shard: tuple[int, int] = (0, 1),
    dry_run: bool = False,
    price_per_hour: float | None = None,
    executor: Executor | None = None,
    verbose: bool = False,
) -> Work:
    """Reranks candidates that need not fit into memory, and writes the results to a folder block by block.

    Queries are dealt by a hash of their qid to 1,024 blocks, none to two. Blocks go through the pipeline one by one,
    and each that is finished is one Parquet file. Killed at any moment, the same call goes on: finished blocks stay,
    the open one is scored anew (with `score_cache=` of the model, but for the last two seconds). Several processes, on
    one machine or several with one file system, divide the work by `shard`; with equal numbers of threads the files are
    the same, byte for byte, for any number of shards.

    Args:
        pipeline: a reranker, or a pipeline that begins with candidates, e.g. `dataset.text_loader() >> ld.MaxP()`. A
            model with `text_loader=` loads the texts of one block at a time and writes none of them.
        run: candidates with `qid`, `docno` and any further columns: a frame; or the path of a TREC run, compressed or
            not, in any order, or of a Parquet file or a folder of these. Files are dealt once, by one process.
        out: the folder; new, empty, or of the same call before.
        topics: `qid` and `query`, where the candidates have no column `query`.
        shard: `(i, n)` takes every n-th block from the i-th on, i from 0.
        dry_run: measure at most 16 queries, for at most a minute or until one is done, and tell what the whole would
            take; nothing is written.
        price_per_hour: of one process, for `cost`.
        executor: computes the blocks elsewhere: an object with `map_blocks(transformer, blocks)`, as `Executor`; None
            for this process.
        verbose: show a progress bar of the shard's rows.

    Returns:
        What was done: rows, seconds, cost.

    Raises:
        ValueError: if the folder was begun with another pipeline or other candidates (the message names what differs),
            or files in it are damaged; for candidates without queries, results that cannot be written, and models with
            code of one's own whose class has no `describe` of its own.
        FileExistsError: if the folder holds something else.
        FileNotFoundError: if there are no candidates at the path.
        pt.validate.InputValidationError: if the pipeline needs columns that the candidates lack.
        RuntimeError: if a block fails; the message names it and its queries. What is finished stays.
        OSError: if there is no space left. What is finished stays.
        ImportError: if pyarrow is missing.
    """
    arrow()
    if not isinstance(pipeline, pt.Transformer):
        raise ValueError(f"pipeline={pipeline!r} must be a transformer, e.g. ld.MaxP(...)")
    if price_per_hour is not None and not (isinstance(price_per_hour, Real) and price_per_hour >= 0):
        raise ValueError(f"price_per_hour={price_per_hour!r} must be a number of at least 0")
    mine, source = _keys_of(shard), Source(run, topics)
    _check_columns(pipeline, next(source.parts(), pd.DataFrame()))
    job = Job(Path(out), pipeline, source)
    if dry_run:
        rows, some = sample(source.parts(), _SAMPLED)
    else:
        candidates = job.begin(shard, lambda line: pt.tqdm.write(f"rerank_to_disk: {line}") if verbose else None)
        rows = candidates.rows
    total, todo = sum(rows[key] for key in mine), job.blocks.unfinished(key for key in mine if rows[key])
    left, coverage = sum(rows[key] for key in todo), None
    if dry_run:
        seconds = left * _seconds_per_row(pipeline, FrameCandidates(some)) if left else 0.0
    else:
        start = time.perf_counter()
        with (
            counting("rerank_to_disk", " rows", total, shown=verbose, done=total - left) as on_rows,
            told_together() as read,
        ):
            _score(job, candidates, todo, executor or InThisProcess(), on_rows)
        seconds, coverage = time.perf_counter() - start, next(reversed(read.values()), None)
    cost = None if price_per_hour is None else price_per_hour * seconds / 3600
    return Work(left, total - left, seconds, cost, coverage)


def merge_run(out: str | Path, path: str | Path | None = None, *, name: str = "rerank_to_disk") -> Any:
    """Puts the blocks of `rerank_to_disk` together.

    Queries have the order in which they first appeared in the candidates. In a frame, the rows of a query have the
    order in which the pipeline returned them: that of the candidates for the rerankers of this package. In a file they
    are in the order of their ranks.

    Args:
        out: the folder.
        path: write a TREC run there, gzipped where it ends in `.gz`, with no more than 2,048 rows of each block and a
            query in memory at any time; None returns a frame.
        name: of the system, for the last column of the file.

    Returns:
        A frame with all columns and a new index, in which sequences are lists; or the path.

    Raises:
        FileNotFoundError: if that is no folder of `rerank_to_disk`, or blocks are missing; the message says which, and
            which shards have them to do.
        ValueError: if blocks are damaged, or a qid or docno contains white space, which a TREC run cannot hold.
        ImportError: if pyarrow is missing.
    """
    arrow()
    blocks, keys = finished_blocks(Path(out))
    if path is not None:
        write_lines(Path(path), _lines(blocks, keys, name))
        return Path(path)
    frames = [(blocks.frame(key), blocks.queries(key)) for key in keys]
    first = np.concatenate([np.repeat(*np.array(queries, dtype=int).reshape(-1, 2).T) for _, queries in frames])
    # Types of columns without rows say nothing.
    parts = [frame for frame, _ in frames if len(frame)] or [frames[0][0]]
    return pd.concat(parts, ignore_index=True).iloc[np.argsort(first, kind="stable")].reset_index(drop=True)


def _lines(blocks: BlockFolder, keys: list[int], name: str) -> Iterator[str]:
    queries = {key: blocks.by_query(key, ["qid", "docno", "score", "rank"]) for key in keys}
    for _, block in sorted((row, key) for key in keys for row, _ in blocks.queries(key)):
        yield from run_lines(next(queries[block]).sort_values("rank"), name)


def _score(job: Job, candidates: Candidates, todo: list[int], executor: Executor, on_rows: Callable[..., Any]) -> None:
    """Scores blocks and writes each as it is finished."""
    opened: dict[int, dict[str, int]] = {}
    job.blocks.sweep(todo)

    def blocks() -> Iterator[tuple[int, pd.DataFrame]]:
        for key in todo:
            block = candidates.block(key)
            opened[key] = block.first_rows
            yield key, block.frame

    try:
        for key, result in executor.map_blocks(job.pipeline, blocks()):
            job.blocks.write(key, _checked(result, opened[key], job.pipeline), opened[key])
            del opened[key]
            on_rows(candidates.rows[key])
        if opened:
            raise ValueError(f"{executor!r} did not return all blocks")
    except Exception as error:
        if not opened or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            raise
        of_queries = "; ".join(f"block {key}, queries {', '.join(list(first)[:5])}" for key, first in opened.items())
        raise RuntimeError(
            f"{type(error).__name__}: {error} (in {of_queries}). Finished blocks stay in {str(job.out)!r}; the same "
            f"call goes on from there"
        ) from error


def _checked(result: Any, first_rows: dict[str, int], pipeline: pt.Transformer) -> pd.DataFrame:
    """The result of a block, with ranks by its scores.

    Raises:
        ValueError: if it lacks columns, a score is no finite number, or it has queries of no row of the block.
    """
    what = f"the results of {pipeline!r}"
    check_columns(result, ("qid", "docno", "score"), what)
    scored = with_scores(result, numbers(result, "score", what, "every result needs a score"))
    scored["qid"] = as_strings(scored["qid"])
    unknown = set(scored["qid"]) - first_rows.keys()
    if unknown:
        raise ValueError(f"{what} have the qid {min(unknown)!r}, which the candidates have not")
    return scored


def _seconds_per_row(pipeline: pt.Transformer, some: FrameCandidates) -> float:
    """Measured on the blocks of some candidates until a minute is over; nothing is remembered of it."""
    rows, seconds = 0, 0.0
    with ExitStack() as stack:
        for stage in stages_of(pipeline):
            stack.enter_context(undisturbed(stage))
        for key in np.flatnonzero(some.rows).tolist():
            frame = some.block(key).frame
            if not rows:
                pipeline(frame.head(1))  # weights are loaded
            start = time.perf_counter()
            pipeline(frame)
            seconds += time.perf_counter() - start
            rows += len(frame)
            if seconds > _SAMPLE_SECONDS:
                break
    return seconds / rows


def _check_columns(pipeline: pt.Transformer, part: pd.DataFrame) -> None:
    """Raises ValueError if there are no rows, InputValidationError if the pipeline lacks columns."""
    if not len(part):
        raise ValueError("the candidates have no rows")
    columns = [*part.columns, *(["rank"] if "score" in part and "rank" not in part else [])]
    try:
        pt.inspect.transformer_outputs(pipeline, columns)
    except pt.inspect.InspectError:  # nobody can tell before the first block
        return


def _keys_of(shard: tuple[int, int]) -> list[int]:
    """The blocks of a shard."""
    whole = isinstance(shard, tuple | list) and len(shard) == 2 and all(isinstance(each, Integral) for each in shard)
    if not whole or not 0 <= shard[0] < shard[1] <= BLOCKS:
        raise ValueError(f"shard={shard!r} must be (i, n): the i-th of n, i from 0, n at most {BLOCKS}")
    return list(range(shard[0], BLOCKS, shard[1]))
