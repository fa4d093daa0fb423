"""PyTerrier's contract of a reranker, for every class: frames in, frames out."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import sys
import unittest
import warnings

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import EXPLANATION_COLUMNS, TruncationWarning
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.rerankers.base import UntrainedWarning

from ..support import tiny
from ..support.systems import (
    AGGREGATING,
    BI_ENCODERS,
    CROSS_ENCODERS,
    REMEMBERING,
    SMALL,
    SYSTEMS,
    UNTRAINED,
    make,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

TRANSFORMER = {"aggregation": "transformer"}
NEEDED = ["qid", "query", "docno", "text"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test may open a connection."""

    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(params=SYSTEMS)
def name(request) -> str:
    return request.param


@pytest.fixture
def backbone(name, cross_encoder, plain_encoder) -> str:
    return plain_encoder if name in BI_ENCODERS else cross_encoder


@pytest.fixture
def fresh(name, backbone):
    """A new transformer that has loaded nothing yet."""
    return make(name, backbone)


@pytest.fixture(scope="session")
def all_loaded(cross_encoder, plain_encoder):
    return {name: make(name, plain_encoder if name in BI_ENCODERS else cross_encoder) for name in SYSTEMS}


@pytest.fixture
def loaded(name, all_loaded):
    """A transformer shared between tests, which must not change it."""
    return all_loaded[name]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a backbone is an error."""

    def refuse(*_, **__):
        raise AssertionError("a backbone was loaded")

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("pyterrier_longdoc.") and hasattr(module, "load_backbone"):
            monkeypatch.setattr(module, "load_backbone", refuse)


def scores(transformer, frame) -> np.ndarray:
    return transformer(frame)["score"].to_numpy()


def distinct(frame: pd.DataFrame) -> pd.DataFrame:
    """Longer run without ties: 3 queries and 4 documents each."""
    words = tiny.WORDS
    rows = [
        {
            "qid": f"q{q}",
            "query": f"{words[q + 22]} {words[q + 30]}",
            "docno": f"d{d}",
            "text": " ".join(words[(i * (d + 3) + q) % len(words)] for i in range(1 + 25 * d)),
            "score": 10.0 - d,
            "rank": d,
        }
        for q in range(3)
        for d in range(4)
    ]
    return pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)


# Rows and columns.


@pytest.mark.parametrize("extra", [[], ["url", "_x", "title"]])
@pytest.mark.parametrize("ranked", [[], ["rank", "score"]])
def test_empty_frame(fresh, name, extra, ranked, nothing_loads):
    if name == "Birch":
        ranked = ["rank", "score"]
    out = fresh(pd.DataFrame(columns=[*NEEDED, *extra, *ranked]))
    assert list(out.columns) == [*NEEDED, *extra, "score", "rank"]
    assert len(out) == 0
    assert out["score"].dtype == "float64"
    assert out["rank"].dtype == "int64"


def test_zero_columns(fresh, nothing_loads):
    with pytest.raises(pt.validate.InputValidationError, match=type(fresh).__name__):
        fresh(pd.DataFrame())


def test_empty_and_full_frames_give_the_same_columns(loaded, results):
    results = results.assign(_x=1, title="t")
    assert list(loaded(results.iloc[:0]).columns) == list(loaded(results).columns)


def test_rows_columns_index_and_dtypes(loaded, results):
    frame = results.assign(_x=range(5), title="t", url=None)
    frame.index = [7, 7, 3, 9, -1]
    out = loaded(frame)
    assert out.index.tolist() == [7, 7, 3, 9, -1]
    assert list(out.columns) == ["qid", "query", "docno", "text", "_x", "title", "url", "score", "rank"]
    kept = ["qid", "query", "docno", "text", "_x", "title", "url"]
    pd.testing.assert_frame_equal(out[kept], frame[kept])
    assert out["score"].dtype == "float64"
    assert out["rank"].dtype == "int64"
    assert np.isfinite(out["score"]).all()


def test_input_is_unchanged(loaded, results):
    frame = results.set_axis([4, 4, 1, 0, 2])
    before = frame.copy(deep=True)
    loaded(frame)
    assert before.equals(frame)
    assert list(before.columns) == list(frame.columns)
    assert before.index.equals(frame.index)


def test_ranks_follow_scores_from_zero(loaded, results):
    for _, group in loaded(distinct(results)).groupby("qid"):
        by_rank = group.sort_values("rank")
        assert by_rank["rank"].tolist() == list(range(len(group)))
        assert by_rank["score"].is_monotonic_decreasing


def test_one_row(loaded, results):
    all_rows = scores(loaded, results)
    for i in range(len(results)):
        out = loaded(results.iloc[[i]])
        assert out["rank"].tolist() == [0]
        np.testing.assert_allclose(out["score"], all_rows[[i]], atol=1e-5)


def test_without_score_and_rank(loaded, name, results):
    bare = results.drop(columns=["score", "rank"])
    if name == "Birch":
        with pytest.raises(pt.validate.InputValidationError, match="score"):
            loaded(bare)
    else:
        np.testing.assert_array_equal(scores(loaded, bare), scores(loaded, results))


def test_row_order_does_not_matter(loaded, results):
    frame = distinct(results)
    expected = scores(loaded, frame)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(frame))
        out = loaded(frame.iloc[order])
        assert out.index.tolist() == order.tolist()
        np.testing.assert_allclose(out["score"], expected[order], atol=1e-5)


def test_batch_size_does_not_matter(loaded, results):
    frame = distinct(results)
    expected = scores(loaded, frame)
    for sizes in ({"batch_size": 1}, {"batch_size": 1000, "max_batch_tokens": 10**6}, {"max_batch_tokens": 40}):
        changed = pt.inspect.transformer_apply_attributes(loaded, **sizes)
        np.testing.assert_allclose(scores(changed, frame), expected, atol=1e-5)


def test_transform_gen(loaded, results):
    frame = distinct(results)
    out = pd.concat(loaded.transform_gen(frame, batch_size=1))
    np.testing.assert_allclose(out["score"].loc[frame.index], scores(loaded, frame), atol=1e-5)


def test_duplicate_rows_get_the_same_score(loaded, results):
    twice = pd.concat([results, results])
    out = scores(loaded, twice)
    assert len(out) == 2 * len(results)
    np.testing.assert_array_equal(out[:5], out[5:])
    np.testing.assert_allclose(out[:5], scores(loaded, results), atol=1e-5)


def test_integer_qids_and_narrow_dtypes(loaded, results):
    narrow = results.astype({"qid": int, "score": "float32", "rank": "int32"})
    out = loaded(narrow)
    assert out["qid"].tolist() == [1, 1, 2, 2, 1]
    assert out["score"].dtype == "float64"
    assert out["rank"].dtype == "int64"
    np.testing.assert_allclose(out["score"], scores(loaded, results), atol=1e-6)


def test_missing_text_counts_as_empty(loaded, results):
    frame = pd.concat([results.iloc[[0]]] * 4, ignore_index=True).assign(text=["", None, float("nan"), "  "])
    out = scores(loaded, frame)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, out[0], atol=1e-5)


def test_very_long_text(loaded, name, results, monkeypatch):
    frame = results.iloc[[0, 1]].assign(text=["cat dog " * 4000, "x" * 5000])
    if name in AGGREGATING:
        with monkeypatch.context() as patch:
            patch.setattr(WindowEncoder, "_encode", None)  # nothing is encoded before that
            with pytest.raises(ValueError, match=r"a document has 799 windows.*raise stride, or set max_windows"):
                loaded(frame)
        loaded = pt.inspect.transformer_apply_attributes(loaded, max_windows=100)
    assert np.isfinite(loaded(frame)["score"]).all()


text = st.one_of(
    st.none(),
    st.just(""),
    st.text(max_size=60),
    st.text(alphabet="\x00\ud800\u200b\u0301\ufeff\U0001f44d 中a.\n\t", max_size=30),
    st.lists(st.sampled_from(tiny.WORDS), max_size=60).map(" ".join),
)
row = st.fixed_dictionaries(
    {
        "qid": st.sampled_from(["1", "2"]),
        "query": text,
        "docno": st.sampled_from(["a", "b", "c"]),
        "text": text,
        "score": st.floats(-10, 10),
        "_x": st.none() | st.integers(),
        "title": text,
    }
)


@pytest.mark.parametrize("name", ["MaxP", "Birch", "PARADE-attn", "PARADE-transformer", "BiEncoder-avg"], indirect=True)
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(row, min_size=1, max_size=6), data=st.data())
def test_any_frame_is_scored(loaded, rows, data):
    index = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    frame = pd.DataFrame(rows, index=index, dtype=object)
    before = frame.copy(deep=True)
    out = loaded(frame)
    assert out.index.tolist() == index
    assert out["docno"].tolist() == frame["docno"].tolist()
    assert out["title"].tolist() == frame["title"].tolist()
    assert np.isfinite(out["score"].to_numpy()).all()
    assert before.equals(frame)


# Weights: loaded late, pickled, reproducible.


def test_construction_touches_neither_weights_nor_random_state(name, nothing_loads):
    state = torch.get_rng_state()
    made = make(name, "no/such-model")
    assert repr(made).startswith(type(made).__name__)
    assert torch.equal(state, torch.get_rng_state())


def test_pickle_before_and_after_loading(fresh, results):
    unloaded = pickle.loads(pickle.dumps(fresh))
    expected = scores(fresh, results)
    np.testing.assert_array_equal(scores(unloaded, results), expected)
    restored = pickle.loads(pickle.dumps(fresh))
    np.testing.assert_array_equal(scores(restored, results), expected)
    assert repr(restored) == repr(fresh)


def test_scores_are_reproducible(fresh, loaded, results):
    np.testing.assert_array_equal(scores(fresh, results), scores(loaded, results))


def test_low_precision(fresh, results):
    expected = scores(fresh, results)
    fresh.set_parameter("dtype", "bfloat16")
    got = scores(fresh, results)
    assert not np.array_equal(got, expected)
    assert np.abs(got - expected).max() < 0.1 + 0.1 * np.abs(expected).max()


# The text.


def test_text_fields_are_joined(loaded, name, results):
    titles = ["snow", None, "", "river", "old"]
    frame = results.assign(title=titles)
    both = pt.inspect.transformer_apply_attributes(loaded, text_field=("title", "text"))
    texts = [" ".join(filter(None, pair)) for pair in zip(titles, results["text"].fillna(""), strict=True)]
    # Remembered states come from batches of other windows.
    tolerance = 1e-5 if name in REMEMBERING else 0
    np.testing.assert_allclose(scores(both, frame), scores(loaded, results.assign(text=texts)), atol=tolerance)


def test_other_text_field(loaded, results):
    body = pt.inspect.transformer_apply_attributes(loaded, text_field="body")
    frame = results.rename(columns={"text": "body"})
    np.testing.assert_array_equal(scores(body, frame), scores(loaded, results))


class Store:
    """A dataset that supplies texts."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.texts = dict(zip(frame["docno"], frame["text"], strict=True))
        self.calls = 0

    def text_loader(self, fields="*", *, verbose=False):
        def load(frame):
            self.calls += 1
            return frame.assign(**{field: frame["docno"].map(self.texts) for field in fields}).reset_index(drop=True)

        return pt.apply.generic(load)


