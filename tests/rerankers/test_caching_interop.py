"""Models behind the caches of pyterrier-caching: what works, and what those caches do not see."""

from __future__ import annotations

import sqlite3

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import scorer as scorer_module

from ..support.systems import SLIDING, make

caching = pytest.importorskip("pyterrier_caching")

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
KINDS = ("MaxP", "PARADE-transformer", "CEDR-knrm", "LongP", "LateIR", "BiEncoder-max")
QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """The number of rows of each call of a cross-encoder's scorer."""
    counts = []
    score = scorer_module.LongDocScorer.score

    def spy(self, queries, texts, **options):
        counts.append(len(texts))
        return score(self, queries, texts, **options)

    monkeypatch.setattr(scorer_module.LongDocScorer, "score", spy)
    return counts


def fitted(model: ld.LongDocReranker, results: pd.DataFrame) -> ld.LongDocReranker:
    """The model after a training that changes its scores visibly."""
    model.training = ld.TrainingArgs(learning_rates={"": 1e-2})
    return model.fit(results, QRELS)


# What works.


@pytest.mark.parametrize("name", KINDS)
def test_scores_and_ranks_are_those_of_the_model(name, cross_encoder, path, results):
    model = make(name, cross_encoder)
    expected = model(results)
    with caching.ScorerCache(path, model) as cache:
        assert pt.inspect.transformer_outputs(cache, list(results.columns)) == list(expected.columns)
        first = cache(results)
        pd.testing.assert_frame_equal(first, expected)
        pd.testing.assert_frame_equal(cache(results), first, check_exact=True)


def test_second_run_does_not_score(cross_encoder, path, results, rows):
    with caching.ScorerCache(path, make("MaxP", cross_encoder)) as cache:
        first = cache(results.iloc[:3])
        again = cache(results.iloc[:3])
        pd.testing.assert_frame_equal(again, first)
        assert rows == [3]
        cache(results)
        assert rows == [3, 2]


def test_a_full_cache_needs_no_weights(cross_encoder, path, results):
    with caching.ScorerCache(path, make("MaxP", cross_encoder)) as cache:
        expected = cache(results)
    with caching.ScorerCache(path, make("MaxP", "no/such-model")) as cache:
        pd.testing.assert_frame_equal(cache(results), expected)


def test_a_missing_text_column_is_named(cross_encoder, path, results):
    with (
        caching.ScorerCache(path, make("MaxP", cross_encoder)) as cache,
        pytest.raises(pt.validate.InputValidationError, match="text"),
    ):
        cache(results.drop(columns="text"))


def test_text_loader_behind_the_cache(cross_encoder, path, results):
    texts = results.drop_duplicates("docno").set_index("docno")["text"]
    loads = []

    def load(frame):
        loads.append(len(frame))
        return frame.assign(text=frame["docno"].map(texts))

    loader = pt.apply.generic(load, required_columns=["docno"])
    without = results.drop(columns="text")
    expected = make("MaxP", cross_encoder)(results)["score"]
    with caching.ScorerCache(path, make("MaxP", cross_encoder, text_loader=loader)) as cache:
        for _ in range(2):
            np.testing.assert_allclose(cache(without)["score"], expected, rtol=1e-6)
    assert sum(loads) == len(results)


def test_dense_cache_keeps_single_precision(cross_encoder, path, results):
    model = make("MaxP", cross_encoder)
    expected = model(results)["score"]
    cache = caching.DenseScorerCache(path, model)
    cache.build([{"docno": docno} for docno in results["docno"].unique()])
    with cache:
        np.testing.assert_array_equal(cache(results)["score"], expected)
        np.testing.assert_array_equal(cache(results)["score"], expected.astype("float32").astype("float64"))


# What those caches do not see: the key is the query and the docno, nothing else.


