"""A number for each query, by which `Comparison.by` groups queries."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ..common.frames import as_strings, check_columns, labels_of
from .positions import RelevantPositions


def position_by_query(positions: RelevantPositions | pd.DataFrame) -> dict[str, float]:
    """Return where the relevant text of each query begins, in tokens, averaged over its relevant documents.

    Args:
        positions: the result of `relevant_positions`, or a frame with `qid` and `first_token`, such as the gold
            positions of a collection. Rows of unknown position are ignored.

    Example:
        `results.by(ld.position_by_query(dataset.gold), [0, 256, 512], label="tokens before the answer").plot()`
    """
    frame = positions.matched if isinstance(positions, RelevantPositions) else positions
    check_columns(frame, ("qid", "first_token"), "positions")
    return _means(frame["qid"], frame["first_token"])


def length_by_query(qrels: pd.DataFrame, lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the mean length of the relevant documents of each query.

    Args:
        qrels: `qid, docno, label`; labels above 0 are relevant.
        lengths: the length of each document by docno, e.g. in tokens. Relevant documents without a length are ignored.

    Example:
        `results.by(ld.length_by_query(qrels, lengths), [0, 512, 1024, 2048]).table`
    """
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    relevant = qrels[labels_of(qrels, "qrels") > 0].drop_duplicates(["qid", "docno"])
    return _means(relevant["qid"], as_strings(relevant["docno"]).map(dict(lengths)))


def _means(qids: pd.Series, values: pd.Series) -> dict[str, float]:
    rows = pd.DataFrame({"qid": as_strings(qids).to_numpy(), "value": values.to_numpy()}).dropna()
    return rows.astype({"value": "float64"}).groupby("qid", sort=False)["value"].mean().to_dict()