@pytest.mark.parametrize("as_object", [True, False])
def test_text_loader(loaded, results, as_object):
    store = Store(results)
    loader = store if as_object else store.text_loader(["text"])
    loading = pt.inspect.transformer_apply_attributes(loaded, text_loader=loader)
    without = results.drop(columns="text").set_axis([3, 1, 1, 0, 8])
    out = loading(without)
    np.testing.assert_array_equal(out["score"], scores(loaded, results))
    assert list(out.columns) == ["qid", "query", "docno", "score", "rank"]
    assert out.index.tolist() == [3, 1, 1, 0, 8]
    assert store.calls == 1
    loading(results)
    assert store.calls == 1  # the column is there: nothing to load
    inputs = pt.inspect.transformer_inputs(loading)
    assert [set(columns) - {"score"} for columns in inputs] == [set(NEEDED), set(NEEDED) - {"text"}]


def test_text_loader_that_does_not_supply(results, cross_encoder):
    without = results.drop(columns="text")
    with pytest.raises(ValueError, match="does not supply"):
        ld.FirstP(cross_encoder, text_loader=pt.apply.generic(lambda frame: frame))(without)
    with pytest.raises(ValueError, match="did not return the rows"):
        ld.FirstP(cross_encoder, text_loader=pt.apply.generic(lambda frame: frame.iloc[1:].assign(text="a")))(without)
    with pytest.raises(ValueError, match="must be a transformer that adds the text"):
        ld.FirstP(cross_encoder, text_loader={"d1": "text"})