def test_training_leaves_old_scores_behind(cross_encoder, path, tmp_path, results):
    model = make("MaxP", cross_encoder)
    own = make("MaxP", cross_encoder, score_cache=tmp_path / "scores.sqlite")
    with caching.ScorerCache(path, model) as cache:
        before, own_before = cache(results)["score"], own(results)["score"]
        fitted(model, results)
        fitted(own, results)
        after = model(results)["score"]
        assert not np.allclose(after, before)
        np.testing.assert_array_equal(cache(results)["score"], before)
    np.testing.assert_allclose(own_before, before, rtol=1e-6)
    np.testing.assert_allclose(own(results)["score"], after, rtol=1e-5)


@pytest.mark.parametrize("change", [{"window_size": 12}, {"max_doc_len": 30}], ids=["window_size", "max_doc_len"])
def test_settings_leave_old_scores_behind(change, cross_encoder, path, results):
    model = make("MaxP", cross_encoder)
    with caching.ScorerCache(path, model) as cache:
        before = cache(results)["score"]
        for name, value in change.items():
            setattr(model, name, value)
        assert not np.allclose(model(results)["score"], before)
        np.testing.assert_array_equal(cache(results)["score"], before)


def test_another_text_of_the_docno_leaves_old_scores_behind(cross_encoder, path, tmp_path, results):
    changed = results.assign(text="snow on the mountain")
    expected = make("MaxP", cross_encoder)(changed)["score"]
    with caching.ScorerCache(path, make("MaxP", cross_encoder)) as cache:
        before = cache(results)["score"]
        np.testing.assert_array_equal(cache(changed)["score"], before)
    assert not np.allclose(before, expected)
    own = make("MaxP", cross_encoder, score_cache=tmp_path / "scores.sqlite")
    own(results)
    np.testing.assert_allclose(own(changed)["score"], expected, rtol=1e-5)


def test_first_stage_scores_that_birch_mixes_in_are_not_seen(cross_encoder, path, tmp_path, results):
    changed = results.assign(score=results["score"] * 10)
    expected = make("Birch", cross_encoder)(changed)["score"]
    with caching.ScorerCache(path, make("Birch", cross_encoder)) as cache:
        before = cache(results)["score"]
        np.testing.assert_array_equal(cache(changed)["score"], before)
    assert not np.allclose(before, expected)
    own = make("Birch", cross_encoder, score_cache=tmp_path / "scores.sqlite")
    own(results)
    np.testing.assert_allclose(own(changed)["score"], expected, rtol=1e-5)


def test_explanations_are_lost(cross_encoder, path, results):
    model = make("MaxP", cross_encoder, explain=True)
    with caching.ScorerCache(path, model) as cache:
        assert "window_scores" in model(results)
        assert "window_scores" not in cache(results)


def test_one_query_under_two_ids_is_refused(cross_encoder, path, tmp_path, results):
    """The same query and document in two rows that are both new."""
    twice = pd.concat([results, results.assign(qid=results["qid"] + "b")], ignore_index=True)
    with (
        caching.ScorerCache(path, make("MaxP", cross_encoder)) as cache,
        pytest.raises(sqlite3.IntegrityError, match="UNIQUE"),
    ):
        cache(twice)
    own = ld.MaxP(cross_encoder, score_cache=tmp_path / "scores.sqlite", **SLIDING)(twice)
    np.testing.assert_allclose(own["score"], make("MaxP", cross_encoder)(twice)["score"], rtol=1e-5)


def test_key_value_cache_sees_the_text_but_leaves_old_ranks(cross_encoder, path, results):
    model = make("MaxP", cross_encoder)
    frame = results[results["text"].notna()].assign(rank=[7, 8, 7, 8])
    changed = frame.assign(text=frame["text"] + " snow on the mountain")
    with caching.KeyValueCache(path, model, key=["query", "text"], value="score") as cache:
        np.testing.assert_array_equal(cache(frame)["score"], model(frame)["score"])
        out = cache(changed)
        np.testing.assert_array_equal(out["score"], model(changed)["score"])
    assert out["rank"].tolist() == [7, 8, 7, 8]
    assert sorted(model(changed)["rank"]) == [0, 0, 1, 1]
