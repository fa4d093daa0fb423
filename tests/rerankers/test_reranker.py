"""Frames in, frames out, for every class: rows, texts, explanations, coverage, warnings."""

from __future__ import annotations

import html
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.encoder import WindowEncoder

from ..support import frames, tiny
from ..support.systems import (
    AGGREGATING,
    CONTRACT,
    QUIET,
    REMEMBERING,
    REPRESENTATIVE,
    TRAINABLE,
    UNTRAINED,
    changed,
    make,
    scores,
    slow_but,
    told_of,
)
from ..support.threads import BLOCKED, Interleaved

pytestmark = QUIET

NEEDED = ["qid", "query", "docno", "text"]


@pytest.fixture
def tolerance(name):
    """Between scores of `loaded`: what is remembered comes from another test's batches of other windows."""
    return 1e-5 if name in REMEMBERING else 0


def test_an_empty_frame_gets_the_columns_of_results(fresh, name, nothing_loads):
    for extra in ([], ["url", "_x", "title"]):
        for ranked in ([], ["rank", "score"])[name == "Birch" :]:
            out = fresh(pd.DataFrame(columns=[*NEEDED, *extra, *ranked]))
            assert list(out.columns) == [*NEEDED, *extra, "score", "rank"]
            assert len(out) == 0
            assert (out["score"].dtype, out["rank"].dtype) == ("float64", "int64")


def test_rows_columns_and_index_are_kept_and_the_input_is_unchanged(loaded, results):
    frame = results.assign(_x=range(5), title="t", url=None).set_axis([7, 7, 3, 9, -1])
    before = frame.copy(deep=True)
    out = loaded(frame)
    pd.testing.assert_frame_equal(frame, before)  # the input is unchanged
    assert out.index.tolist() == [7, 7, 3, 9, -1]
    given = ["qid", "query", "docno", "text", "_x", "title", "url"]
    assert list(out.columns) == [*given, "score", "rank"] == list(loaded(frame.iloc[:0]).columns)
    pd.testing.assert_frame_equal(out[given], frame[given])
    assert (out["score"].dtype, out["rank"].dtype) == ("float64", "int64")
    assert np.isfinite(out["score"]).all()


def test_two_threads_load_a_model_once(results):
    together, loads = threading.Barrier(2), []

    class Slow(ld.MaxP):
        def load_backbone(self):
            loads.append(threading.get_ident())
            with suppress(threading.BrokenBarrierError):
                together.wait(BLOCKED)  # for another thread that loads, too
            return super().load_backbone()

    model = Slow(tiny.encoder(), window_size=20, stride=10)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: scores(model, results), range(2)))
    assert len(loads) == 1
    np.testing.assert_allclose(*found, atol=1e-5)


def test_threads_count_rows_without_text_separately(cross_encoder):
    threads = Interleaved()

    class Stopping(ld.FirstP):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "coverage" and value is not None:
                threads.stop()

    model = Stopping(cross_encoder)
    threads.run(lambda: model(tiny.frame(["a cat"], [""] * 3)), lambda: model(tiny.frame(["a cat"], ["snow", ""])))
    assert (model.coverage.rows, model.coverage.rows_without_text) == (2, 1)


def test_ranks_follow_the_scores_of_each_query(loaded):
    for _, group in loaded(tiny.longer_results()).groupby("qid"):
        by_rank = group.sort_values("rank")
        assert by_rank["rank"].tolist() == list(range(len(group)))
        assert by_rank["score"].is_monotonic_decreasing


def test_numeric_qids_stay_numbers(loaded, results):
    out = loaded(results.astype({"qid": int, "score": "float32", "rank": "int32"}))
    assert out["qid"].tolist() == [1, 1, 2, 2, 1]
    assert (out["score"].dtype, out["rank"].dtype) == ("float64", "int64")
    np.testing.assert_allclose(out["score"], scores(loaded, results), atol=1e-6)


def test_only_birch_needs_the_scores_of_a_first_stage(loaded, name, results, tolerance):
    bare = results.drop(columns=["score", "rank"])
    if name == "Birch":
        with pytest.raises(pt.validate.InputValidationError, match="score"):
            loaded(bare)
    else:
        np.testing.assert_allclose(scores(loaded, bare), scores(loaded, results), rtol=0, atol=tolerance)