def test_missing_text_column_is_explained(fresh, results, nothing_loads):
    with pytest.raises(pt.validate.InputValidationError) as error:
        fresh(results.drop(columns="text"))
    message = str(error.value)
    for part in (type(fresh).__name__, "text", "text_loader", "text_field", "docno"):
        assert part in message


def test_bytes_are_refused(fresh, results):
    for column in ("text", "query"):
        with pytest.raises(ValueError, match=f"column '{column}' holds bytes"):
            fresh(results.assign(**{column: [b"cat"] * 5}))


# Explanations, coverage, warnings.


def test_explanations(loaded, name, results):
    explaining = pt.inspect.transformer_apply_attributes(loaded, explain=True)
    out = explaining(results)
    np.testing.assert_allclose(out["score"], scores(loaded, results), atol=1e-5)
    assert set(out.columns) - set(results.columns) == set(EXPLANATION_COLUMNS)
    assert list(explaining(results.iloc[:0]).columns) == list(out.columns)
    for source, explained in zip(results["text"].fillna(""), out.itertuples(), strict=True):
        count = len(explained.window_scores)
        assert count >= 1
        assert np.isfinite(explained.window_scores).all()
        assert len(explained.window_spans) == count
        assert all(0 <= start <= end <= len(source) for start, end in explained.window_spans)
        best = int(np.argmax(explained.window_scores))
        assert (explained.best_start, explained.best_end) == explained.window_spans[best]
        if name in ("PARADE-attn", "PARADE-elementwise"):
            assert len(explained.window_weights) == count
            assert sum(explained.window_weights) == pytest.approx(1.0, abs=1e-5)
        else:
            assert explained.window_weights is None


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"], indirect=True)
def test_best_span_is_the_text_of_the_best_window(loaded, results):
    out = pt.inspect.transformer_apply_attributes(loaded, explain=True)(results.iloc[[0]]).iloc[0]
    window = results["text"].iloc[0][out["best_start"] : out["best_end"]]
    alone = loaded(results.iloc[[0]].assign(text=window))["score"].item()
    assert alone == pytest.approx(out["score"], abs=1e-5)


