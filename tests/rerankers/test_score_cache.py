"""Cached scores: read instead of scored, and never after a change of what they depend on."""

from __future__ import annotations

import dataclasses
import sqlite3

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import scorer as scorer_module
from pyterrier_longdoc.rerankers.score_cache import ScoreCache, pair_key

from ..support import tiny
from ..support.systems import CROSS_ENCODERS, SLIDING, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})


@pytest.fixture
def results() -> pd.DataFrame:
    """Six rows, two of them of the same query and text."""
    frame = tiny.results()
    return pd.concat([frame, frame.iloc[[0]].assign(docno="d9", rank=3)], ignore_index=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "scores.sqlite"


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The number of pairs of each pass through an encoder."""
    counts = []
    read = scorer_module.LongDocScorer.read

    def spy(self, queries, query_ids, texts):
        counts.append(len(texts))
        return read(self, queries, query_ids, texts)

    monkeypatch.setattr(scorer_module.LongDocScorer, "read", spy)
    return counts


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_second_run_reads(name, cross_encoder, path, results, encoded):
    model = make(name, cross_encoder, score_cache=path)
    plain = make(name, cross_encoder)
    expected, coverage = plain(results), plain.coverage
    encoded.clear()
    for _ in range(2):
        out = model(results)
        np.testing.assert_allclose(out["score"], expected["score"], rtol=1e-5)
        assert model.coverage == coverage
    assert sum(encoded) == 5
    assert len(ScoreCache(path)) == 5
    again = make(name, cross_encoder, score_cache=str(path))
    pd.testing.assert_frame_equal(again(results), out)
    assert again.coverage == coverage
    assert sum(encoded) == 5


def test_only_new_pairs_are_scored(cross_encoder, path, results, encoded):
    model = make("MaxP", cross_encoder, score_cache=path)
    model(results.iloc[:2])
    assert sum(encoded) == 2
    out = model(results)
    assert sum(encoded) == 5
    np.testing.assert_allclose(out["score"], make("MaxP", cross_encoder)(results)["score"], rtol=1e-5)


CHANGES = [
    {"window_size": 12},
    {"stride": 9},
    {"max_windows": 2},
    {"max_doc_len": 30},
    {"max_query_len": 1},
    {"pad_query": True},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_settings_are_part_of_the_key(change, cross_encoder, path, results):
    make("MaxP", cross_encoder, score_cache=path)(results)
    expected = make("MaxP", cross_encoder, **change)(results)["score"]
    changed = make("MaxP", cross_encoder, score_cache=path, **change)
    np.testing.assert_allclose(changed(results)["score"], expected, rtol=1e-5)
    assert len(ScoreCache(path)) == 10


def test_options_without_weights_are_part_of_the_key(cross_encoder, path, results):
    make("KMaxP", cross_encoder, k=1, score_cache=path)(results)
    out = make("KMaxP", cross_encoder, k=2, score_cache=path)(results)
    np.testing.assert_allclose(out["score"], make("KMaxP", cross_encoder, k=2)(results)["score"], rtol=1e-5)


def test_weights_are_part_of_the_key(cross_encoder, path, results):
    model = make("MaxP", cross_encoder, score_cache=path, training=ld.TrainingArgs(learning_rates={"": 1e-2}))
    before = model(results)["score"]
    model.fit(results, QRELS)
    after = model(results)["score"]
    model.score_cache = None
    np.testing.assert_allclose(after, model(results)["score"], rtol=1e-5)
    assert not np.allclose(before, after)
    with torch.no_grad():
        model.load_scorer().head.final.bias += 1.0
    model.score_cache = path
    np.testing.assert_allclose(model(results)["score"], after + 1.0, rtol=1e-4)


def test_models_do_not_meet(cross_encoder, path, results, tmp_path):
    other = tiny.checkpoint(tmp_path / "other", seed=1)
    for backbone in (cross_encoder, other):
        for name in ("MaxP", "SumP", "FirstP"):
            out = make(name, backbone, score_cache=path)(results)
            np.testing.assert_allclose(out["score"], make(name, backbone)(results)["score"], rtol=1e-5)


def test_text_and_query_do_not_run_together():
    keys = {pair_key(b"f", query, text) for query, text in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""))}
    assert len(keys) == 4
    assert pair_key(b"f", "a", "b") == pair_key(b"f", "a", "b") != pair_key(b"g", "a", "b")


def test_an_interrupted_run_goes_on(cross_encoder, path, results, encoded, monkeypatch):
    monkeypatch.setattr(scorer_module, "BLOCK_PAIRS", 1)
    model = make("MaxP", cross_encoder, score_cache=path)
    head = model.load_scorer().head
    forward, calls = head.forward, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(head, "forward", stops)
    with pytest.raises(KeyboardInterrupt):
        model(results)
    assert len(ScoreCache(path)) == 2
    encoded.clear()
    out = model(results)
    assert sum(encoded) == 3
    np.testing.assert_allclose(out["score"], make("MaxP", cross_encoder)(results)["score"], rtol=1e-5)


def test_scores_that_are_not_finite_are_not_kept(cross_encoder, path, results):
    model = make("MaxP", cross_encoder, score_cache=path)
    with torch.no_grad():
        model.load_scorer().head.final.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        model(results)
    assert len(ScoreCache(path)) == 0


def test_progress_counts_cached_rows(cross_encoder, path, results, monkeypatch):
    model = make("MaxP", cross_encoder, score_cache=path)
    model(results.iloc[:2])
    steps = []
    model.score_pairs(results["query"].tolist(), results["text"].fillna("").tolist(), steps.append)
    assert sum(steps) == len(results)


def test_explanations_do_not_come_from_the_cache(cross_encoder, path, results):
    model = make("MaxP", cross_encoder, score_cache=path)
    model(results)
    model.explain = True
    assert all(len(scores) >= 1 for scores in model(results)["window_scores"])


def test_files_that_are_no_cache(cross_encoder, path, results, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like one" * 50)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE scores (name TEXT)")
    for place in (tmp_path, text, other):
        with pytest.raises(ValueError, match=r"cannot be used .*give a file that this package made"):
            make("MaxP", cross_encoder, score_cache=place)(results)
    assert text.read_text().startswith("not a database")


def test_cache_is_no_part_of_a_saved_model(cross_encoder, path, results, tmp_path):
    model = ld.MaxP(cross_encoder, score_cache=path, **SLIDING)
    model(results)
    model.save(tmp_path / "saved")
    loaded = ld.MaxP.load(tmp_path / "saved")
    assert loaded.score_cache is None
    assert "score_cache" in {f.name for f in dataclasses.fields(loaded)}
    assert str(path) not in (tmp_path / "saved" / "config.json").read_text()
