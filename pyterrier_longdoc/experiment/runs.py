"""Runs: a system's ranking of all topics, in memory and as TREC files."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.files import replacing

EXACT_FLOATS: dict[str, Any] = (
    {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
)
"""For `pd.read_csv`, so that numbers come back as they were written: the default, and the only choice, since 3.1."""

TREC_COLUMNS = ["qid", "Q0", "docno", "rank", "score", "system"]


@dataclass(frozen=True, eq=False)
class Run:
    """The documents that a system returned, query by query, in the order of its frame.

    Attributes:
        qids: the queries with at least one document.
        starts: `(len(qids) + 1,)`; query i has the documents `starts[i]:starts[i + 1]`.
        docnos: all documents.
        scores: `(documents,)` float64.
    """

    qids: list[str]
    starts: np.ndarray
    docnos: list[str]
    scores: np.ndarray

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, name: str) -> Run:
        """Reads a frame with `qid`, `docno` and `score`; other columns do not count, and `rank` is not read.

        Args:
            frame: is not changed.
            name: of the system, for messages.

        Raises:
            ValueError: if a column is missing, a score is no number, or there is no row at all.
        """
        missing = [column for column in ("qid", "docno", "score") if column not in frame.columns]
        if missing:
            raise ValueError(
                f"the run of {name!r} lacks the column(s) {', '.join(missing)}; it has {', '.join(map(str, frame))}"
            )
        if not len(frame):
            raise ValueError(f"{name!r} returned no document for any topic; nothing can be evaluated")
        try:
            scores = frame["score"].to_numpy(dtype="float64")
        except (TypeError, ValueError):
            raise ValueError(f"the run of {name!r} has scores that are no numbers (column score)") from None
        codes, qids = pd.factorize(as_strings(frame["qid"]))
        docnos = as_strings(frame["docno"]).to_numpy(dtype=object)
        if (np.diff(codes) < 0).any():
            order = np.argsort(codes, kind="stable")
            codes, docnos, scores = codes[order], docnos[order], scores[order]
        starts = np.searchsorted(codes, np.arange(len(qids) + 1))
        return cls([str(qid) for qid in qids], starts, docnos.tolist(), scores)

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """Each query with its documents."""
        bounds = self.starts.tolist()
        for qid, start, end in zip(self.qids, bounds[:-1], bounds[1:], strict=True):
            yield qid, self.docnos[start:end]

    def as_dict(self) -> dict[str, dict[str, float]]:
        """`{qid: {docno: score}}`; of a document that is there twice the last score counts, as in PyTerrier."""
        scores, bounds = self.scores.tolist(), self.starts.tolist()
        return {
            qid: dict(zip(self.docnos[start:end], scores[start:end], strict=True))
            for qid, start, end in zip(self.qids, bounds[:-1], bounds[1:], strict=True)
        }


def as_strings(column: pd.Series) -> pd.Series:
    """The column as strings: PyTerrier's qids and docnos, which files and users give as integers too."""
    return column if pd.api.types.is_string_dtype(column) else column.astype(str)


def write_run(frame: pd.DataFrame, path: Path, name: str) -> None:
    """Writes a run in TREC format, gzipped where the path ends in `.gz`; a half-written file is never left.

    Args:
        frame: `qid, docno, score`; ranks are made from the scores.
        path: of the file.
        name: of the system, for the last column; white space in it becomes `_`.

    Raises:
        ValueError: if a qid or docno contains white space, which the format cannot hold.
    """
    columns = {column: as_strings(frame[column]).tolist() for column in ("qid", "docno")}
    for column, values in columns.items():
        broken = next((value for value in values if not value or len(value.split()) != 1), None)
        if broken is not None:
            raise ValueError(f"column {column} holds {broken!r}: TREC runs cannot hold empty names or white space")
    ranked = pt.model.add_ranks(pd.DataFrame({**columns, "score": frame["score"].tolist()}))
    ranked = ranked.assign(Q0="Q0", system="_".join(name.split()) or "run")[TREC_COLUMNS]
    # No modification time in the header: equal runs are equal files.
    compression: Any = {"method": "gzip", "compresslevel": 1, "mtime": 0} if path.suffix == ".gz" else None
    with replacing(path) as file:
        ranked.to_csv(
            file, sep=" ", header=False, index=False, quoting=csv.QUOTE_NONE, compression=compression, na_rep="nan"
        )


def read_run(path: str | Path) -> pd.DataFrame:
    """Reads a run in TREC format (`qid Q0 docno rank score system`), plain or compressed.

    Returns:
        `qid, docno, score`, with every score as it was written.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no TREC run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"run file {str(path)!r} does not exist")
    try:
        # Names such as "NA" and "null" are names, and quotation marks mean nothing in this format.
        frame = pd.read_csv(
            path,
            sep=r"\s+",
            names=TREC_COLUMNS,
            usecols=["qid", "docno", "score"],
            dtype={"qid": str, "docno": str},
            keep_default_na=False,
            quoting=csv.QUOTE_NONE,
            **EXACT_FLOATS,
        )
        return frame.astype({"score": "float64"})
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no TREC run (qid Q0 docno rank score system): {error}") from None