def test_explanation_of_score_aggregations(cross_encoder, results):
    aggregations = {
        "FirstP": lambda s: s[0],
        "MaxP": max,
        "SumP": sum,
        "AvgP": np.mean,
        "KMaxP": lambda s: np.mean(sorted(s)[-3:]),
    }
    for name, aggregate in aggregations.items():
        for row in make(name, cross_encoder, explain=True)(results).itertuples():
            assert row.score == pytest.approx(aggregate(row.window_scores), abs=1e-4), name


def test_birch_mixes_in_the_first_stage(cross_encoder, results):
    sentences = ld.SentenceWindows(max_sentences=1)
    neural = scores(ld.KMaxP(cross_encoder, windows=sentences, **SMALL), results)
    first_stage = results["score"].to_numpy()
    for a in (0.0, 0.3, 1.0):
        birch = ld.Birch(cross_encoder, first_stage_weight=a, **SMALL)
        np.testing.assert_allclose(scores(birch, results), a * first_stage + (1 - a) * neural, atol=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        birch(results.assign(score=[1.0, None, 1.0, 1.0, 1.0]))


def test_coverage(fresh, name, results):
    assert fresh.coverage is None
    fresh(results)
    coverage = fresh.coverage
    tokens = [6 * 22, 3, 0]  # the long text: 21 words and a full stop, six times
    assert coverage.documents == 3
    assert coverage.tokens == sum(tokens)
    if name in ("FirstP", "BiEncoder-first"):
        assert (coverage.documents_cut, coverage.tokens_read, coverage.windows) == (1, 20 + 3, 3)
        assert coverage.is_cut
    elif name == "LongP":
        # The tiny backbone takes 128 tokens: 8 of the query, 3 special ones.
        assert (coverage.documents_cut, coverage.tokens_read, coverage.windows) == (1, 117 + 3, 3)
    else:
        assert (coverage.documents_cut, coverage.tokens_read) == (0, sum(tokens))
        assert coverage.share_read == 1.0
        assert not coverage.is_cut
    assert (coverage.queries, coverage.queries_cut) == (2, 0)
    assert coverage.as_dict()["windows_per_document"] == coverage.windows / 3


@pytest.mark.parametrize("name", ["FirstP", "BiEncoder-first"], indirect=True)
def test_one_truncation_warning(fresh, results):
    with pytest.warns(TruncationWarning, match=rf"{type(fresh).__name__} did not read all.*23 of 135 tokens") as caught:
        fresh(results)
    assert [w.filename for w in caught if w.category is TruncationWarning] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruncationWarning)
        fresh(results.iloc[[1]])
        assert not fresh.coverage.is_cut
        fresh(results)
        assert fresh.coverage.is_cut


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"], indirect=True)
def test_long_queries_are_reported(fresh, results):
    with pytest.warns(TruncationWarning, match=r"text: 1 of 2 queries were cut at max_query_len \(see"):
        fresh(results.assign(query=["old dog " * 20, *results["query"][1:4], "old dog " * 20]).iloc[[0, 2, 3, 4]])


