"""Rerank on disk: one Parquet file per block of queries, in shards, with continuation after interruptions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_type
from ..common.coverage import Coverage
from ..common.files import claim, full_path, import_extra, replacing, undamaged, write_lines
from ..common.frames import as_strings, check_columns, check_qids, numeric
from ..common.key import frame_digest, key, model_keys
from ..common.pipelines import stages_of
from ..common.progress import work_bar
from ..common.warnings import as_one_call, warn
from .blocks import blocks_of, transformed
from .ray import Distributed

_FORMAT = 1
"""Part of every job; increment it when the same job would write different files."""

_JOB, _BLOCKS = "job.json", "blocks"

_NESTED = b"nested"
"""The entry of a file's metadata with the names of columns in JSON."""

_BLOCK = b"block"
"""The entry of a file's metadata with its number and job."""

_TO_FINISH = "run rerank_to_disk again for each shard"


def rerank_to_disk(
    pipeline: pt.Transformer,
    run: pd.DataFrame,
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    verbose: bool = False,
) -> Coverage | None:
    """Rerank candidates and write the results to a folder block by block, so that an interrupted job can continue.

    A block is one query, or several until they have 100 rows, and becomes a Parquet file. After an interruption, the
    same call continues: finished blocks are kept, and the unfinished one is scored again. Several processes, on
    machines with a shared file system, can divide the work by `shard`. With `ld.distributed(pipeline)`, the workers of
    Ray compute the blocks.

    A folder belongs to one job: candidates and models of this package are compared. Changes in other stages, such as
    your functions, in text loaders, or in a `PairScorer` that needs a name, are not noticed; a warning says so. Your
    own classes count by their names: after changing the code of one, use another folder.

    Args:
        pipeline: a reranker, or a pipeline that starts with candidates, e.g. `dataset.text_loader() >> ld.MaxP()`. A
            model with `text_loader=` loads the texts of one block at a time and does not write them.
        run: candidates with `qid`, `query`, `docno` and any other columns.
        out: the folder: new, or from an earlier identical call.
        shard: `(i, n)` processes every n-th block from the i-th, starting at 0.
        verbose: show a progress bar over the rows of the shard.

    Returns:
        How much of the rows scored by this call the last model of this package in the pipeline read; None without one.

    Raises:
        ValueError: if the folder has finished blocks of other candidates or other models of this package, if a column
            of the candidates has values of several types, or if results lack a score.
        pt.validate.InputValidationError: if the candidates lack columns that the pipeline needs.
    """
    _arrow()
    check_type(pt.Transformer, "a transformer, e.g. ld.MaxP(...)", pipeline=pipeline)
    check_columns(run, ("qid", "docno"), "the candidates")
    check_qids(run)
    for name in run.columns:
        if pd.api.types.infer_dtype(run[name], skipna=True) in ("mixed", "mixed-integer") and not _is_nested(run[name]):
            raise ValueError(f"the column {name!r} has values of several types: convert it to one, or drop it")
    if len(shard) != 2 or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r} must be (i, n): the i-th of n shards, starting at 0")
    out, blocks = Path(full_path(out)), blocks_of(run)
    claim(out)
    scored_by = pipeline.model if isinstance(pipeline, Distributed) else pipeline
    job = _begin(out, scored_by, run, len(blocks), is_first=shard[0] == 0)
    in_shard = range(shard[0], len(blocks), shard[1])
    to_do = [number for number in in_shard if not _block_file(out, number).is_file()]
    total, rows_to_do = (sum(len(blocks[number]) for number in numbers) for numbers in (in_shard, to_do))
    frames = ((number, run.iloc[blocks[number]].reset_index(drop=True)) for number in to_do)
    if isinstance(pipeline, Distributed):
        results = pipeline.map_blocks(frames)
    else:
        results = ((number, *transformed(pipeline, frame)) for number, frame in frames)
    coverages = []
    with as_one_call(), work_bar("rerank_to_disk", " rows", total, shown=verbose, done=total - rows_to_do) as bar:
        for number, result, coverage in results:
            _write(result, _block_file(out, number), job, f"the results of {pipeline!r}")
            coverages += [] if coverage is None else [coverage]
            bar.update(len(blocks[number]))
    return Coverage.total(coverages) if coverages else None


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
    out = Path(full_path(out))
    job = _job_in(out)
    files = [_block_file(out, number) for number in range(job["blocks"])]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} blocks are not finished, starting with {missing[0]}: {_TO_FINISH}"
        )
    if path is not None:
        blocks = (_read(file, job, ["qid", "docno", "score", "rank"]) for file in files)
        queries = (query.sort_values("rank") for block in blocks for _, query in block.groupby("qid", sort=False))
        path = Path(full_path(path))
        write_lines(path, (line for query in queries for line in run_lines(query, name)))
        return path
    frames = [_read(file, job) for file in files]
    # Columns without rows have no types.
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def run_lines(ranked: pd.DataFrame, name: str) -> Iterator[str]:
    """Yield the lines of a run (`qid, docno, score, rank`) in TREC format, in the order of the rows.

    The last column is the name of the system, with `_` for white space.
    """
    columns = {column: as_strings(ranked[column]).tolist() for column in ("qid", "docno")}
    for column, values in columns.items():
        bad_name = next((value for value in values if not value or len(value.split()) != 1), None)
        if bad_name is not None:
            raise ValueError(f"column {column} holds {bad_name!r}: names in TREC runs must not be empty or have spaces")
    system = "_".join(name.split()) or "run"
    for qid, docno, rank, score in zip(
        *columns.values(), ranked["rank"].tolist(), ranked["score"].tolist(), strict=True
    ):
        yield f"{qid} Q0 {docno} {rank} {score!r} {system}"