def test_missing_and_empty_texts_have_the_same_score(loaded, results):
    missing = pd.concat([results.iloc[[0]]] * 4, ignore_index=True).assign(text=["", None, float("nan"), "  "])
    empty = scores(loaded, missing)
    assert np.isfinite(empty).all()
    np.testing.assert_allclose(empty, empty[0], atol=1e-5)


def test_very_long_texts_have_finite_scores(loaded, name, results, monkeypatch):
    frame = results.iloc[[0, 1]].assign(text=["cat dog " * 4000, "x" * 5000])
    if name in AGGREGATING:
        with monkeypatch.context() as patch:
            patch.setattr(WindowEncoder, "passes", None)  # nothing is encoded before that
            with pytest.raises(ValueError, match="max_windows"):
                loaded(frame)
        loaded = changed(loaded, max_windows=100)
    assert np.isfinite(scores(loaded, frame)).all()


@pytest.mark.parametrize("name", slow_but(["MaxP"], ["MaxP", "Birch", "PARADE-query", "BiEncoder-avg"]), indirect=True)
@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(frames.ROWS, min_size=1, max_size=6), data=st.data())
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


def test_a_missing_text_column_is_refused(fresh, results, nothing_loads):
    with pytest.raises(pt.validate.InputValidationError, match=rf"{type(fresh).__name__}[\s\S]*text_loader"):
        fresh(results.drop(columns="text"))


def test_invalid_frames_are_refused_before_loading(results, nothing_loads):
    for change, named in [
        *((lambda frame, no=no: frame.assign(qid=["1", no, "1", no, "2"]), "qid") for no in (None, np.nan, pd.NA)),
        (lambda frame: frame.drop(columns=["text", "query"]), "query"),
        (lambda frame: pd.concat([frame, frame[["text"]]], axis=1), "text"),
    ]:
        with pytest.raises((ValueError, pt.validate.InputValidationError), match=named):
            make("MaxP")(change(results))


def test_columns_that_hold_no_text_are_refused(results):
    for values, kind in [
        (["cat", ["a", "dog"], "fish", "", None], "list"),
        ([np.nan, 2.5, 1, 2, 3], "float"),
        (pd.Categorical([1, 2, 1, 2, 1]), "int"),
    ]:
        for column in ["text", "query"]:
            with pytest.raises(ValueError, match=f"'{column}'.*{kind}"):
                make("MaxP")(results.assign(**{column: values}))


@pytest.mark.parametrize(
    "dtype", ["object", "string", "string[pyarrow]", "large_string[pyarrow]", "category", "numpy"], ids=str
)
def test_texts_of_any_type_are_read(dtype, results):
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    texts = results["text"].fillna("")
    texts = pd.Series(list(map(np.str_, texts)), dtype=object) if dtype == "numpy" else texts.astype(dtype)
    texts = texts.where(texts != "", None)
    model = make("MaxP")
    assert scores(model, results.assign(text=texts)).tolist() == scores(model, results).tolist()


def test_text_fields_are_joined(loaded, results, tolerance):
    titles = ["snow", None, "", "river", "old"]
    texts = [" ".join(filter(None, pair)) for pair in zip(titles, results["text"].fillna(""), strict=True)]
    both = scores(changed(loaded, text_field=("title", "text")), results.assign(title=titles))
    np.testing.assert_allclose(both, scores(loaded, results.assign(text=texts)), rtol=0, atol=tolerance)
    body = scores(changed(loaded, text_field="body"), results.rename(columns={"text": "body"}))
    np.testing.assert_allclose(body, scores(loaded, results), rtol=0, atol=tolerance)


def test_a_text_loader_supplies_missing_texts_in_one_call(loaded, results, tolerance):
    for as_object in [True, False]:
        store = tiny.Store(results)
        loading = changed(loaded, text_loader=store if as_object else store.text_loader(["text"]))
        out = loading(results.drop(columns="text").set_axis([3, 1, 1, 0, 8]))
        np.testing.assert_allclose(out["score"], scores(loaded, results), rtol=0, atol=tolerance)
        assert list(out.columns) == ["qid", "query", "docno", "score", "rank"]
        assert out.index.tolist() == [3, 1, 1, 0, 8]
        assert store.calls == 1
        loading(results)
        assert store.calls == 1  # the column is there: nothing to load
        inputs = pt.inspect.transformer_inputs(loading)
        assert [set(columns) - {"score"} for columns in inputs] == [set(NEEDED), set(NEEDED) - {"text"}]