@pytest.mark.parametrize("name", list(CROSS_ENCODERS), indirect=True)
def test_untrained_models_warn_once(name, plain_encoder, cross_encoder, results):
    for backbone, untrained in ((plain_encoder, True), (cross_encoder, name in UNTRAINED)):
        model = make(name, backbone)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(results)
            model(results)
        about = [w for w in caught if issubclass(w.category, UntrainedWarning)]
        assert len(about) == int(untrained)
        assert all(type(model).__name__ in str(w.message) for w in about)
        assert all(w.filename == __file__ or name == "Birch" for w in about)


def test_progress_bar_only_if_verbose(loaded, results, monkeypatch):
    bars = []

    class Bar(pt.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.shown = not self.disable
            bars.append(self)

    monkeypatch.setattr(pt, "tqdm", Bar)
    loaded(results)
    assert not any(bar.shown for bar in bars)
    bars.clear()
    pt.inspect.transformer_apply_attributes(loaded, verbose=True)(results)
    (bar,) = bars
    assert bar.shown
    assert (bar.n, bar.total, bar.desc) == (5, 5, type(loaded).__name__)


# Wrong arguments.


def test_wrong_arguments_common_to_all(fresh):
    wrong = [
        ({"dtype": "float8"}, "dtype='float8' is unknown.*bfloat16"),
        ({"text_field": ()}, "text_field"),
        ({"text_field": ("title", 3)}, "text_field"),
        ({"text_field": ""}, "text_field"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0 must be at least 1"),
        ({"max_query_len": 0}, "max_query_len=0 must be at least 1"),
        ({"windows": 150}, "windows=150 must be windows"),
        ({"text_field": 3}, "text_field=3 must be the name of a column"),
        ({"batch_size": None}, "batch_size=None must be a whole number"),
        ({"batch_size": 4.0}, "batch_size=4.0 must be a whole number"),
        ({"batch_size": True}, "batch_size=True must be a whole number"),
        ({"max_doc_len": 0}, "max_doc_len=0 must be at least 1"),
        ({"max_doc_len": -5}, "max_doc_len=-5 must be at least 1"),
        ({"max_windows": 0}, "max_windows=0 must be at least 1"),
        ({"selection": "best"}, "selection='best' is unknown"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"device": "gpu"}, "device='gpu' is unknown to torch"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            type(fresh)(fresh.backbone, **changes)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (
            ld.PARADE,
            {"aggregation": "mean"},
            "aggregation='mean' is unknown; choose one of avg, max, attn, transformer",
        ),
        (ld.PARADE, {"attention": "scalar"}, "attention='scalar' is unknown; choose one of vector, elementwise"),
        (ld.PARADE, {"aggregation": "avg", "layers": 3}, "layers would have no effect with aggregation='avg'"),
        (ld.PARADE, {"aggregation": "max", "attention": "elementwise"}, "attention would have no effect"),
        (ld.PARADE, {"aggregator": "a/b"}, "aggregator would have no effect with aggregation='attn'"),
        (ld.PARADE, {"query_states": True}, "query_states would have no effect with aggregation='attn'"),
        (ld.PARADE, {**TRANSFORMER, "separate_query_projection": True}, "only with query_states=True"),
        (ld.PARADE, {**TRANSFORMER, "aggregator": "a/b", "layers": 3}, "layers would have no effect.*starts at random"),
        (ld.PARADE, {**TRANSFORMER, "special_vectors": "zero"}, "special_vectors='zero' is unknown; choose one of wor"),
        (ld.MaxP, {"selection": "best"}, "selection='best' is unknown; choose one of first"),
        (ld.MaxP, {"window_size": 100, "stride": 101}, "stride=101 is larger than the window size 100"),
        (ld.MaxP, {"window_size": 0}, "size=0 must be at least 1"),
        (ld.MaxP, {"max_windows": 0}, "max_windows=0 must be at least 1"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "max_windows": 4}, "max_windows would have no effect next to windows"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "selection": "first_last_random"}, "selection would have no effect"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "window_size": 40, "stride": 30}, "window_size and stride would have"),
        (ld.BiEncoder, {"windows": ld.SlidingWords(), "window_size": 40}, "window_size would have no effect"),
        (ld.MaxP, {"window_size": 40.0}, "size=40.0 must be a whole number"),
        (ld.PARADE, {"aggregation": "transformer", "layers": 0}, "layers=0 must be at least 1"),
        (ld.KMaxP, {"k": 0}, "k=0 must be at least 1"),
        (ld.KMaxP, {"k": 2, "weights": [1.0]}, "must have k=2 entries"),
        (ld.KMaxP, {"k": 2, "weights": 1.0}, "weights=1.0 must have k=2 entries"),
        (ld.KMaxP, {"k": 2, "weights": [1.0, float("nan")]}, "must be finite"),
        (ld.KMaxP, {"k": None}, "k=None must be a whole number"),
        (ld.KMaxP, {"k": "3"}, "k='3' must be a whole number"),
        (ld.KMaxP, {"k": 2.5}, "k=2.5 must be a whole number"),
        (ld.MaxP, {"window_size": None}, "size=None must be a whole number"),
        (ld.MaxP, {"stride": None}, "stride=None must be a whole number"),
        (ld.MaxP, {"training": {}}, "training={} must be TrainingArgs"),
        (ld.Birch, {"first_stage_weight": None}, "first_stage_weight=None must be between 0 and 1"),
        (ld.Birch, {"first_stage_weight": 1.5}, "between 0 and 1"),
        (ld.Birch, {"window_size": 20}, "Birch reads sentences"),
        (ld.BiEncoder, {"aggregation": "attn"}, "aggregation='attn' is unknown; choose one of first, max, avg"),
        (ld.BiEncoder, {"pooling": "max"}, "pooling='max' is unknown; choose one of mean, cls"),
        (ld.BiEncoder, {"similarity": "l2"}, "similarity='l2' is unknown; choose one of cosine, dot"),
    ],
)
def test_wrong_arguments(cls, arguments, message, nothing_loads):
    with pytest.raises(ValueError, match=message):
        cls("any/model", **arguments)


