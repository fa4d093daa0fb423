"""Divide candidates, in memory or in files, into blocks of whole queries, and rerank the blocks."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.coverage import Coverage
from ..common.files import file_digest, import_extra
from ..common.frames import as_strings, check_columns, check_qids, field_names, with_text
from ..common.key import description, frame_digest
from ..common.runs import run_parts, stages_of, substages

BLOCK_ROWS = 100  # the unit of work of a worker, and what is lost if the job is killed
_MOST_BLOCKS = 10_000  # maximum number of files in a folder

_TERMS = ("term_scores", "term_places")
"""Explanation columns with tuples of mixed types, which are written as JSON."""

_PART_ROWS = 200_000
_PART_BYTES = 32 * 2**20  # for Parquet files, whose rows can be documents


def transformed(transformer: pt.Transformer, frame: pd.DataFrame) -> tuple[pd.DataFrame, Coverage | None]:
    """Return the results of a block and the coverage of the last model in the pipeline."""
    out = transformer.transform(frame)
    coverages = [getattr(stage, "coverage", None) for stage in stages_of(transformer)]
    return out, next((each for each in reversed(coverages) if isinstance(each, Coverage)), None)


class SentTexts(pt.Transformer):
    """Replaces, on a worker, a text loader that cannot be sent; `rows` has the texts of the candidates of one block."""

    def __init__(self, loader: Any) -> None:
        self.loader: Any = None
        self.rows: Any = None
        with suppress(ValueError):
            self.loader = description(loader)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Add the texts to the rows that are candidates of the block."""
        keys = ["qid", "docno"]
        return inp.drop(columns=self.rows.columns.drop(keys), errors="ignore").merge(self.rows, on=keys)

    def describe(self) -> dict[str, Any]:
        """Return the description of the loader."""
        if self.loader is None:
            raise ValueError("the text loader may change unnoticed")
        return {"loader": self.loader}


def loader_of(stage: pt.Transformer) -> Any:
    """Return the `text_loader` of a model; None for other stages, such as an index with a method of this name."""
    return vars(stage).get("text_loader") if hasattr(stage, "text_field") else None


def map_elsewhere(
    executor: Any, function: Callable[[Any, Any], Any], pipeline: pt.Transformer, items: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[Any, Any]]:
    """Call `function(pipeline, block)` on the workers of an executor for each `(key, block)`; a block can be None.

    If a `text_loader` cannot be sent, the texts of a block are loaded in this process once a worker is free. Executors
    without a method `can_send` must send loaders themselves.
    """
    can_send = getattr(executor, "can_send", lambda loader: True)
    stages = {id(stage): stage for stage in stages_of(pipeline)}
    models = {key: stage for key, stage in stages.items() if not can_send(loader_of(stage))}
    if not models:
        yield from executor.map(function, pipeline, items)
        return
    # Operators are copied; other stages are shared, with their weights.
    twins = {key: stage for key, stage in stages.items() if not list(substages(stage))}
    for key, model in models.items():
        twins[key] = twin = copy.copy(model)
        vars(twin)["text_loader"] = SentTexts(loader_of(model))
    pipeline = copy.deepcopy(pipeline, dict(twins))

    def with_texts() -> Iterator[tuple[Any, Any]]:
        for key, block in items:
            yield key, (function, block, [_texts(model, block) for model in models.values()])

    yield from executor.map(_with_texts, pipeline, with_texts())


def _texts(model: Any, block: pd.DataFrame | None) -> pd.DataFrame | None:
    """Return the texts of the candidates; None if the block is None or already has them."""
    fields = field_names(model.text_field)
    if block is None or set(fields) <= set(block.columns):
        return None
    if "docno" not in block.columns:
        raise TypeError(
            f"the text_loader of {model!r} cannot be sent to workers, so texts are only loaded for candidates: put the "
            f"retriever before the distributed model, e.g. bm25 >> ld.distributed(model, workers=2)"
        )
    return with_text(block, fields, loader_of(model))[["qid", "docno", *fields]].drop_duplicates(["qid", "docno"])


def _with_texts(pipeline: pt.Transformer, item: tuple[Callable[[Any, Any], Any], Any, list[Any]]) -> Any:
    """Call a function on a worker after passing each `SentTexts` its texts."""
    function, block, texts = item
    loaders = {id(loader): loader for loader in map(loader_of, stages_of(pipeline)) if isinstance(loader, SentTexts)}
    for loader, rows in zip(loaders.values(), texts, strict=True):
        if rows is not None:
            loader.rows = rows
    return function(pipeline, block)


