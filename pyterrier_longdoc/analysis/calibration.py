"""Thresholds for `first_above`, from a few known positions or from documents that are not relevant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, labels_of
from .estimators import FirstAbove, JudgedDocument
from .positions import RelevantPositions


def calibrated_on_positions(positions: RelevantPositions, gold: pd.DataFrame) -> FirstAbove:
    """Return the threshold with which `first_above` is nearest to known positions.

    It has the smallest mean distance from them. A document without a position counts as if it had one in its middle, so
    that a threshold gains nothing by finding few positions, or positions at random.

    Args:
        positions: of `relevant_positions` with a judge and any estimator, for documents with a known position and
            perhaps others. Estimates for the same documents are somewhat too good: keep some for a test.
        gold: `qid, docno, first_token` of some of these documents, a dozen or more; in the same tokens.
    """
    check_columns(gold, ("qid", "docno", "first_token"), "gold")
    index = [as_strings(gold["qid"]), as_strings(gold["docno"])]
    gold_tokens = pd.Series(gold["first_token"].to_numpy(dtype="float64"), index).groupby(level=[0, 1]).min()
    firsts = gold_tokens.reindex(pd.MultiIndex.from_frame(positions.frame[["qid", "docno"]])).to_numpy()
    pairs = list(zip(_documents(positions), firsts, strict=True))
    mask = [not document.reason and not np.isnan(first) for document, first in pairs]
    documents = [document for (document, _), used in zip(pairs, mask, strict=True) if used]
    if not documents:
        raise ValueError("positions and gold have no judged document in common: there is nothing to calibrate on")
    truth, middles = firsts[mask], np.array([document.length or 0 for document in documents]) / 2

    def distance(threshold: float) -> float:
        estimates = np.array([document.first_token(FirstAbove(threshold)) for document in documents])
        return float(np.abs(np.where(np.isnan(estimates), middles, estimates) - truth).mean())

    return FirstAbove(min(_candidates(documents), key=distance))


def calibrated_on_nonrelevant(positions: RelevantPositions, share: float = 0.1) -> FirstAbove:
    """Return the threshold above which only a small share of documents that are not relevant has any chunk.

    Args:
        positions: of `relevant_positions` with a judge and any estimator, for documents that are not relevant, as
            `nonrelevant` gives them; as long as the relevant ones, since more chunks have more chances to be above.
        share: of documents with a chunk above. Smaller ones find fewer positions, and fewer wrong ones.

    """
    numbers = [document.numbers for document in _documents(positions) if not np.isnan(document.numbers).all()]
    return FirstAbove(float(np.quantile(list(map(np.nanmax, numbers)), 1 - share)))


def nonrelevant(run: pd.DataFrame, qrels: pd.DataFrame, *, relevant_from: int = 1) -> pd.DataFrame:
    """Return the documents of a run that no judgement calls relevant, as qrels with the label 0.

    `relevant_positions(topics, nonrelevant(run, qrels), corpus, judge=..., relevant_from=0)` judges their chunks.
    They include documents without a judgement. Some of these may be relevant, which makes a threshold too high rather
    than too low.

    Args:
        run: `qid, docno`.
        qrels: `qid, docno, label`.
        relevant_from: smallest label that is relevant.
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
        raise ValueError("positions must have numbers of all chunks: give relevant_positions judge= and best_chunk")
    return positions.judged


def _candidates(documents: Sequence[JudgedDocument]) -> list[float]:
    """Return all thresholds with different effects: the middles between numbers that no earlier chunk reaches."""
    records = [np.fmax.accumulate(document.numbers) for document in documents]
    levels = np.unique(np.concatenate(records))
    levels = levels[~np.isnan(levels)]
    return [float(levels[0]) - 1.0, *((levels[:-1] + levels[1:]) / 2).tolist()] if len(levels) else [0.0]
