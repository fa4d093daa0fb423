"""Feature unions over one pass through a shared encoder: the same features, and fused only where that is right."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.rerankers.fused import FusedRerankers

from ..support import tiny
from ..support.systems import CHUNKS, SLIDING, SMALL

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})
MODELS = {
    "MaxP": lambda backbone: ld.MaxP(backbone, **SLIDING),
    "SumP": lambda backbone: ld.SumP(backbone, **SLIDING),
    "KMaxP": lambda backbone: ld.KMaxP(backbone, k=2, seed=1, **SLIDING),
    "PARADE": lambda backbone: ld.PARADE(backbone, aggregation="avg", **SLIDING),
    "PARADE-transformer": lambda backbone: ld.PARADE(backbone, aggregation="transformer", **SLIDING),
    "FirstP": lambda backbone: ld.FirstP(backbone, **CHUNKS),
    "AvgP": lambda backbone: ld.AvgP(backbone, max_doc_len=50, **CHUNKS),
    "words": lambda backbone: ld.MaxP(backbone, windows=ld.SlidingWords(15, 10), **SMALL),
}
"""Heads, windows, reading and seeds that may differ."""


class Encoded:
    """Counts the windows that go through backbones, of whatever model."""

    def __init__(self, monkeypatch):
        self.windows = 0
        from pyterrier_longdoc.modelling.encoder import WindowEncoder

        encode = WindowEncoder._encode

        def spy(encoder, batch, rows, *args):
            self.windows += len(rows)
            return encode(encoder, batch, rows, *args)

        monkeypatch.setattr(WindowEncoder, "_encode", spy)


@pytest.fixture
def encoded(monkeypatch) -> Encoded:
    return Encoded(monkeypatch)


def union_of(names, backbone):
    first, *others = [MODELS[name](backbone) for name in names]
    for other in others:
        first = first**other
    return first


def assert_same(out: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert list(out.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(out.drop(columns="features"), expected.drop(columns="features"))
    for row, other in zip(out["features"], expected["features"], strict=True):
        assert row.dtype == other.dtype
        np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-6)


def test_features_rows_and_columns_are_those_of_the_union(cross_encoder, results):
    frame = results.assign(title="kept").set_index(pd.Index([7, 3, 3, 1, 0]))
    unfused = union_of(MODELS, cross_encoder)
    fused = unfused.compile()
    assert isinstance(fused, FusedRerankers)
    assert len(fused.models) == len(MODELS)
    assert_same(fused(frame), unfused(frame))
    assert np.stack(fused(frame)["features"]).shape == (5, len(MODELS))


def test_pipelines_fuse_when_compiled(cross_encoder, results):
    first = pt.Transformer.from_df(results)
    pipeline = first >> union_of(["MaxP", "FirstP", "AvgP"], cross_encoder)
    compiled = pipeline.compile()
    assert isinstance(compiled[-1], FusedRerankers)
    topics = results[["qid", "query"]].drop_duplicates()
    assert_same(compiled(topics), pipeline(topics))
    assert repr(compiled[-1]) == f"({' ** '.join(map(repr, compiled[-1].models))})"


def test_empty_frames_missing_columns_and_features(cross_encoder, results):
    unfused = union_of(["MaxP", "SumP"], cross_encoder)
    fused = unfused.compile()
    for frame in (results.drop(columns="text"), results.assign(features=1.0)):
        with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever the union raises
            unfused(frame)
        with pytest.raises(type(expected.value)) as raised:
            fused(frame)
        assert str(raised.value) == str(expected.value)


def test_each_window_is_encoded_once(cross_encoder, results, encoded):
    alone = {}
    for name in ("MaxP", "FirstP"):
        encoded.windows = 0
        MODELS[name](cross_encoder)(results)
        alone[name] = encoded.windows
    for names, windows in (
        (["MaxP", "SumP", "KMaxP", "PARADE"], alone["MaxP"]),
        (["MaxP", "FirstP", "SumP"], alone["MaxP"]),  # the first 20 tokens are the first window of both
    ):
        fused = union_of(names, cross_encoder).compile()
        encoded.windows = 0
        fused(results)
        assert encoded.windows == windows
        for model in fused.models:
            assert model.coverage.tokens_encoded == fused.models[0].coverage.tokens_encoded > 0
    assert fused.models[1].coverage.documents_cut == 1  # each tells what it has read itself
    assert fused.models[0].coverage.documents_cut == 0


def test_the_same_model_twice(cross_encoder, results):
    model = MODELS["MaxP"](cross_encoder)
    twice = (model**model).compile()
    features = np.stack(twice(results)["features"])
    np.testing.assert_array_equal(features[:, 0], features[:, 1])
    assert model.coverage.documents == 3


UNLIKE = {
    "tokens": lambda backbone: ld.CEDR(backbone, **CHUNKS),
    "query states": lambda backbone: ld.PARADE(backbone, aggregation="transformer", query_states=True, **SLIDING),
    "first stage": lambda backbone: ld.Birch(backbone, **SMALL),
    "longp": lambda backbone: ld.LongP(backbone, **SMALL),
    "explain": lambda backbone: ld.SumP(backbone, explain=True, **SLIDING),
    "score cache": lambda backbone: ld.SumP(backbone, score_cache="scores.sqlite", **SLIDING),
    "precision": lambda backbone: ld.SumP(backbone, dtype="bfloat16", **SLIDING),
    "device": lambda backbone: ld.SumP(backbone, device="cpu", **SLIDING),
    "text": lambda backbone: ld.SumP(backbone, text_field="title", **SLIDING),
    "loader": lambda backbone: ld.SumP(backbone, text_loader=pt.apply.text(lambda row: "a"), **SLIDING),
    "query": lambda backbone: ld.SumP(backbone, **{**SLIDING, "max_query_len": 2}),
    "layout": lambda backbone: ld.SumP(backbone, pad_query=True, **SLIDING),
    "bi-encoder": lambda backbone: ld.BiEncoder(backbone, **SLIDING),
    "no reranker": lambda backbone: pt.apply.doc_score(lambda row: 1.0),
}


@pytest.mark.parametrize("what", list(UNLIKE))
def test_what_does_not_fit_stays_as_it_is(what, cross_encoder):
    model, other = MODELS["MaxP"](cross_encoder), UNLIKE[what](cross_encoder)
    assert model.fuse_feature_union(other, is_left=True) is None
    assert model.fuse_feature_union(other, is_left=False) is None
    assert not isinstance((model**other).compile(), FusedRerankers)
    assert not isinstance((other**model).compile(), FusedRerankers)


def test_the_fixed_layout_fuses_with_windows_of_one_size(cross_encoder, results):
    models = [cls(cross_encoder, pad_query=True, **SLIDING) for cls in (ld.MaxP, ld.SumP)]
    unfused = models[0] ** models[1]
    assert isinstance(unfused.compile(), FusedRerankers)
    assert_same(unfused.compile()(results), unfused(results))
    models[1].window_size = 30
    assert not isinstance(unfused.compile(), FusedRerankers)


def test_other_weights_stay_apart(cross_encoder, results, tmp_path):
    other = tiny.checkpoint(tmp_path / "other", seed=1)
    for loaded in (False, True):
        models = [ld.MaxP(cross_encoder, **SLIDING), ld.SumP(other, **SLIDING), ld.SumP(cross_encoder, **SLIDING)]
        if loaded:
            for model in models:
                model.load_scorer()
        assert models[0].fuse_feature_union(models[1], is_left=True) is None
        assert isinstance(models[0].fuse_feature_union(models[2], is_left=True), FusedRerankers)


def test_copies_of_trained_models_share_their_encoder(cross_encoder, results):
    trained = MODELS["MaxP"](cross_encoder)
    with torch.no_grad():
        trained.load_scorer().encoder.backbone.embeddings.word_embeddings.weight.mul_(1.5)
    trained._loaded.trained = True
    best = MODELS["SumP"](cross_encoder)
    assert trained.fuse_feature_union(best, is_left=True) is None  # not loaded: it would start from the backbone
    best.start_from(trained)
    unfused = trained**best
    assert isinstance(unfused.compile(), FusedRerankers)
    assert_same(unfused.compile()(results), unfused(results))


def test_training_one_of_them_afterwards(cross_encoder, results, encoded):
    models = [MODELS[name](cross_encoder) for name in ("MaxP", "SumP")]
    unfused = models[0] ** models[1]
    fused = unfused.compile()
    before = fused(results)
    once = encoded.windows
    models[1].training = ld.TrainingArgs(learning_rates={"": 1e-2})
    models[1].fit(results, QRELS)
    encoded.windows = 0
    after = fused(results)
    assert encoded.windows == 2 * once
    assert_same(after, unfused(results))
    features = [np.stack(frame["features"]) for frame in (before, after)]
    np.testing.assert_allclose(features[0][:, 0], features[1][:, 0], rtol=1e-5)
    assert not np.allclose(features[0][:, 1], features[1][:, 1])


def test_changed_arguments_count(cross_encoder, results):
    models = [MODELS[name](cross_encoder) for name in ("MaxP", "SumP")]
    unfused = models[0] ** models[1]
    fused = unfused.compile()
    fused(results)
    for name, value in (("window_size", 15), ("max_query_len", 2), ("explain", True)):
        setattr(models[1], name, value)
        assert_same(fused(results)[["features"]], unfused(results)[["features"]])


def test_progress_counts_every_row(cross_encoder, results):
    from pyterrier_longdoc.rerankers.fused import score_together

    scorers = [MODELS[name](cross_encoder).load_scorer() for name in ("MaxP", "FirstP")]
    steps = []
    score_together(scorers, ["old dog"] * 3, ["a cat", "snow " * 90, "a cat"], on_rows=steps.append)
    assert sum(steps) == 3