def test_a_text_loader_that_returns_no_texts_is_refused(results):
    for load in (lambda frame: frame, lambda frame: frame.iloc[1:].assign(text="a")):
        with pytest.raises(ValueError, match="text_loader"):
            make("FirstP", text_loader=pt.apply.generic(load))(results.drop(columns="text"))


WORDS = "snow in the city " * 10


def test_truncation_warnings_name_the_causes_except_the_selection_of_windows(cross_encoder):
    for name, arguments, cut_by in [
        ("MaxP", {"max_windows": 2, "selection": "first_last_random", "window_size": 10, "stride": 10}, []),
        ("MaxP", {"preselect": ld.FirstK(1), "window_size": 10, "stride": 10}, []),
        ("MaxP", {"windows": ld.SlidingWindows(10, 10, max_windows=1), "window_size": 150, "stride": 100}, []),
        ("MaxP", {"max_doc_len": 30}, ["max_doc_len=30"]),
        ("MaxP", {"max_doc_len": 30, "max_windows": 1}, ["max_doc_len=30"]),
        ("MaxP", {"max_query_len": 1}, ["max_query_len=1"]),
        ("FirstP", {}, ["window_size=20"]),
        ("FirstP", {"max_doc_len": 30}, ["max_doc_len=30", "window_size=20"]),
        ("FirstP", {"windows": ld.SlidingWindows(10, 10), "window_size": None}, ["windows=Sliding"]),
        ("FirstP", {"layout": "shared", "max_doc_len": 20}, ["layout='shared'"]),
    ]:
        model, frame = make(name, cross_encoder, **arguments), tiny.frame(["old dog"], [WORDS])
        told = told_of(ld.TruncationWarning, lambda model=model, frame=frame: model(frame))
        assert sum(model.coverage.lost.values()) <= sum(model.coverage.truncated.values()) > 0
        assert model.coverage.tokens_read == 40 - sum(
            n for by, n in model.coverage.truncated.items() if "query" not in by
        )
        assert [cause in message for cause, message in zip(cut_by, told, strict=True)] == [True] * len(cut_by)
        assert model.summary(frame) == model.coverage


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "Birch"], indirect=True)
def test_a_summary_equals_the_coverage_of_the_run_and_encodes_nothing(name, tmp_path, monkeypatch):
    cached = {} if name == "BiEncoder-max" else {"score_cache": tmp_path / "scores.sqlite"}
    model, candidates = make(name, max_doc_len=100, **cached), tiny.longer_results()
    before, random_state = candidates.copy(deep=True), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(WindowEncoder, "passes", None)  # nothing is encoded
        told = model.summary(candidates)
    assert model.coverage is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not (tmp_path / "scores.sqlite").exists()
    pd.testing.assert_frame_equal(candidates, before)
    model(candidates)
    assert told == model.coverage == model.summary(candidates)
    assert told.tokens_encoded == 0 < told.truncated["max_doc_len=100"]
    with pytest.raises(pt.validate.InputValidationError, match=type(model).__name__):
        model.summary(candidates.drop(columns="text"))


def test_coverage_counts_documents_queries_and_tokens(fresh, name, results):
    assert fresh.coverage is None
    fresh(results)
    tokens = [6 * 22, 3, 0]  # the long text, which both queries have: 21 words and a full stop, six times
    # The tiny backbone takes 128 tokens: 8 of the query, 3 special ones.
    first = {"FirstP": 20, "BiEncoder-first": 20, "LongP": 117}.get(name, tokens[0])
    coverage = fresh.coverage
    whole, read = 2 * tokens[0] + 3, 2 * first + 3
    assert (coverage.pairs, coverage.tokens, coverage.tokens_read) == (5, whole, read)
    assert bool(coverage.truncated) == bool(coverage.pairs_truncated) == (first < tokens[0])
    assert (coverage.queries, coverage.queries_truncated) == (2, 0)
    assert coverage.as_dict()["windows_per_document"] == coverage.windows / 5


