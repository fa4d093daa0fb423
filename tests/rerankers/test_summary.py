"""What a summary says before a run is what the run reads; it changes nothing; its time is in proportion to tokens."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.rerankers import summary as summary_module

from ..support.scorers import Passes
from ..support.systems import BI_ENCODERS, QUIET, REMEMBERING, REPRESENTATIVE, SYSTEMS, make, slow_but
from ..support.tiny import LONG, frame, longer_results

pytestmark = QUIET

RANDOM = random.Random(1)
MANY = frame(
    ["old dog", "snow in the city"],
    [" ".join(RANDOM.choices(LONG.split(), k=words)) for words in [400] * 3 + [120] * 5 + [8] * 40],
)


def check_against_the_run(model, candidates: pd.DataFrame) -> None:
    before, warned, random_state = candidates.copy(), set(model.warned), torch.get_rng_state()
    told = model.summary(candidates)
    assert model.coverage is None
    assert model.warned == warned
    assert torch.equal(torch.get_rng_state(), random_state)
    pd.testing.assert_frame_equal(candidates, before)
    forget_embeddings()
    model.transform(candidates)
    coverage = model.coverage
    assert told.coverage == coverage
    assert told.windows_per_document.sum() == coverage.windows
    assert len(told.windows_per_document) == coverage.documents
    not_read = {"queries": coverage.query_tokens - coverage.query_tokens_read}
    not_read["documents"] = coverage.tokens - coverage.tokens_read
    assert told.unread.groupby("of")["tokens"].sum().to_dict() == {
        of: tokens for of, tokens in not_read.items() if tokens
    }
    assert told.pairs == len(candidates.fillna("").drop_duplicates(["query", "text"]))
    # These encode queries by themselves, too.
    if type(model).__name__ not in ("LateIR", "MORESPlus", "TKL", "BiEncoder"):
        encoded = coverage.tokens_computed if getattr(model, "layout", "pair") == "padded" else coverage.tokens_encoded
        assert told.tokens_of_inputs == encoded
    assert told.seconds > 0


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, SYSTEMS))
def test_a_summary_is_what_the_run_reads(name):
    check_against_the_run(make(name, device="cpu"), longer_results())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("MaxP", {"max_query_len": 1}),
        ("MaxP", {"max_windows": 2, "selection": "first_last_random"}),
        ("MaxP", {"max_windows": 4, "max_doc_len": 50, "preselect": ld.BM25Windows(2)}),
        ("MaxP", {"windows": ld.SentenceWindows(max_sentences=1, max_windows=3), "window_size": 150, "stride": 100}),
        ("FirstP", {"preselect": ld.KeyBlocks(ld.BM25Windows(2), ld.GreedyChunks(6))}),
        ("FirstP", {"layout": "padded"}),
        ("PARADE-query", {}),  # which encodes equal inputs each time
        ("BiEncoder-first", {}),
        ("BiEncoder-max", {"max_doc_len": 30}),
    ],
    ids=str,
)
def test_a_summary_with_other_settings_is_what_the_run_reads(name, changes):
    check_against_the_run(make(name, device="cpu", **changes), longer_results())


def test_what_is_not_read_is_told_by_argument():
    def told(name, **changes):
        unread = make(name, **changes).summary(longer_results()).unread
        return list(zip(unread["of"], unread["argument"], strict=True))

    assert told("MaxP") == []
    assert told("FirstP") == [("documents", "window_size=20")]
    assert told("MaxP", max_query_len=1, max_windows=2, max_doc_len=40) == [
        ("queries", "max_query_len=1"),
        ("documents", "max_doc_len=40"),
        ("documents", "max_windows=2"),
    ]
    selector = ld.FirstK(1)
    assert told("MaxP", max_windows=2, preselect=selector) == [
        ("documents", f"max_windows=2 and preselect={selector!r}")
    ]
    assert told("FirstP", max_doc_len=20) == [("documents", "max_doc_len=20")]
    longer = longer_results().assign(query=" ".join([LONG] * 20))
    [argument] = make("MaxP", max_query_len=None, device="cpu").summary(longer).unread["argument"]
    assert argument.startswith("the longest input of the backbone, which takes ")


def test_tokens_that_are_not_read_are_counted():
    # 30 words, windows of 20 tokens that begin every 10: two windows read all, one leaves ten.
    candidates = frame(["old dog in the rain"], [" ".join(LONG.split()[:30])])
    told = make("MaxP", max_query_len=2, max_windows=1).summary(candidates)
    assert told.unread.to_dict("list") == {
        "of": ["queries", "documents"],
        "tokens": [3, 10],
        "share": [3 / 5, 10 / 30],
        "argument": ["max_query_len=2", "max_windows=1"],
    }
    assert (told.inputs, told.tokens_of_inputs) == (1, 2 + 20 + 3)


def test_a_summary_reads_well():
    told = make("MaxP", max_windows=1, device="cpu").summary(longer_results())
    title, *lines = repr(told).splitlines()
    assert title == f"{told.model} would read"
    assert [line.split()[0] for line in lines] == ["queries", "documents", "windows", "to", "time"]
    assert f"{told.unread['tokens'][0]:,} (" in lines[1]
    assert "cut by max_windows=1" in lines[1]
    assert "(estimate: " in lines[-1]
    assert "on cpu in float32" in lines[-1]
    assert "max_windows=1" in told._repr_html_()
    assert "<table" in told._repr_html_()


def test_scores_in_the_cache_are_not_to_be_made_again(tmp_path):
    file, candidates = tmp_path / "scores.sqlite", longer_results()
    model = make("MaxP", score_cache=file)
    assert model.summary(candidates).cached == 0
    assert not file.exists()
    model.transform(candidates.head(3))
    content = file.read_bytes()
    some = model.summary(candidates)
    assert some.cached == len(candidates.head(3).fillna("").drop_duplicates(["query", "text"]))
    assert file.read_bytes() == content
    model.transform(candidates)
    assert some.coverage == model.coverage
    assert some.tokens_of_inputs == model.coverage.tokens_encoded
    done = model.summary(candidates)
    assert (done.cached, done.inputs, done.seconds) == (done.pairs, 0, 0.0)
    assert done.coverage == some.coverage
    assert "nothing to compute" in repr(done)
    assert model.score_cache == file


@pytest.mark.parametrize("name", slow_but(["BiEncoder-max", "LateIR"], [*REMEMBERING, "MaxP"]))
def test_what_is_remembered_stays_remembered(name):
    model, candidates = make(name), longer_results()
    model.transform(candidates)
    first = model.coverage.tokens_encoded
    told = model.summary(candidates)
    model.transform(candidates)
    assert model.coverage.tokens_encoded == (0 if name in REMEMBERING else first)
    assert told.seconds > 0


def test_weights_that_changed_are_noticed_as_if_there_had_been_no_summary():
    candidates = longer_results()
    model, other = make("LateIR"), make("LateIR")
    model.transform(candidates)
    for each in (model, other):
        with torch.no_grad():
            each.load_scorer().encoder.backbone.embeddings.word_embeddings.weight.mul_(1.5)
    model.summary(candidates)
    np.testing.assert_allclose(model(candidates)["score"], other(candidates)["score"], atol=1e-5)


def test_a_selecting_model_is_left_as_it_was(tmp_path):
    inner = make("FirstP", window_size=8, score_cache=tmp_path / "inner.sqlite")
    check_against_the_run(make("MaxP", device="cpu", preselect=ld.CrossEncoderWindows(2, inner)), longer_results())
    other = make("FirstP", window_size=8, score_cache=tmp_path / "other.sqlite")
    make("MaxP", preselect=ld.CrossEncoderWindows(2, other)).summary(longer_results())
    assert not other.warned
    assert other.score_cache == tmp_path / "other.sqlite"
    assert not other.score_cache.exists()


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"])
def test_the_time_is_in_proportion_to_what_is_encoded(name, monkeypatch):
    model = make(name, device="cpu")
    passes = Passes(model.load_scorer())

    def computed() -> float:
        return sum(rows * tokens for rows, tokens in passes.shapes) / 1000

    monkeypatch.setattr(summary_module, "perf_counter", computed)  # a machine with a thousand tokens per second
    told = model.summary(MANY)
    assert 1 < told.timed_pairs < len(MANY)
    assert told.timed_seconds > summary_module.TIMED_SECONDS / 2
    forget_embeddings()
    before = computed()
    model.transform(MANY)
    assert told.seconds == pytest.approx(computed() - before, rel=0.15)


@pytest.mark.parametrize("name", ["MaxP", "Birch", *BI_ENCODERS])
@pytest.mark.parametrize("missing", ["text", "query", "score"])
def test_bad_input_gives_the_errors_of_transform(name, missing):
    candidates = longer_results().drop(columns=missing)
    if missing == "score" and name != "Birch":
        assert make(name).summary(candidates).pairs
        return
    model = make(name)
    with pytest.raises(pt.validate.InputValidationError) as of_transform:
        model.transform(candidates)
    with pytest.raises(pt.validate.InputValidationError) as of_summary:
        model.summary(candidates)
    assert str(of_summary.value) == str(of_transform.value)


def test_texts_may_come_from_a_loader():
    candidates = longer_results()
    loader = pt.apply.generic(
        lambda rows: rows.merge(candidates[["docno", "text"]].drop_duplicates("docno"), on="docno")
    )
    bare = candidates.drop(columns="text").drop_duplicates("docno")
    assert make("MaxP", text_loader=loader).summary(bare).coverage.documents > 1


def test_no_rows():
    model = make("MaxP")
    told = model.summary(longer_results().head(0))
    assert (told.pairs, told.seconds, told.coverage.documents, len(told.unread)) == (0, 0.0, 0, 0)
    assert "documents" in repr(told)
    assert not model.is_loaded