def blocks_of(qids: pd.Series, block_rows: int) -> list[np.ndarray]:
    """Return the row positions of each block, query by query in the order of their first rows."""
    queries, _ = pd.factorize(as_strings(qids), use_na_sentinel=False)
    counts = np.bincount(queries)
    ends = np.cumsum(np.bincount(_block_numbers(counts, block_rows), weights=counts).astype(int))
    return np.split(np.argsort(queries, kind="stable"), ends[:-1])


def _block_numbers(counts: Iterable[int], block_rows: int) -> list[int]:
    """Return the block of each query; queries fill a block until it has `block_rows` rows."""
    numbers, block, rows = [], 0, 0
    for count in counts:
        numbers.append(block)
        rows += count
        if rows >= block_rows:
            block, rows = block + 1, 0
    return numbers


class Candidates:
    """A run to rerank, in memory or in files, and topics with `qid` and columns missing from the run."""

    def __init__(self, run: pd.DataFrame | str | Path, topics: pd.DataFrame | None) -> None:
        self.topics = topics
        if topics is not None:
            check_columns(topics, ("qid", "query"), "topics")
            self.topics = topics.assign(qid=as_strings(topics["qid"]))
        self.frame: pd.DataFrame | None = None
        self.files: list[Path] = []
        if isinstance(run, pd.DataFrame):
            self.frame = self._with_queries(run)
        else:
            self.files = sorted(Path(run).glob("*.parquet")) if Path(run).is_dir() else [Path(run)]
            if not self.files:
                raise FileNotFoundError(f"run={str(run)!r} is a folder without Parquet files (*.parquet)")

    def parts(self) -> Iterator[pd.DataFrame]:
        """Yield the rows with their queries in parts that fit into memory; ids are strings."""
        return map(self._with_queries, self._read()) if self.frame is None else iter([self.frame])

    def digests(self) -> dict[str, Any]:
        """Return digests that identify the candidates and topics."""
        candidates = list(map(file_digest, self.files)) if self.frame is None else frame_digest(self.frame)
        return {"candidates": candidates, "topics": None if self.topics is None else frame_digest(self.topics)}

    def divide(self, folder: Path) -> list[int]:
        """Return the number of rows of each block; candidates from files are written to the folder, one file per block.

        Only the query ids of these are all in memory at once.
        """
        if self.frame is not None:
            return [len(places) for places in self._places]
        counts: Counter[Any] = Counter()
        for part in self._read(["qid"]):
            qids = as_strings(part["qid"])
            counts.update(qids.groupby(qids, sort=False).size().to_dict())
        numbers = _block_numbers(counts.values(), _size_of_block(counts.total()))
        block_of = dict(zip(counts, numbers, strict=True))
        for file in folder.glob("*.arrow"):  # from a killed process
            file.unlink()
        folder.mkdir(exist_ok=True)
        for part in self.parts():
            _append(part, part["qid"].map(block_of).to_numpy(), folder)
        return np.bincount(numbers, weights=list(counts.values())).astype(int).tolist()

    def block(self, number: int, rows: int, folder: Path) -> pd.DataFrame:
        """Return a block of `rows` rows, from the files of `divide` if the candidates are in files."""
        if self.frame is None:
            file = _candidate_file(folder, number)
            try:
                block = _read_block(file)
                if len(block) != rows:
                    raise ValueError(f"{len(block)} instead of {rows} rows")
            except (OSError, ValueError) as error:
                raise ValueError(f"{file} is damaged: start again in a new folder ({error})") from error
        else:
            block = self.frame.iloc[self._places[number]].reset_index(drop=True)
        return pt.model.add_ranks(block) if "score" in block.columns and "rank" not in block.columns else block

    @cached_property
    def _places(self) -> list[np.ndarray]:
        frame = pd.DataFrame({"qid": []}) if self.frame is None else self.frame
        return blocks_of(frame["qid"], _size_of_block(len(frame)))

    def _read(self, columns: list[str] | None = None) -> Iterator[pd.DataFrame]:
        for path in self.files:
            if path.suffix != ".parquet":
                yield from run_parts(path, _PART_ROWS)
                continue
            with arrow("parquet").ParquetFile(path) as file:
                size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
                rows = max(1, min(_PART_ROWS, _PART_BYTES * file.metadata.num_rows // max(1, size)))
                for batch in file.iter_batches(rows, columns=columns):
                    yield as_frame(arrow().Table.from_batches([batch]))

    def _with_queries(self, part: pd.DataFrame) -> pd.DataFrame:
        check_columns(part, ("qid", "docno"), "the candidates")
        check_qids(part)
        part = part.assign(qid=as_strings(part["qid"]), docno=as_strings(part["docno"]))
        if self.topics is None:
            return part
        if "query" in part.columns:
            raise ValueError("topics= has no effect, because the candidates have queries: leave one of them out")
        if len(unknown := part.loc[~part["qid"].isin(self.topics["qid"]), "qid"].unique()):
            raise ValueError(f"topics lack {len(unknown)} qids of the candidates, e.g. {unknown[0]!r}")
        new = ["qid", *(name for name in self.topics if name not in part.columns)]
        return part.merge(self.topics[new], on="qid", how="left", validate="many_to_one")


def _size_of_block(rows: int) -> int:
    return max(BLOCK_ROWS, rows // _MOST_BLOCKS)


def _append(part: pd.DataFrame, blocks: np.ndarray, folder: Path) -> None:
    """Append each row to the file of its block, as another Arrow stream."""
    pa, order = arrow(), np.argsort(blocks, kind="stable")
    table = as_table(part.iloc[order])
    for number, start, rows in zip(*np.unique(blocks[order], return_index=True, return_counts=True), strict=True):
        with _candidate_file(folder, number).open("ab") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(start, rows))


def _read_block(path: Path) -> pd.DataFrame:
    pa, tables = arrow(), []
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as stream:
                tables.append(stream.read_all())
    return as_frame(pa.concat_tables(tables, promote_options="permissive"))


def _candidate_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.arrow"


def arrow(part: str = "") -> Any:
    """Import pyarrow or a part of it; raise ImportError if it is missing."""
    return import_extra(f"pyarrow.{part}".rstrip("."), "disk", "runs on disk are Parquet files, which need pyarrow")


def as_table(frame: pd.DataFrame) -> Any:
    """Return the rows as an Arrow table without index; refuse dictionaries, because Arrow would merge their keys.

    Lone surrogates, which Arrow refuses, become question marks, as for the models.
    """
    pa = arrow()
    for name in frame.columns.intersection(_TERMS):
        frame = frame.assign(**{name: frame[name].map(_to_json).astype(object)})
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except UnicodeEncodeError:
        table = pa.Table.from_pandas(_valid(frame), preserve_index=False)
    if dictionaries := [field.name for field in table.schema if "struct<" in str(field.type)]:
        raise ValueError(f"dictionaries cannot be written: drop the columns {dictionaries}, or make them JSON")
    return table


def _to_json(terms: Any) -> str | None:
    is_missing = not isinstance(terms, list | tuple | np.ndarray)
    return None if is_missing else json.dumps(terms, default=lambda array: array.tolist())


def _valid(frame: pd.DataFrame) -> pd.DataFrame:
    """Replace lone surrogates by question marks; refuse them in ids."""
    columns = {}
    for name in frame.columns[[dtype.kind == "O" for dtype in frame.dtypes]]:
        values = frame[name].tolist()
        valid = [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
        if name in ("qid", "docno") and valid != values:
            raise ValueError(f"column {name!r} has a lone surrogate, which cannot be written: rename the id")
        columns[name] = pd.Series(valid, index=frame.index, dtype=object)
    return frame.assign(**columns)


def as_frame(table: Any) -> pd.DataFrame:
    """Return the rows of a table; sequences are lists, and columns with missing values keep their integers.

    Only `features` are arrays, as learning to rank requires.
    """
    pa = arrow()
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for field in table.schema:
        if field.name != "features" and (pa.types.is_list(field.type) or pa.types.is_large_list(field.type)):
            frame[field.name] = pd.Series(table[field.name].to_pylist(), index=frame.index, dtype=object)
    for name in frame.columns.intersection(_TERMS):
        rows = [json.loads(row) if isinstance(row, str) else None for row in frame[name]]
        frame[name] = pd.Series(rows, index=frame.index, dtype=object)
    return frame