def test_without_max_query_len_a_query_uses_all_tokens_that_fit(name, results):
    """Without a window size, queries get a quarter of 128 tokens: 31 without special tokens."""
    query = "snow in the city " * 7  # 28 tokens
    frame = results.assign(query=[query, query, *results["query"][2:4], query])
    whole, short = make(name, max_query_len=None), make(name, max_query_len=4)
    expected = scores(make(name, max_query_len=31), frame)
    np.testing.assert_allclose(scores(whole, frame), expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(scores(short, frame), expected, rtol=1e-5, atol=1e-5)
    assert whole.coverage.query_tokens_read == whole.coverage.query_tokens == 28 + 4
    np.testing.assert_allclose(scores(whole, frame.iloc[[0]]), expected[:1], rtol=1e-5, atol=1e-5)
    assert ("max_query_len=None" in repr(whole)) == (name != "MaxSim")  # its default


def test_queries_get_the_tokens_that_windows_leave(results):
    longest, apart = "the maximum input length of the backbone leaves", "the checkpoint's maximum query length of 126"
    for name, changes, room, size, cause in [
        ("MaxP", {}, 105, 20, "window_size=20 leaves"),  # 128 - 3 - 20
        ("MaxP", {"window_size": 100}, 25, 100, "window_size=100 leaves"),
        ("AvgP", {"window_size": None}, 31, 94, "window_size=94 leaves"),
        ("LongP", {}, 31, 94, longest),
        ("LongP", {"max_doc_len": 60}, 65, 60, longest),
        ("Birch", {}, 31, 94, longest),
        ("BiEncoder-max", {}, 126, 20, apart),  # read apart
    ]:
        model = make(name, max_query_len=None, **changes)
        reader = model.model.reader
        assert (reader.max_query_len, reader.windows.largest) == (room, size)
        for length in (room, room + 1):
            asked = results.iloc[[1]].assign(query="dog " * length)
            told = told_of(ld.TruncationWarning, lambda model=model, asked=asked: model(asked))
            assert model.coverage.queries_truncated == len(told) == length - room
        cause = cause if cause == apart else f"the {room} tokens that {cause} for a query"
        assert model.coverage.truncated == {cause: 1}
        assert f"by {cause}" in told[0]


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, [*CONTRACT, "PARADE-attn"]), indirect=True)
def test_explanations_describe_windows_and_do_not_change_scores(loaded, name, results):
    explaining = changed(loaded, explain=True)
    out = explaining(results)
    np.testing.assert_allclose(out["score"], scores(loaded, results), atol=1e-5)
    columns = ("window_scores", "window_weights", "window_spans", "best_start", "best_end", "term_scores")
    added = {
        *columns,
        "window_tokenizer",
        "window_field",
        "window_digest",
        *(["term_places"] if name == "MaxSim" else []),
    }
    assert set(out.columns) - set(results.columns) == added
    assert list(explaining(results.iloc[:0]).columns) == list(out.columns)
    for frame in (out, explaining(results.iloc[:0])):
        assert frame[["best_start", "best_end"]].dtypes.tolist() == ["int64", "int64"]
    for explained in out.itertuples():
        assert len(explained.window_scores) == len(explained.window_spans) >= 1
        best = int(np.argmax(explained.window_scores))
        assert (explained.best_start, explained.best_end) == explained.window_spans[best]
        assert (explained.window_weights is not None) == (name == "PARADE-attn")


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"], indirect=True)
def test_a_progress_bar_is_shown_only_if_verbose(loaded, results, capsys):
    loaded(results)
    assert capsys.readouterr().err == ""
    changed(loaded, verbose=True)(results)
    shown = capsys.readouterr().err
    assert type(loaded).__name__ in shown
    assert "100%" in shown


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, TRAINABLE), indirect=True)
def test_an_untrained_model_warns_once(name, plain_encoder, cross_encoder, results):
    for backbone, untrained in ((plain_encoder, True), (cross_encoder, name in UNTRAINED)):
        model = make(name, backbone)
        told = told_of(ld.UntrainedWarning, lambda model=model: (model(results), model(results)))
        assert len(told) == int(untrained)
        assert all(type(model).__name__ in message for message in told)


