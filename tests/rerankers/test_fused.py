"""Feature unions over one pass through a shared encoder: the same features, and fused only where that is right."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.rerankers.fused import FusedRerankers

from ..support import tiny
from ..support.systems import QRELS, QUIET, make

pytestmark = QUIET
MODELS = {
    "MaxP": ("MaxP", {}),
    "SumP": ("SumP", {}),
    "KMaxP": ("KMaxP", {"k": 2, "seed": 1}),
    "PARADE": ("PARADE-avg", {}),
    "PARADE-transformer": ("PARADE-transformer", {}),
    "FirstP": ("FirstP", {}),
    "AvgP": ("AvgP", {"max_doc_len": 50}),
    "words": ("MaxP", {"windows": ld.SlidingWords(15, 10), "window_size": 150, "stride": 100}),
}
"""Heads, windows, reading and seeds that may differ."""


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The windows of each pass through a backbone, of whatever model."""
    windows, encode = [], WindowEncoder._encode

    def spy(encoder, batch, rows, *args):
        windows.append(len(rows))
        return encode(encoder, batch, rows, *args)

    monkeypatch.setattr(WindowEncoder, "_encode", spy)
    return windows


def models_of(*names) -> list:
    return [make(MODELS[name][0], **MODELS[name][1]) for name in names]


def union(models):
    first, *others = models
    for other in others:
        first = first**other
    return first


