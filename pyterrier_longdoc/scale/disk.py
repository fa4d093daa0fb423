"""Rerank on disk: one Parquet file per block of queries, in shards, with continuation after interruptions."""

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

from ..common.arguments import check_type
from ..common.coverage import Coverage
from ..common.files import replacing, write_lines
from ..common.frames import as_strings, check_columns, numeric
from ..common.key import key, own_models
from ..common.progress import work_bar
from ..common.runs import run_lines
from .blocks import BLOCK_ROWS, Candidates, arrow, as_frame, as_table, map_elsewhere, transformed

_FORMAT = 5
"""Part of every manifest; increment it when the same job would write different files."""

_CANDIDATES, _BLOCKS, _MANIFEST = "candidates", "blocks", "manifest.json"

_TO_FINISH = (
    "repeat the call of rerank_to_disk for each shard, or start again in a new folder if the pipeline has user code, "
    "which could have changed"
)


@dataclass(frozen=True)
class Work:
    """The work done by a call of `rerank_to_disk`.

    Attributes:
        rows: the number of scored rows.
        rows_before: the number of rows of the shard that had been scored before.
        coverage: how much of the scored rows the last model of this package in the pipeline read; None without one.
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

    A block is one query, or several until they have 100 rows (or more rows, to limit the number of blocks to 10,000),
    and becomes a Parquet file. After an interruption, the same call continues: finished blocks are kept, and the
    current one is scored again (a model with `score_cache=` only repeats the last two seconds). Several processes, on
    machines with a shared file system, can divide the work by `shard`. Lone surrogates, which files cannot store, are
    written as question marks, as models read them.

    Args:
        pipeline: a reranker, or a pipeline that starts with candidates, e.g. `dataset.text_loader() >> ld.MaxP()`. A
            model with `text_loader=` loads the texts of one block at a time and does not write them.
        run: candidates with `qid`, `docno` and any other columns: a frame, or the path of a TREC run (compressed or
            not, in any order), of a Parquet file or of a folder of Parquet files. One process first divides files into
            blocks in the folder.
        out: the folder: new, empty, or from an earlier identical call.
        topics: `qid` and `query`, if the candidates have no column `query`.
        shard: `(i, n)` processes every n-th block from the i-th, starting at 0.
        executor: computes the blocks on workers: a `RayExecutor`, or an object with its method `map`.
        verbose: show a progress bar over the rows of the shard.

    Returns:
        The number of rows, and how much of them the model read.

    Raises:
        ValueError: if the folder has a job of another pipeline, other candidates or other result columns; for
            candidates without queries and for columns that cannot be written, such as dictionaries. A job of a pipeline
            with user code (a function, or a class of a script or notebook) is never continued, because the code could
            have changed.
        FileExistsError: if the folder has other files.
        FileNotFoundError: if there are no candidates at the path.
        pt.validate.InputValidationError: if the candidates lack columns that the pipeline needs.
        RuntimeError: if a block fails; the message names it and its queries. Finished blocks are kept.
    """
    arrow()
    check_type(pt.Transformer, "a transformer, e.g. ld.MaxP(...)", pipeline=pipeline)
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r} must be (i, n): the i-th of n shards, starting at 0")
    out, candidates = Path(out), Candidates(run, topics)
    first = next(candidates.parts(), pd.DataFrame())
    for start in range(0, len(first), BLOCK_ROWS):
        as_table(first.iloc[start : start + BLOCK_ROWS])  # refuses columns that cannot be written
    given = [*first.columns, *(["rank"] if "score" in first and "rank" not in first else [])]
    columns = None  # unknown before the first block
    with suppress(pt.inspect.InspectError):
        columns = sorted(set(map(str, pt.inspect.transformer_outputs(pipeline, given))))
    rows = _begin(out, pipeline, candidates, columns, alone=shard[1] == 1)
    blocks_of_shard = range(shard[0], len(rows), shard[1])
    open_blocks = [number for number in blocks_of_shard if not _block_file(out, number).is_file()]
    total, open_rows = (sum(rows[number] for number in numbers) for numbers in (blocks_of_shard, open_blocks))
    blocks = ((number, candidates.block(number, rows[number], out / _CANDIDATES)) for number in open_blocks)
    coverages = []
    with work_bar("rerank_to_disk", " rows", total, shown=verbose, done=total - open_rows) as bar:
        for number, coverage in _write_blocks(pipeline, blocks, executor, out):
            coverages += [] if coverage is None else [coverage]
            bar.update(rows[number])
    return Work(open_rows, total - open_rows, Coverage.total(coverages) if coverages else None)