def test_constructing_a_model_loads_no_weights_and_keeps_the_random_state(name, nothing_loads):
    make(name, "no/such-model")  # checkpoints among its arguments are made when they are first needed
    state = torch.get_rng_state()
    made = make(name, "no/such-model")
    assert repr(made).startswith(type(made).__name__)
    assert torch.equal(state, torch.get_rng_state())


def test_a_missing_gpu_is_an_error_before_anything_loads(results, nothing_loads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda'"):
        ld.MaxP(device="cuda")(results)


def test_settings_are_made_once_after_a_change(cross_encoder, results, monkeypatch):
    made, make_settings = [], ld.MaxP.make_settings
    monkeypatch.setattr(ld.MaxP, "make_settings", lambda self: made.append(make_settings(self)) or made[-1])
    model = ld.MaxP(cross_encoder, stride=20, device="cpu")
    for window_size in (40, 50):
        made.clear()
        model.window_size = window_size
        model(results)
        model(results)
        (settings,) = made
        assert model.model.settings is settings
        assert settings.windows.size == window_size


def test_a_model_can_be_pickled_before_and_after_loading_its_weights(fresh, loaded, results):
    unloaded = pickle.loads(pickle.dumps(fresh))
    expected = scores(fresh, results)
    np.testing.assert_allclose(scores(loaded, results), expected, atol=1e-5)  # scores are reproducible
    np.testing.assert_allclose(scores(unloaded, results), expected, atol=1e-5)
    restored = pickle.loads(pickle.dumps(fresh))
    np.testing.assert_allclose(scores(restored, results), expected, atol=1e-5)
    assert repr(restored) == repr(fresh)


def test_a_notebook_shows_the_repr_of_a_model_and_its_coverage(cross_encoder, results):
    model = make("MaxP", cross_encoder)
    assert html.escape(repr(model)) in model._repr_html_()
    assert "MaxP</div>" in re.sub(r"\s+", "", model._repr_html_())  # PyTerrier's drawing
    assert "<a href=" not in model._repr_html_()  # there is no page to lead to
    model(results)
    assert f"<td>{model.coverage.tokens}</td>" in model.coverage._repr_html_()


@pytest.mark.parametrize(
    "name", slow_but(REPRESENTATIVE, [name for name in CONTRACT if name != "Birch"]), indirect=True
)
def test_plain_texts_are_ranked(loaded):
    texts = ["a cat sat", "the dog", "", "a cat sat"]
    found = loaded.rank("cat", texts)
    assert list(found.columns) == ["number", "score", "rank", "text"]
    assert found["text"].tolist() == [texts[number] for number in found["number"]]
    assert found["rank"].tolist() == [0, 1, 2, 3]
    frame = pd.DataFrame({"qid": "q", "query": "cat", "docno": list("abcd"), "text": texts})
    np.testing.assert_allclose(found.sort_values("number")["score"], loaded(frame)["score"], atol=1e-5)


def test_rank_returns_all_given_texts():
    for texts in [[], ["a cat", "cut \ud83d"]]:
        found = make("MaxP").rank("cat", texts)
        assert found["text"].dtype == object
        assert set(found["text"]) == set(texts)


def test_ranked_texts_are_explained():
    found = make("MaxP", explain=True).rank("cat", ["a cat"])
    assert list(found.columns)[:5] == ["number", "score", "rank", "text", "window_scores"]


def test_rank_refuses_values_that_are_not_texts():
    for query, texts, argument in [("cat", "a cat", "texts"), ("cat", ["a", None], "texts"), (3, ["a"], "query")]:
        with pytest.raises(ValueError, match=argument):
            make("MaxP").rank(query, texts)


def test_rank_refuses_a_text_field_that_it_cannot_fill():
    for field in [("title", "text"), "qid", "query", "docno", "number", "score", "rank"]:
        with pytest.raises(ValueError, match="text_field"):
            make("MaxP", text_field=field).rank("cat", ["a cat"])