def _begin(out: Path, pipeline: pt.Transformer, run: pd.DataFrame, blocks: int, *, is_first: bool) -> dict[str, Any]:
    """Start a job in the folder, or compare it with the job there; the first shard may replace one without blocks."""
    models = model_keys(pipeline, without=("computed",))
    job = {"format": _FORMAT, "candidates": frame_digest(run), "models": models, "blocks": blocks}
    if not (out / _JOB).is_file() or (is_first and not any(out.glob(f"{_BLOCKS}/*.parquet"))):
        write_lines(out / _JOB, [json.dumps({**job, "pipeline": repr(pipeline)}, indent=1)])
        return job
    other = _job_in(out)
    if different := [name for name, value in job.items() if other.get(name) != value]:
        raise ValueError(
            f"out={str(out)!r} belongs to another job, with other {' and '.join(different)} (its pipeline was "
            f"{other.get('pipeline')}): choose a new folder"
        )
    stages = list(stages_of(pipeline))
    loads = any(getattr(stage, "text_loader", None) is not None for stage in stages)
    if None in models or len(stages) > len(models) or loads:
        warn(
            f"rerank_to_disk continues the job in {str(out)!r}, whose pipeline was {other['pipeline']}, and cannot "
            f"notice changes in functions, in text loaders and in stages of other packages",
            UserWarning,
        )
    return job


def _job_in(out: Path) -> dict[str, Any]:
    """Return what identifies the job in a folder, its number of blocks and the repr of its pipeline."""
    with undamaged(out / _JOB, "choose a new folder"):
        job = json.loads((out / _JOB).read_text(encoding="utf-8"))
        if not range(job["blocks"]):
            raise LookupError("no blocks")
        return {name: job[name] for name in ("format", "candidates", "models", "blocks", "pipeline")}


def _name_of(job: dict[str, Any], file: Path) -> bytes:
    """Return what a block's file says of itself: files of other jobs and other blocks are no less valid."""
    return f"{file.stem} of {key({name: value for name, value in job.items() if name != 'pipeline'})}".encode()


def _block_file(out: Path, number: int) -> Path:
    return out / _BLOCKS / f"{number:05}.parquet"


def _write(result: pd.DataFrame, file: Path, job: dict[str, Any], owner: str) -> None:
    """Write results to a Parquet file; sequences and dictionaries become JSON, which Arrow could not keep.

    Lone surrogates of texts, which Arrow refuses, become question marks, as for the models.
    """
    pa = _arrow()
    check_columns(result, ("qid", "docno", "score"), owner)
    result = pt.model.add_ranks(result.assign(score=numeric(result, "score", owner, "every result needs a score")))
    nested = [name for name in result.columns if _is_nested(result[name])]
    result = result.assign(**{name: result[name].map(_to_json) for name in nested})
    try:
        table = pa.Table.from_pandas(result, preserve_index=False)
    except UnicodeEncodeError:
        texts = {name: result[name].map(_without_surrogates) for name in result.columns.difference(["qid", "docno"])}
        table = pa.Table.from_pandas(result.assign(**texts), preserve_index=False)
    table = table.replace_schema_metadata(
        {**table.schema.metadata, _NESTED: json.dumps(nested), _BLOCK: _name_of(job, file)}
    )
    with replacing(file) as part:
        _arrow("parquet").write_table(table, part, compression="zstd", write_page_checksum=True)


def _read(file: Path, job: dict[str, Any], columns: list[str] | None = None) -> pd.DataFrame:
    with undamaged(file, f"delete it, then {_TO_FINISH}", OSError, ValueError):
        table = _arrow("parquet").read_table(file, columns=columns, page_checksum_verification=True)
        if table.schema.metadata[_BLOCK] != _name_of(job, file):
            raise ValueError("it belongs to another block or another job")
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for name in frame.columns.intersection(json.loads(table.schema.metadata[_NESTED])):
        values = [json.loads(value) if isinstance(value, str) else None for value in frame[name]]
        values = list(map(np.array, values)) if name == "features" else values  # as learning to rank requires
        frame[name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def _is_nested(column: pd.Series) -> bool:
    return bool(column.map(pd.api.types.is_list_like).any())


def _to_json(value: Any) -> str | None:
    is_missing = not pd.api.types.is_list_like(value)
    return None if is_missing else json.dumps(value, default=lambda array: array.tolist())


def _without_surrogates(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _arrow(part: str = "") -> Any:
    """Import pyarrow or one of its modules."""
    return import_extra(f"pyarrow.{part}".rstrip("."), "disk", "runs on disk are Parquet files, which need pyarrow")
