"""ZScore: known values per query, nothing of the frame lost, and sums with rerankers."""

from __future__ import annotations

import unittest

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld

from ..support.systems import QUIET, make

pytestmark = QUIET

RUN = pd.DataFrame(
    [("1", "a", 3.0), ("2", "a", -7.0), ("1", "b", 1.0), ("2", "c", -7.0), ("1", "c", 5.0), ("3", "b", 42.0)],
    columns=["qid", "docno", "score"],
    index=[5, 3, 3, 0, 9, 1],
).assign(url="somewhere", rank=17)
Z = np.array([0.0, 0.0, -np.sqrt(1.5), 0.0, np.sqrt(1.5), 0.0])
"""Its z-scores: query 2 has equal scores, query 3 one candidate."""


def test_scores_have_mean_0_and_deviation_1_in_each_query():
    np.testing.assert_allclose(ld.ZScore()(RUN)["score"], Z, atol=1e-12)


def test_rows_and_other_columns_are_kept_with_ranks_of_the_new_scores():
    before, out = RUN.copy(deep=True), ld.ZScore()(RUN)
    columns = ["qid", "docno", "url"]
    pd.testing.assert_frame_equal(out[columns], RUN[columns])
    assert out["rank"].tolist() == [1, 0, 2, 1, 0, 0]
    pd.testing.assert_frame_equal(RUN, before)


def test_equal_scores_give_exactly_0_whatever_their_mean_rounds_to():
    frame = pd.DataFrame({"qid": "1", "docno": list("abc"), "score": 0.1})
    assert frame["score"].std(ddof=0) > 0
    assert ld.ZScore()(frame)["score"].tolist() == [0, 0, 0]


def test_scores_that_differ_by_rounding_alone_are_equal():
    frame = pd.DataFrame({"qid": "1", "docno": list("abc"), "score": [0.1 + 0.2, 0.3, 0.1 + 0.2]})
    assert frame["score"].nunique() == 2
    assert ld.ZScore()(frame)["score"].tolist() == [0, 0, 0]


def test_the_largest_scores_do_not_overflow():
    frame = pd.DataFrame({"qid": "1", "docno": list("ab"), "score": [-1e308, 1e308]})
    assert ld.ZScore()(frame)["score"].tolist() == [-1, 1]


def test_unit_and_origin_of_scores_do_not_matter():
    for scale in [1e-200, 1e-3, 1e9]:
        shifted = RUN.assign(score=scale * (RUN["score"] + 3))
        np.testing.assert_allclose(ld.ZScore()(shifted)["score"], Z, atol=1e-9)


def test_scores_of_a_first_stage_in_single_precision_and_numbers_as_qids():
    out = ld.ZScore()(RUN.astype({"score": "float32", "rank": "int32", "qid": "int64"}))
    np.testing.assert_allclose(out["score"], Z, atol=1e-6)
    assert out["score"].dtype == "float64"
    assert out["qid"].dtype == "int64"


def test_an_empty_frame_has_the_same_columns():
    out = ld.ZScore()(RUN.iloc[:0])
    assert set(out.columns) == set(RUN.columns)
    assert out["score"].dtype == "float64"


def test_a_missing_score_is_refused_with_its_document():
    with pytest.raises(ValueError, match=r"'score' .*docno 'c'"):
        ld.ZScore()(RUN.assign(score=[1.0, 2.0, 3.0, 4.0, np.nan, 5.0]))


def test_the_test_case_of_pyterrier_passes():
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(pt.testing.transformer_test_class(ld.ZScore)).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


@pytest.fixture
def explained():
    """Two models that explain their scores."""
    return make("MaxP", explain=True), make("AvgP", explain=True)


def test_a_sum_runs_the_first_stage_once_and_adds_z_scores(results, explained):
    calls = []
    first = pt.apply.generic(lambda topics: calls.append(topics) or results)
    (model, _), z = explained, ld.ZScore()
    out = (first >> (z + (model >> z)))(results[["qid", "query"]].drop_duplicates())
    assert len(calls) == 1
    expected = results.assign(score=z(results)["score"] + z(model(results))["score"])
    by_pair = [frame.set_index(["qid", "docno"])["score"].sort_index() for frame in (out, expected)]
    pd.testing.assert_series_equal(*by_pair)


def test_evidence_of_a_sum_follows_the_first_explained_model(results, explained):
    (model, other), z = explained, ld.ZScore()
    out = (z + (model >> z) + (other >> z))(results).set_index(["qid", "docno"])["window_scores"].sort_index()
    alone = model(results).set_index(["qid", "docno"])["window_scores"].sort_index()
    assert out.map(list).tolist() == alone.map(list).tolist()
    assert alone.map(len).tolist() != other(results)["window_scores"].map(len).tolist()