def merge_run(out: str | Path, path: str | Path | None = None, *, name: str = "rerank_to_disk") -> Any:
    """Merge the blocks of `rerank_to_disk`.

    Queries are in the order of their first candidates. The rows of a query are in the order of their ranks in a file,
    and in the order of the pipeline's results in a frame (for rerankers of this package, that of the candidates).

    Args:
        out: the folder.
        path: the path of a TREC run to write, gzipped if it ends in `.gz`, with one block in memory at a time; None
            returns a frame.
        name: the name of the system in the last column of the file.

    Returns:
        The path; or a frame with all columns and a new index, in which `features` are arrays and other sequences lists.

    Raises:
        FileNotFoundError: if this is not a folder of `rerank_to_disk`, or some of its blocks are not finished.
        ValueError: if a file is damaged, or a qid or docno contains white space, which a TREC run does not allow.
    """
    out = Path(out)
    files = [_block_file(out, number) for number in range(len(_manifest_of(out)["rows"]))]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} blocks are not finished, starting with {missing[0]}: {_TO_FINISH}"
        )
    if path is not None:
        blocks = (_read(file, ["qid", "docno", "score", "rank"]) for file in files)
        queries = (query.sort_values("rank") for block in blocks for _, query in block.groupby("qid", sort=False))
        write_lines(Path(path), (line for query in queries for line in run_lines(query, name)))
        return Path(path)
    frames = list(map(_read, files))
    # Columns without rows have no types.
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def _read(file: Path, columns: list[str] | None = None) -> pd.DataFrame:
    parquet = arrow("parquet")
    try:
        return as_frame(parquet.read_table(file, columns=columns, page_checksum_verification=True))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, then {_TO_FINISH}") from error


def _begin(
    out: Path, pipeline: pt.Transformer, candidates: Candidates, columns: list[str] | None, *, alone: bool
) -> list[int]:
    """Start a job, or compare it with the job in the folder; return the number of rows of each block.

    If several processes start at once, one starts the job while the others wait. A job without a key must run `alone`,
    in one call.
    """
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if name != _CANDIDATES and not name.startswith(".")]
    if foreign and not (out / _MANIFEST).is_file():  # checked last, because another process can write it at any time
        raise FileExistsError(f"out={str(out)!r} has other files ({', '.join(foreign[:5])}): choose a new folder")
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock"):
        manifest = _manifest_of(out) if (out / _MANIFEST).is_file() else None
        job = None
        try:
            job = key([_FORMAT, *map(key, own_models(pipeline)), candidates.digests(), columns])
        except ValueError as error:
            if manifest is not None or not alone:
                raise ValueError(
                    f"{error}: such a pipeline must rerank in one call, without shard=, into a new folder"
                ) from error
        if manifest is None:
            manifest = {"key": job, "rows": candidates.divide(out / _CANDIDATES)}
            write_lines(out / _MANIFEST, [json.dumps(manifest, indent=1)])
        elif manifest.get("key") != job:
            raise ValueError(
                f"out={str(out)!r} has another job, with another pipeline, candidates, topics or columns: choose a new "
                f"folder"
            )
    return list(manifest["rows"])


def _manifest_of(out: Path) -> dict[str, Any]:
    """Return the key of the job in a folder (None if it cannot be continued) and the number of rows of each block."""
    return dict(json.loads((out / _MANIFEST).read_text(encoding="utf-8")))


def _block_file(out: Path, number: int) -> Path:
    return out / _BLOCKS / f"{number:05}.parquet"


def _write_blocks(
    pipeline: pt.Transformer, blocks: Iterator[tuple[int, pd.DataFrame]], executor: Any, out: Path
) -> Iterator[tuple[int, Coverage | None]]:
    """Write the results of each block with queries in their order; yield its number and coverage."""
    opened: dict[int, list[str]] = {}
    owner = f"the results of {pipeline!r}"

    def opening() -> Iterator[tuple[int, pd.DataFrame]]:
        for number, frame in blocks:
            opened[number] = frame["qid"].unique().tolist()
            yield number, frame

    results: Iterator[Any] = ((number, transformed(pipeline, frame)) for number, frame in opening())
    if executor is not None:
        results = map_elsewhere(executor, transformed, pipeline, opening())
    try:
        for number, (result, coverage) in results:
            check_columns(result, ("qid", "docno", "score"), owner)
            result = result.assign(qid=as_strings(result["qid"]))
            places = {qid: place for place, qid in enumerate(opened[number])}
            if foreign := set(result["qid"]) - places.keys():
                raise ValueError(f"{owner} have the qid {min(foreign)!r}, which is not among the candidates")
            scores = numeric(result, "score", owner, "every result needs a score")
            scored = pt.model.add_ranks(result.assign(score=scores))
            table = as_table(scored.iloc[np.argsort(scored["qid"].map(places).to_numpy(), kind="stable")])
            with replacing(_block_file(out, number)) as part:
                arrow("parquet").write_table(table, part, compression="zstd", write_page_checksum=True)
            del opened[number]
            yield number, coverage
    except Exception as error:
        if not opened:
            raise
        blocks_at_work = "; ".join(f"block {number}, queries {', '.join(qids[:5])}" for number, qids in opened.items())
        raise RuntimeError(
            f"{type(error).__name__}: {error} (in {blocks_at_work}). Remove the cause, then {_TO_FINISH}"
        ) from error
