"""TREC run files, and the stages of a pipeline."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

from .files import full_path, write_lines
from .frames import as_strings

EXACT_FLOATS: dict[str, Any] = (
    {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
)
"""Options of `pd.read_csv` to read floats exactly, which is the default since pandas 3.1."""


def write_run(frame: pd.DataFrame, path: str | Path, name: str) -> None:
    """Write a run (`qid, docno, score`) in TREC format, gzipped if the path ends in `.gz`.

    Ranks are computed from the scores. The last column is the name of the system, with `_` for white space.
    """
    columns = {column: as_strings(frame[column]).tolist() for column in ("qid", "docno")}
    ranked = pt.model.add_ranks(pd.DataFrame({**columns, "score": frame["score"].tolist()}))
    write_lines(Path(full_path(path)), run_lines(ranked, name))


def run_lines(ranked: pd.DataFrame, name: str) -> Iterator[str]:
    """Yield the lines of a run in TREC format: `qid, docno, score, rank` in the order of the rows; see `write_run`."""
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


def read_run(path: str | Path) -> pd.DataFrame:
    """Read a run in TREC format, compressed or not, as `qid, docno, score` with exact scores.

    `pt.io.read_results` would read the name "NA" as missing and quotation marks as syntax.
    """
    try:
        run: pd.DataFrame = pd.read_csv(
            full_path(path),
            sep=r"\s+",
            names=["qid", "Q0", "docno", "rank", "score", "system"],
            usecols=["qid", "docno", "score"],
            dtype={"qid": str, "docno": str},
            keep_default_na=False,
            quoting=csv.QUOTE_NONE,
            **EXACT_FLOATS,
        )
        return run.astype({"score": "float64"})
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} is no TREC run (qid Q0 docno rank score system): {error}") from None


def substages(stage: pt.Transformer) -> Iterator[pt.Transformer]:
    """Yield the direct parts of a pipeline or operator."""
    try:
        parts = pt.inspect.subtransformers(stage)
    except (pt.inspect.InspectError, ValueError):
        return
    for value in parts.values():
        yield from value if isinstance(value, Sequence) else [value]


def stages_of(pipeline: pt.Transformer) -> Iterator[pt.Transformer]:
    """Yield a pipeline and all transformers in it."""
    yield pipeline
    for stage in substages(pipeline):
        yield from stages_of(stage)


def trained_qids(stage: Any) -> frozenset[str]:
    """Return the queries that a pipeline was trained on, including the models in `preselect` and in a `PairScorer`.

    A transformer with models by fold answers for them. The model of a scoring function is not seen.
    """
    own = getattr(stage, "trained_qids", None)
    parts = [] if own is not None else list(substages(stage))
    selector, scorer = getattr(stage, "preselect", None), getattr(stage, "backbone", None)
    hidden = [getattr(selector, "model", None), getattr(scorer, "scorer", None)]
    parts += [part for part in hidden if isinstance(part, pt.Transformer)]
    return frozenset(own or ()).union(*map(trained_qids, parts))
