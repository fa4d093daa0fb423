"""Reranking on disk: a Parquet file for each block of queries, in shards, going on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from filelock import FileLock

from ..common.coverage import Coverage
from ..common.files import replacing, write_lines
from ..common.frames import as_strings, check_columns, numbers, with_scores
from ..common.progress import counting
from ..common.registry import VOUCH, own_code_in
from ..common.runs import run_lines
from ..common.warnings import told_together, warn
from ..experiment.identity import differences, identify
from .blocks import Candidates, arrow, as_frame, as_table, map_here, transformed

_FORMAT = 3
"""Part of every manifest; raise it when the same job would give other files."""

_CANDIDATES, _BLOCKS, _MANIFEST = "candidates", "blocks", "manifest.json"


@dataclass(frozen=True)
class Work:
    """What a call of `rerank_to_disk` has done.

    Attributes:
        rows: that it scored.
        rows_before: of its shard that were scored already.
        coverage: what the last model of this package in the pipeline has read of these rows; None where none has.
    """

    rows: int
    rows_before: int
    coverage: Coverage | None = None


def rerank_to_disk(
    pipeline: pt.Transformer,
    run: pd.DataFrame | str | Path,
    out: str | Path,
    *,
    topics: pd.DataFrame | None = None,
    shard: tuple[int, int] = (0, 1),
    executor: Any = None,
    verbose: bool = False,
) -> Work:
    """Rerank candidates that need not fit into memory, and write the results to a folder block by block.

    A block is one query, or several until they have 100 rows (more where that would make more than 10,000 blocks).
    Blocks go through the pipeline one by one, and each that is finished is one Parquet file. Killed at any moment, the
    same call goes on: finished blocks stay, the open one is scored anew (with `score_cache=` of the model, but for the
    last two seconds). Several processes, on one machine or several with one file system, divide the work by `shard`.

    Args:
        pipeline: a reranker, or a pipeline that begins with candidates, e.g. `dataset.text_loader() >> ld.MaxP()`. A
            model with `text_loader=` loads the texts of one block at a time and writes none of them.
        run: candidates with `qid`, `docno` and any further columns: a frame; or the path of a TREC run, compressed or
            not, in any order, or of a Parquet file or a folder of these. Files are divided into blocks once, by one
            process, in the folder.
        out: the folder; new, empty, or of the same call before.
        topics: `qid` and `query`, where the candidates have no column `query`.
        shard: `(i, n)` takes every n-th block from the i-th on, i from 0.
        executor: computes the blocks elsewhere: a `RayExecutor`, or an object with its method `map`.
        verbose: show a progress bar of the shard's rows.

    Returns:
        What was done: rows, and what the model has read of them.

    Raises:
        ValueError: if the folder was begun with another pipeline or other candidates (the message names what differs);
            for candidates without queries, results that cannot be written, and models with code of one's own whose
            class has no `describe` of its own.
        FileExistsError: if the folder holds something else.
        pt.validate.InputValidationError: if the pipeline needs columns that the candidates lack.
        RuntimeError: if a block fails; the message names it and its queries. What is finished stays.
    """
    arrow()
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r} must be (i, n): the i-th of n, i from 0")
    out, candidates = Path(out), Candidates(run, topics)
    _check_columns(pipeline, next(candidates.parts(), pd.DataFrame()))
    rows = _begin(out, pipeline, candidates)
    mine = range(shard[0], len(rows), shard[1])
    todo = [number for number in mine if not _file(out, number).is_file()]
    total, left = (sum(rows[number] for number in some) for some in (mine, todo))
    blocks = ((number, candidates.block(number, out / _CANDIDATES)) for number in todo)
    coverages = []
    with counting("rerank_to_disk", " rows", total, shown=verbose, done=total - left) as advance, told_together():
        for number, table, coverage in _results(pipeline, blocks, executor):
            with replacing(_file(out, number)) as part:
                arrow("parquet").write_table(table, part, compression="zstd")
            coverages += [] if coverage is None else [coverage]
            advance(rows[number])
    return Work(left, total - left, Coverage.total(coverages) if coverages else None)


def merge_run(out: str | Path, path: str | Path | None = None, *, name: str = "rerank_to_disk") -> Any:
    """Put the blocks of `rerank_to_disk` together.

    Queries have the order in which they first appeared in the candidates. In a frame, the rows of a query have the
    order in which the pipeline returned them: that of the candidates for the rerankers of this package. In a file they
    are in the order of their ranks.

    Args:
        out: the folder.
        path: write a TREC run there, gzipped where it ends in `.gz`, with one block in memory at any time; None returns
            a frame.
        name: of the system, for the last column of the file.

    Returns:
        A frame with all columns and a new index, in which sequences are lists; or the path.

    Raises:
        FileNotFoundError: if that is no folder of `rerank_to_disk`, or names the first block that is not finished.
        ValueError: if a qid or docno contains white space, which a TREC run cannot hold.
    """
    parquet, out = arrow("parquet"), Path(out)
    files = [_file(out, number) for number in range(len(_manifest_of(out)["rows"]))]
    if path is not None:
        write_lines(Path(path), (line for file in files for line in _lines(file, name)))
        return Path(path)
    frames = [as_frame(parquet.read_table(file)) for file in files]
    # Types of columns without rows say nothing.
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def _lines(file: Path, name: str) -> Iterator[str]:
    frame = as_frame(arrow("parquet").read_table(file, columns=["qid", "docno", "score", "rank"]))
    for _, query in frame.groupby("qid", sort=False):
        yield from run_lines(query.sort_values("rank"), name)


def _begin(out: Path, pipeline: pt.Transformer, candidates: Candidates) -> list[int]:
    """Begin a job, or hold this one against the job in the folder; return the number of rows of each block.

    Of several processes that start at once one begins the job, while the others wait.
    """
    told = identify(pipeline)
    own = own_code_in(told.told)
    if own:
        raise ValueError(
            f"all blocks of a job must be made by the same code, and of {', '.join(own)} nobody can tell: do without "
            f"rerank_to_disk. {VOUCH}"
        )
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if name != _CANDIDATES and not name.startswith(".")]
    if foreign and not (out / _MANIFEST).is_file():  # looked for last, as another process may write it at any moment
        raise FileExistsError(f"{str(out)!r} holds other files ({', '.join(foreign[:5])}): choose a new folder")
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"):
        manifest = _manifest_of(out) if (out / _MANIFEST).is_file() else None
        identity = {"format": _FORMAT, "pipeline": told.told, **candidates.digests()}
        if manifest is None:
            manifest = {"identity": identity, "rows": candidates.divide(out / _CANDIDATES)}
            write_lines(out / _MANIFEST, [json.dumps(manifest, indent=1)])
        elif differ := differences(manifest["identity"], identity):
            raise ValueError(
                f"{str(out)!r} was begun with something else, which differs in {', '.join(differ)}: go on with what it "
                f"was begun with, or choose another folder"
            )
        elif told.unchecked or told.functions:
            parts = ", ".join([*told.unchecked, *told.functions])
            warn(f"{str(out)!r} was begun before; nobody can tell if with the same {parts}", UserWarning)
    return list(manifest["rows"])


def _manifest_of(out: Path) -> dict[str, Any]:
    """Return who makes the results in a folder, and the number of rows of each block."""
    return dict(json.loads((out / _MANIFEST).read_text(encoding="utf-8")))


def _file(out: Path, number: int) -> Path:
    return out / _BLOCKS / f"{number:05}.parquet"


def _results(
    pipeline: pt.Transformer, blocks: Iterator[tuple[int, pd.DataFrame]], executor: Any
) -> Iterator[tuple[int, Any, Coverage | None]]:
    """Yield number, results as an Arrow table and coverage of each block; its queries are in their order."""
    opened: dict[int, list[str]] = {}
    run, what = map_here if executor is None else executor.map, f"the results of {pipeline!r}"

    def opening() -> Iterator[tuple[int, pd.DataFrame]]:
        for number, frame in blocks:
            opened[number] = frame["qid"].unique().tolist()
            yield number, frame

    try:
        for number, (result, coverage) in run(transformed, pipeline, opening()):
            check_columns(result, ("qid", "docno", "score"), what)
            result = result.assign(qid=as_strings(result["qid"]))
            places = {qid: place for place, qid in enumerate(opened[number])}
            scored = with_scores(result, numbers(result, "score", what, "every result needs a score"))
            table = as_table(scored.iloc[np.argsort(scored["qid"].map(places).to_numpy(), kind="stable")])
            del opened[number]
            yield number, table, coverage
    except Exception as error:
        if not opened:
            raise
        where = "; ".join(f"block {number}, queries {', '.join(qids[:5])}" for number, qids in opened.items())
        raise RuntimeError(
            f"{type(error).__name__}: {error} (in {where}). Finished blocks stay, and the same call goes on from there"
        ) from error


def _check_columns(pipeline: pt.Transformer, part: pd.DataFrame) -> None:
    """Raise InputValidationError if the pipeline lacks columns."""
    columns = [*part.columns, *(["rank"] if "score" in part and "rank" not in part else [])]
    with suppress(pt.inspect.InspectError):  # nobody can tell before the first block
        pt.inspect.transformer_outputs(pipeline, columns)