@pytest.mark.parametrize("backbone", [None, 3, ""])
def test_wrong_backbones(backbone):
    for cls in (ld.MaxP, ld.BiEncoder):
        with pytest.raises(ValueError, match=f"backbone={backbone!r} must be a folder, or a model on the Hugging Face"):
            cls(backbone)


def test_numpy_numbers_are_numbers(cross_encoder, results):
    expected = make("MaxP", cross_encoder)(results)
    model = make("MaxP", cross_encoder, batch_size=np.int64(3), seed=np.int64(42))
    pd.testing.assert_frame_equal(model(results), expected)


def test_column_that_stands_twice(fresh, results):
    twice = pd.concat([results, results[["text"]]], axis=1)
    with pytest.raises(ValueError, match=r"column\(s\) text stand more than once"):
        fresh(twice)


def test_gpu_that_is_not_there(fresh, results, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fresh.device = "cuda"
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        fresh(results)


def test_backbone_that_is_no_folder(results):
    with pytest.raises(ValueError, match="'/no/such/folder' is neither a folder nor the id of a model"):
        ld.MaxP("/no/such/folder")(results)


@pytest.mark.parametrize("name", ["FirstP", "BiEncoder-first"], indirect=True)
def test_first_window_of_any_windows(name, fresh, results):
    expected = fresh(results.assign(text=[" ".join(text.split()[:7]) for text in results["text"].fillna("")]))
    arguments = {f.name: getattr(fresh, f.name) for f in dataclasses.fields(fresh)}
    arguments.update(windows=ld.SlidingWords(7, 3), window_size=None, backbone=fresh.backbone)
    if "stride" in arguments:
        arguments["stride"] = type(fresh).stride
    model = type(fresh)(**arguments)
    np.testing.assert_allclose(model(results)["score"], expected["score"], rtol=1e-5)
    assert model.coverage.windows == model.coverage.documents
    assert model.coverage.documents_cut == 1
    assert model.coverage.tokens_read < model.coverage.tokens


def test_arguments_are_checked_again_at_transform(cross_encoder, results):
    model = make("KMaxP", cross_encoder)
    model.k = 0
    with pytest.raises(ValueError, match="k=0"):
        model(results)


@pytest.mark.parametrize("name", ["MaxP", "AvgP", "PARADE-attn", "BiEncoder-max"], indirect=True)
def test_windows_larger_than_the_backbone(name, backbone, results):
    with pytest.raises(ValueError, match=r"does not fit.*lower the window size"):
        make(name, backbone, window_size=150)(results)
    with pytest.raises(ValueError, match="max_query_len=140"):
        make(name, backbone, max_query_len=140)(results)


def test_the_base_class_says_what_to_use():
    with pytest.raises(NotImplementedError, match="FirstP, MaxP, PARADE"):
        ld.LongDocReranker()


# PyTerrier's own checks.


def test_pyterrier_test_case(name, fresh, nothing_loads):
    case = pt.testing.transformer_test_class(lambda: fresh)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


def test_inspection_loads_nothing(fresh, name, nothing_loads):
    inputs = [*NEEDED, "score"] if name == "Birch" else NEEDED
    assert [sorted(columns) for columns in pt.inspect.transformer_inputs(fresh)] == [sorted(inputs)]
    outputs = pt.inspect.transformer_outputs(fresh, [*inputs, "url"])
    assert set(outputs) == {*NEEDED, "url", "score", "rank"}
    assert pt.inspect.subtransformers(fresh) == {}
    values = {attribute.name: attribute.value for attribute in pt.inspect.transformer_attributes(fresh)}
    assert values == {key: getattr(fresh, key) for key in values}
    assert {"backbone", "text_field", "batch_size", "verbose", "device"} <= set(values)


def test_attributes_are_the_arguments_after_loading_too(loaded, results):
    loaded(results)
    values = {attribute.name: attribute.value for attribute in pt.inspect.transformer_attributes(loaded)}
    assert values == {key: getattr(loaded, key) for key in values}


def test_names_are_short_and_unique(all_loaded):
    names = [repr(system) for system in all_loaded.values()]
    assert len(set(names)) == len(names)
    for system, shown in zip(all_loaded.values(), names, strict=True):
        assert shown == repr(pickle.loads(pickle.dumps(system)))
        aggregator = getattr(system, "aggregator", None) or ""
        assert len(shown) < len(system.backbone) + 2 * len(aggregator) + 120
        assert "object at" not in shown
    assert repr(ld.MaxP("a/b")) == "MaxP('a/b')"
    assert repr(ld.MaxP("a/b", stride=50, verbose=True, text_loader=Store)) == "MaxP('a/b', stride=50)"
    assert repr(ld.Birch("a/b", k=2, weights=np.ones(2))) == "Birch('a/b', k=2, weights=array([1., 1.]))"
