"""The expected calibration error: known values, its interval, and its picture."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit

import pyterrier_longdoc as ld

from ..rerankers.test_calibrated import SCORES, judged


def frame(p, y, qid):
    results = pd.DataFrame({"qid": qid, "docno": range(len(p)), "probability": p})
    return results, results[["qid", "docno"]].assign(label=y)


def test_the_error_is_the_mean_gap_between_probability_and_relevance():
    found = ld.reliability(*frame([0.05, 0.15, 0.15, 0.95, 1.0], [0, 1, 0, 1, 1], ["1", "1", "1", "2", "2"]))
    # Three bins: |0.05 - 0|, |0.30 - 1| and |1.95 - 2|, of five documents.
    assert found.error == pytest.approx((0.05 + 0.7 + 0.05) / 5)
    assert found.table["documents"].tolist() == [1, 2, 2]
    np.testing.assert_allclose(found.table[["probability", "relevant"]], [[0.05, 0], [0.15, 0.5], [0.975, 1]])
    assert found.low <= found.error <= found.high


def test_a_single_query_has_an_interval_of_zero_width():
    one = ld.reliability(*frame([0.05, 0.15, 0.15, 0.95, 1.0], [0, 1, 0, 1, 1], ["1"] * 5), bins=1)
    assert (one.error, one.low, one.high) == pytest.approx((0.7 / 5,) * 3)


def test_calibration_lowers_the_error_on_other_queries():
    results, qrels = judged(300, slope=0.5)
    fresh, labels = judged(300, slope=0.5, seed=1)
    before = ld.reliability(fresh.assign(probability=expit(fresh["score"])), labels)
    after = ld.reliability(ld.Calibrated(SCORES).fit(results, qrels)(fresh), labels)
    assert before.low > 0.05
    assert after.high < 0.04
    perfect = ld.reliability(fresh.assign(probability=fresh["truth"]), labels)
    assert perfect.error < 0.02
    worse = expit(logit(fresh["truth"]) * 3)
    assert ld.reliability(fresh.assign(probability=worse), labels).error > perfect.high


def test_the_interval_resamples_queries_not_documents():
    rng = np.random.default_rng(0)
    y = rng.random(40) < 0.5
    apart = ld.reliability(*frame(np.full(40, 0.5), y, range(40)))
    together = ld.reliability(*frame(np.full(40, 0.5), np.sort(y), np.repeat(range(4), 10)))
    assert together.error == pytest.approx(apart.error)
    assert together.high - together.low > apart.high - apart.low


RESULTS, QRELS = frame([0.2, 0.4, 0.6], [1, 0, 1], ["1", "1", "2"])


def test_unjudged_documents_count_as_not_relevant_unless_judged_only():
    results, qrels = RESULTS, QRELS
    assert ld.reliability(results, qrels.head(1)).error == pytest.approx((0.8 + 0.4) / 2)
    assert ld.reliability(results, qrels.head(1), judged_only=True).error == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("results", "qrels", "bins", "name"),
    [
        (RESULTS.drop(columns="probability"), QRELS, 10, "probability"),
        (RESULTS.assign(probability=2.0), QRELS, 10, "probability"),
        (RESULTS.assign(probability=np.nan), QRELS, 10, "probability"),
        (RESULTS, QRELS.assign(qid="9"), 10, "qrels"),
        (RESULTS, QRELS, 0, "bins=0"),
    ],
)
def test_wrong_input_is_refused_by_name(results, qrels, bins, name):
    with pytest.raises(ValueError, match=name):
        ld.reliability(results, qrels, bins=bins)


def test_the_plot_shows_relevance_by_probability_and_the_diagonal():
    pytest.importorskip("matplotlib")
    ax = ld.reliability(*frame([0.05, 0.15, 0.95], [0, 1, 1], ["1", "1", "2"])).plot()
    assert [line.get_xdata().tolist() for line in ax.get_lines()] == [[0, 1], [0.05, 0.15, 0.95]]
    assert ax.get_xlabel() == "probability"
    assert "error 0." in ax.get_legend().get_texts()[1].get_text()