def assert_same(out: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert list(out.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(out.drop(columns="features"), expected.drop(columns="features"))
    for row, other in zip(out["features"], expected["features"], strict=True):
        assert row.dtype == other.dtype
        np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-6)


def test_features_rows_and_columns_are_those_of_the_union(results):
    frame = results.assign(title="kept").set_index(pd.Index([7, 3, 3, 1, 0]))
    unfused = union(models_of(*MODELS))
    fused = unfused.compile()
    assert isinstance(fused, FusedRerankers)
    assert len(fused.models) == len(MODELS)
    assert_same(fused(frame), unfused(frame))
    assert np.stack(fused(frame)["features"]).shape == (5, len(MODELS))


def test_pipelines_fuse_when_compiled(results):
    pipeline = pt.Transformer.from_df(results) >> union(models_of("MaxP", "FirstP", "AvgP"))
    compiled = pipeline.compile()
    assert isinstance(compiled[-1], FusedRerankers)
    topics = results[["qid", "query"]].drop_duplicates()
    assert_same(compiled(topics), pipeline(topics))
    assert repr(compiled[-1]) == f"FusedRerankers({' ** '.join(map(repr, compiled[-1].models))})"
    assert pt.inspect.subtransformers(compiled[-1]) == {"models": list(compiled[-1].models)}
    assert compiled[-1].schematic()["label"] == "MaxP ** FirstP ** AvgP"


def test_empty_frames_missing_columns_and_features(results):
    unfused = union(models_of("MaxP", "SumP"))
    fused = unfused.compile()
    assert list(fused(results.head(0)).columns) == list(unfused(results.head(0)).columns)
    for frame in (results.drop(columns="text"), results.assign(features=1.0)):
        with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever the union raises
            unfused(frame)
        with pytest.raises(type(expected.value)) as raised:
            fused(frame)
        assert str(raised.value) == str(expected.value)


@pytest.mark.bytes
def test_each_window_is_encoded_once(results, encoded):
    make("MaxP")(results)
    alone = sum(encoded)
    # The first 20 tokens of FirstP are the first window of the others.
    for names in (["MaxP", "SumP", "KMaxP", "PARADE"], ["MaxP", "FirstP", "SumP"]):
        fused = union(models_of(*names)).compile()
        encoded.clear()
        fused(results)
        assert sum(encoded) == alone
        for model in fused.models:
            assert model.coverage.tokens_encoded == fused.models[0].coverage.tokens_encoded > 0
    assert [model.coverage.documents_cut for model in fused.models] == [0, 2, 0]  # each tells what it has read itself


UNLIKE = {
    "tokens": ("CEDR-knrm", {}),
    "query states": ("PARADE-query", {}),
    "first stage": ("Birch", {}),
    "longp": ("LongP", {}),
    "explain": ("SumP", {"explain": True}),
    "score cache": ("SumP", {"score_cache": "scores.sqlite"}),
    "preselect": ("SumP", {"preselect": ld.FirstK(1)}),
    "precision": ("SumP", {"dtype": "bfloat16"}),
    "device": ("SumP", {"device": "cpu"}),
    "text": ("SumP", {"text_field": "title"}),
    "loader": ("SumP", {"text_loader": pt.apply.text(lambda row: "a")}),
    "query": ("SumP", {"max_query_len": 2}),
    "layout": ("SumP", {"layout": "padded"}),
    "bi-encoder": ("BiEncoder-max", {}),
}


@pytest.mark.parametrize("what", [*UNLIKE, "no reranker"])
def test_what_does_not_fit_stays_as_it_is(what):
    [model] = models_of("MaxP")
    other = make(UNLIKE[what][0], **UNLIKE[what][1]) if what in UNLIKE else pt.apply.doc_score(lambda row: 1.0)
    assert model.fuse_feature_union(other, is_left=True) is None
    assert model.fuse_feature_union(other, is_left=False) is None
    assert not isinstance((model**other).compile(), FusedRerankers)
    assert not isinstance((other**model).compile(), FusedRerankers)


def test_the_fixed_layout_fuses_with_windows_of_one_size(results):
    models = [make(name, layout="padded") for name in ("MaxP", "SumP")]
    unfused = union(models)
    assert isinstance(unfused.compile(), FusedRerankers)
    assert_same(unfused.compile()(results), unfused(results))
    models[1].window_size = 30
    assert not isinstance(unfused.compile(), FusedRerankers)


def test_other_weights_stay_apart(tmp_path):
    other = tiny.checkpoint(tmp_path / "other", seed=1)
    for loaded in (False, True):
        models = [make("MaxP"), make("SumP", other), make("SumP")]
        if loaded:
            for model in models:
                model.load_scorer()
        assert models[0].fuse_feature_union(models[1], is_left=True) is None
        assert isinstance(models[0].fuse_feature_union(models[2], is_left=True), FusedRerankers)


def test_copies_of_trained_models_share_their_encoder(results):
    trained, best = models_of("MaxP", "SumP")
    with torch.no_grad():
        trained.load_scorer().encoder.backbone.embeddings.word_embeddings.weight.mul_(1.5)
    trained.load_weights().mark_trained({})
    assert trained.fuse_feature_union(best, is_left=True) is None  # not loaded: it would start from the backbone
    best.start_from(trained)
    unfused = trained**best
    assert isinstance(unfused.compile(), FusedRerankers)
    assert_same(unfused.compile()(results), unfused(results))


@pytest.mark.bytes
def test_training_one_of_them_afterwards(results, encoded):
    models = models_of("MaxP", "SumP")
    unfused = union(models)
    fused = unfused.compile()
    before = fused(results)
    once = sum(encoded)
    models[1].training = ld.TrainingArgs(learning_rates={"": 1e-2})
    models[1].fit(results, QRELS)
    encoded.clear()
    after = fused(results)
    assert sum(encoded) == 2 * once
    assert_same(after, unfused(results))
    features = [np.stack(frame["features"]) for frame in (before, after)]
    np.testing.assert_allclose(features[0][:, 0], features[1][:, 0], rtol=1e-5)
    assert not np.allclose(features[0][:, 1], features[1][:, 1])


def test_changed_arguments_count(results):
    models = models_of("MaxP", "SumP")
    unfused = union(models)
    fused = unfused.compile()
    fused(results)
    for name, value in (("window_size", 15), ("max_query_len", 2), ("explain", True)):
        setattr(models[1], name, value)
        assert_same(fused(results)[["features"]], unfused(results)[["features"]])


@pytest.mark.parametrize("verbose", [False, True])
def test_warnings_progress_and_a_model_that_stands_twice(verbose, results, monkeypatch):
    model, untrained = (make(name, verbose=verbose) for name in ("MaxP", "PARADE-transformer"))
    bars = []

    class Bar(pt.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(pt, "tqdm", Bar)
    with pytest.warns(ld.UntrainedWarning, match="PARADE") as caught:
        features = np.stack(union([model, untrained, model]).compile()(results)["features"])
    assert len([w for w in caught if w.category is ld.UntrainedWarning]) == 1
    assert len(bars) == (3 if verbose else 0)
    assert all(bar.n == bar.total > 0 for bar in bars)
    np.testing.assert_array_equal(features[:, 0], features[:, 2])
    assert model.coverage.documents == 5


def test_queries_have_the_room_that_all_windows_leave(results):
    """Fused, they would all be cut by the first one's windows."""
    query = "snow in the city " * 15  # 60 tokens, of which windows of 100 leave 25
    frame = results.assign(query=query)
    alike = [make(name, max_query_len=None) for name in ("MaxP", "SumP")]
    assert isinstance(union(alike).compile(), FusedRerankers)
    models = [make("MaxP", max_query_len=None, window_size=100), make("SumP", max_query_len=None, window_size=20)]
    for each in (models, alike):
        assert_same(union(each).compile()(frame), union(each)(frame))
