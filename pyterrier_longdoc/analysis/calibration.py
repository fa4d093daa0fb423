"""Calibrate the threshold of `first_above` on a few known positions or on non-relevant documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, labels_of
from .estimators import FirstAbove, JudgedDocument
from .positions import RelevantPositions


def calibrated_on_positions(positions: RelevantPositions, gold: pd.DataFrame) -> FirstAbove:
    """Choose the threshold with which `first_above` has the smallest mean distance from known positions.

    A document for which no position is found counts as one found in the middle, so that finding few or random positions
    is no advantage.

    Args:
        positions: the result of `relevant_positions` with a judge and any estimator. Only documents with a known
            position are used. Their estimates will be somewhat too good, so keep some documents for a test.
        gold: `qid, docno, first_token` of a dozen or more of these documents, counted in the same tokens.
    """
    check_columns(gold, ("qid", "docno", "first_token"), "gold")
    index = [as_strings(gold["qid"]), as_strings(gold["docno"])]
    gold_tokens = pd.Series(gold["first_token"].to_numpy(dtype="float64"), index).groupby(level=[0, 1]).min()
    firsts = gold_tokens.reindex(pd.MultiIndex.from_frame(positions.frame[["qid", "docno"]])).to_numpy()
    pairs = list(zip(_documents(positions), firsts, strict=True))
    mask = [not document.reason and not np.isnan(first) for document, first in pairs]
    documents = [document for (document, _), used in zip(pairs, mask, strict=True) if used]
    if not documents:
        raise ValueError("positions and gold have no judged document in common: use gold of the judged documents")
    truth, middles = firsts[mask], np.array([document.length or 0 for document in documents]) / 2

    def distance(threshold: float) -> float:
        estimates = np.array([document.first_token(FirstAbove(threshold)) for document in documents])
        return float(np.abs(np.where(np.isnan(estimates), middles, estimates) - truth).mean())

    # One threshold for each distinct outcome: midpoints between the running maxima of the documents.
    levels = np.unique(np.concatenate([np.fmax.accumulate(document.numbers) for document in documents]))
    levels = levels[~np.isnan(levels)]
    midpoints = (levels[:-1] + levels[1:]) / 2
    return FirstAbove(float(min([levels[0] - 1.0, *midpoints] if len(levels) else [0.0], key=distance)))


def calibrated_on_nonrelevant(positions: RelevantPositions, share: float = 0.1) -> FirstAbove:
    """Choose the threshold that only a small share of non-relevant documents exceeds with any of their chunks.

    Args:
        positions: the result of `relevant_positions` with a judge and any estimator, for non-relevant documents (see
            `nonrelevant`). They should be as long as the relevant ones, because a chunk of a longer document is more
            likely to exceed the threshold by chance.
        share: the share of documents with a chunk above the threshold. A smaller share finds fewer positions, and fewer
            wrong ones.
    """
    numbers = [document.numbers for document in _documents(positions) if not np.isnan(document.numbers).all()]
    return FirstAbove(float(np.quantile(list(map(np.nanmax, numbers)), 1 - share)))


def nonrelevant(run: pd.DataFrame, qrels: pd.DataFrame, *, relevant_from: int = 1) -> pd.DataFrame:
    """Return the documents of a run that are not judged relevant, as qrels with the label 0.

    `relevant_positions(topics, nonrelevant(run, qrels), corpus, judge=..., relevant_from=0)` judges their chunks.
    Unjudged documents are included. If some of them are relevant, a threshold calibrated on them is too high rather
    than too low.

    Args:
        run: `qid, docno`.
        qrels: `qid, docno, label`.
        relevant_from: the smallest label that counts as relevant.
    """
    check_columns(run, ("qid", "docno"), "run")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    relevant, pairs = (
        pd.DataFrame({name: as_strings(frame[name]) for name in ("qid", "docno")})
        for frame in (qrels[labels_of(qrels, "qrels") >= relevant_from], run)
    )
    merged = pairs.merge(relevant.drop_duplicates(), how="left", indicator=True)
    return merged.loc[merged["_merge"] == "left_only", ["qid", "docno"]].assign(label=0).reset_index(drop=True)


def _documents(positions: RelevantPositions) -> Sequence[JudgedDocument]:
    if not positions.judged or not all(document.complete for document in positions.judged):
        raise ValueError("positions must have grades of all chunks: call relevant_positions with judge= and best_chunk")
    return positions.judged
