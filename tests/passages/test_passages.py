"""Passages cuts documents into rows, from which PyTerrier makes documents again; no text is lost."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyterrier_longdoc as ld

from ..support import memory, tiny
from ..support.systems import QUIET

pytestmark = QUIET

FIVE = ld.SlidingWindows(5, 5)


def texts_of(out):
    return out.groupby(out["docno"].str.rsplit("%p", n=1).str[0], sort=False)["text"].agg(list).to_dict()


@given(
    texts=st.lists(st.text(alphabet="ab é猫🐈‍\u0301\n.,", max_size=40), min_size=1, max_size=4),
    windows=st.sampled_from([FIVE, ld.GreedyChunks(3), ld.SentenceWindows(max_sentences=1), ld.SlidingWords(2, 2)]),
    tokenizer=st.sampled_from([None, tiny.tokenizer()]),
)
def test_passages_that_do_not_overlap_join_to_the_text(texts, windows, tokenizer):
    documents = pd.DataFrame({"docno": range(len(texts)), "text": texts})
    passages = ld.Passages(windows, tokenizer=tokenizer)(documents)
    assert {docno: "".join(parts) for docno, parts in texts_of(passages).items()} == dict(
        zip("0123", texts, strict=False)
    )
    for docno, text, (start, end) in passages[["docno", "text", "passage_span"]].to_numpy():
        assert texts[int(docno.split("%p")[0])][start:end] == text


DOCUMENTS = pd.DataFrame({"docno": ["a", "b"], "text": ["1 2 3 4 5 6 7", ""], "url": ["x", "y"]})


def test_passages_are_named_after_their_document():
    out = ld.Passages(FIVE)(DOCUMENTS)
    assert out["docno"].tolist() == ["a%p0", "a%p1", "b%p0"]
    assert out["text"].tolist() == ["1 2 3 4 5 ", "6 7", ""]  # the tail stays, and so does a document without text
    assert out["url"].tolist() == ["x", "x", "y"]


def test_results_keep_their_columns_and_the_input_is_unchanged():
    results = DOCUMENTS.assign(qid="1", query="q", score=[2.0, 1.0], rank=[0, 1]).set_axis([4, 4])
    before = results.copy()
    out = ld.Passages(FIVE)(results)
    pd.testing.assert_frame_equal(results, before)
    assert out["rank"].tolist() == [0, 0, 1]
    assert out.columns.tolist() == [*results.columns, "passage_span"]


def test_an_empty_frame_gets_the_column_of_spans():
    assert ld.Passages(FIVE)(DOCUMENTS.iloc[:0]).columns.tolist() == [*DOCUMENTS.columns, "passage_span"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_text_not_with_its_product_with_the_passages():
    text = "word " * 100_000
    documents = pd.DataFrame({"docno": ["a"], "text": [text], "body": [text]})
    passages = []
    assert memory.growth(lambda: passages.append(ld.Passages()(documents))) < 120
    assert passages[0]["body"].iloc[0] is passages[0]["body"].iloc[-1]


def test_a_title_is_joined_or_repeated_in_each_passage():
    documents = pd.DataFrame({"docno": ["a"], "title": ["T"], "text": ["1 2 3 4"]})
    out = ld.Passages(ld.SlidingWindows(3, 1), text_field=("title", "text"), repeat="title")(documents)
    assert out["text"].tolist() == ["T\n1 2 3 ", "T\n2 3 4"]
    assert out["passage_span"].tolist() == [(0, 6), (2, 7)]
    joined = ld.Passages(ld.SlidingWindows(3, 3), text_field=("title", "text"))(documents)
    assert joined["text"].tolist() == ["T 1 2 ", "3 4"]


@pytest.mark.parametrize(
    ("again", "model"),
    [(pt.text.max_passage, ld.MaxP), (pt.text.first_passage, ld.FirstP), (pt.text.mean_passage, ld.AvgP)],
)
def test_aggregated_passages_have_the_scores_of_the_windowed_model(again, model, cross_encoder, results):
    windows = ld.SlidingWindows(20, 20)
    cut = ld.Passages(windows, tokenizer=cross_encoder)
    passages = (cut >> ld.FirstP(cross_encoder, max_query_len=8, dtype="float32") >> again())(
        results.fillna({"text": ""})
    )
    expected = model(cross_encoder, windows=windows, max_query_len=8, dtype="float32")(results)
    found = passages.set_index(["qid", "docno"])["score"]
    np.testing.assert_allclose(
        found.reindex(list(zip(results["qid"], results["docno"], strict=True))), expected["score"], atol=1e-5
    )


def test_passages_can_be_indexed():
    indexed = []

    class Index(pt.Indexer):
        def index(self, iter, **kwargs):
            indexed.extend(iter)

    (ld.Passages(FIVE) >> Index()).index(iter([{"docno": "a", "text": "1 2 3 4 5 6 7"}, {"docno": "b", "text": "8"}]))
    assert [row["docno"] for row in indexed] == ["a%p0", "a%p1", "b%p0"]


def test_a_docno_that_cannot_be_restored_is_refused():
    for docno in ["a%p1", None, np.nan]:
        with pytest.raises(ValueError, match=f"docno {docno!r}"):
            ld.Passages()(pd.DataFrame({"docno": [docno], "text": ["x"]}))


def test_windows_of_the_document_are_refused_for_its_passages():
    columns = {"qid": "1", "query": "q", "score": 1.0, "window_spans": [[(0, 3)]], "window_scores": [[1.0]]}
    explained = pd.DataFrame(
        {"docno": ["a"], "text": ["one two three four five six"], "window_field": "text", **columns}
    )
    out = ld.Passages(FIVE)(explained)
    assert out["window_field"].tolist() == ["", ""]
    with pytest.raises(ValueError, match="replaced"):
        ld.Evidence(50, tokenizer=len)(out)
