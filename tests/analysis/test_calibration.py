"""Thresholds that are taken from data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pyterrier_longdoc.analysis import (
    RelevantPositions,
    best_chunk,
    calibrated_on_nonrelevant,
    calibrated_on_positions,
    first_above,
    nonrelevant,
)
from pyterrier_longdoc.analysis.estimators import JudgedDocument

CHUNK, CHUNKS = 100, 40


def positions(numbers: np.ndarray) -> RelevantPositions:
    """Of documents with `(D, C)` numbers of their chunks."""
    spans = [(CHUNK * i, CHUNK * (i + 1)) for i in range(numbers.shape[1])]
    length = CHUNK * numbers.shape[1]
    documents = [JudgedDocument(length, [(s, s) for s in spans], len(spans), own) for own in numbers]
    frame = pd.DataFrame({"qid": "q", "docno": [f"d{i}" for i in range(len(numbers))], "label": 1})
    return RelevantPositions(frame, documents)


def simulated(documents: int, signal: float, seed: int = 0) -> tuple[RelevantPositions, pd.DataFrame]:
    """Judged documents, one chunk of each better by `signal` standard deviations, and its place."""
    rng = np.random.default_rng(seed)
    relevant = rng.integers(CHUNKS, size=documents)
    numbers = rng.normal(size=(documents, CHUNKS))
    numbers[np.arange(documents), relevant] += signal
    found = positions(numbers)
    return found, found.frame[["qid", "docno"]].assign(first_token=CHUNK * relevant)


def first_tokens(found: RelevantPositions, estimator) -> np.ndarray:
    return np.array([document.first_token(estimator) for document in found.judged])


def test_a_threshold_from_twelve_known_positions_has_no_early_bias():
    found, gold = simulated(200, signal=6)
    threshold = calibrated_on_positions(found, gold.head(12))
    truth = gold["first_token"][12:]
    low, calibrated, best = (first_tokens(found, each)[12:] for each in (first_above(1), threshold, best_chunk))
    assert np.nanmedian(low) < 0.5 * truth.median()
    assert abs(np.nanmedian(calibrated) - truth.median()) < 0.1 * truth.median()
    assert abs(np.median(best) - truth.median()) < 0.1 * truth.median()


def test_a_threshold_from_nonrelevant_documents_has_the_share_of_false_alarms():
    rng = np.random.default_rng(1)
    others = positions(rng.normal(size=(400, CHUNKS)))
    threshold = calibrated_on_nonrelevant(others, share=0.1)
    assert np.isfinite(first_tokens(others, threshold)).mean() == pytest.approx(0.1, abs=0.005)
    assert threshold.threshold > calibrated_on_nonrelevant(others, share=0.5).threshold
    found, gold = simulated(200, signal=6)
    estimate = first_tokens(found, threshold)
    assert abs(np.nanmedian(estimate) - gold["first_token"].median()) < 0.1 * gold["first_token"].median()


def test_the_threshold_comes_nearest_to_the_known_positions():
    numbers = np.array([[0.0, 2.0, 5.0, 0.0], [1.0, 0.0, 4.0, 0.0], [0.0, 9.0, 0.0, 0.0]])
    found = positions(numbers)
    gold = found.frame[["qid", "docno"]].assign(first_token=[200, 200, 100])
    threshold = calibrated_on_positions(found, gold)
    assert 2 <= threshold.threshold < 4
    assert (first_tokens(found, threshold) == gold["first_token"]).all()


def test_nonrelevant_documents_are_those_below_relevant_from_or_unjudged():
    run = pd.DataFrame({"qid": [1, 1, 2, 2], "docno": ["a", "b", "a", "c"], "score": 1.0})
    qrels = pd.DataFrame({"qid": ["1", "1", "2"], "docno": ["a", "b", "c"], "label": [1, 0, 2]})
    assert nonrelevant(run, qrels).to_numpy().tolist() == [["1", "b", 0], ["2", "a", 0]]
    assert nonrelevant(run, qrels, relevant_from=2)["docno"].tolist() == ["a", "b", "a"]


def test_calibration_needs_scores_of_all_chunks_and_documents_with_known_positions():
    found, gold = simulated(3, signal=6)
    stopped = JudgedDocument(200, found.judged[0].chunks, CHUNKS, np.array([1.0]))
    for without in (RelevantPositions(found.frame), RelevantPositions(found.frame.head(1), [stopped])):
        with pytest.raises(ValueError, match="best_chunk"):
            calibrated_on_positions(without, gold)
    with pytest.raises(ValueError, match="all chunks"):
        calibrated_on_nonrelevant(RelevantPositions(found.frame.head(0), []))
    with pytest.raises(ValueError, match="in common"):
        calibrated_on_positions(found, gold.assign(qid="other"))
