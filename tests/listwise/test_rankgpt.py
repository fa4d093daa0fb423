"""RankGPT as a PyTerrier transformer: frames, inspection, experiments."""

from __future__ import annotations

import unittest

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.listwise import BackToFront, RankGPT

from ..support import frames
from ..support.llm import shown

NEW_COLUMNS = ["score", "rank"]


def by_length(messages) -> str:
    """Prefers long texts, then the alphabet."""
    documents = sorted(shown(messages), key=lambda one: (-len(one[1]), one[1]))
    return " > ".join(f"[{number}]" for number, _ in documents)


def nobody(messages) -> str:
    raise AssertionError("asked")


def ranking_by(llm) -> RankGPT:
    return RankGPT(llm, schedule=BackToFront(2, 1), concurrency=2, shuffles=2)


def test_an_empty_frame_gets_the_same_columns_and_types(results):
    full = ranking_by(by_length)(results)
    empty = ranking_by(nobody)(results.iloc[:0])
    assert list(empty.columns) == list(full.columns)
    assert empty.dtypes[NEW_COLUMNS].equals(full.dtypes[NEW_COLUMNS])
    bare = ranking_by(nobody)(pd.DataFrame(columns=["qid", "query", "docno", "text", "_x"]))
    assert bare.columns.tolist() == ["qid", "query", "docno", "text", "_x", *NEW_COLUMNS]
    with pytest.raises(pt.validate.InputValidationError):
        ranking_by(nobody)(pd.DataFrame())


def test_rows_columns_and_index_are_those_of_the_input(results):
    frame = results.assign(title="t", _x=1.5, label_of_user="l").set_index(pd.Index([7, 7, 0, 3, 3]))
    before = frame.copy(deep=True)
    out = ranking_by(by_length)(frame)
    assert frame.equals(before)
    others = [column for column in frame.columns if column not in NEW_COLUMNS]
    pd.testing.assert_frame_equal(out[others], frame[others])
    assert (out["score"].dtype, out["rank"].dtype) == (np.float64, np.int64)
    for _, query in out.groupby("qid"):
        assert sorted(query["score"]) == list(range(1, len(query) + 1))
        assert (query["score"] + query["rank"] == len(query)).all()


def test_equal_texts_of_a_docno_are_one_document(results):
    """Equal texts are one document, different ones are several."""
    single = ranking_by(by_length)(results)["score"].tolist()
    out = ranking_by(by_length)(pd.concat([results, results.iloc[[0, 3]]]))
    assert out["score"].tolist() == [*single, single[0], single[3]]
    frame = pd.DataFrame({"qid": "1", "query": "q", "docno": "d", "text": ["a", "bbb", "cc"]})
    assert RankGPT(by_length)(frame)["score"].tolist() == [1.0, 3.0, 2.0]


def test_texts_come_from_several_columns_or_a_loader(results):
    scores = RankGPT(by_length)(results)["score"].tolist()
    parts = results.drop(columns="text").assign(title="T", body=results["text"])
    assert RankGPT(by_length, text_field=("title", "body"))(parts)["score"].tolist() == scores
    loader = pt.apply.generic(lambda frame: frame.assign(text=results["text"].tolist()))
    assert RankGPT(by_length, text_loader=loader)(results.drop(columns="text"))["score"].tolist() == scores


def test_two_queries_with_one_qid_are_refused(results):
    with pytest.raises(ValueError, match="qid '1'"):
        RankGPT(nobody)(results.assign(query=list("abcde")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(frames.ROWS, max_size=12))
def test_any_frame_is_ranked(rows):
    # As objects: Arrow's strings, which pandas takes where pyarrow is installed, hold no half of a surrogate pair.
    frame = pd.DataFrame(rows, columns=["qid", "docno", "text", "score"], dtype=object).assign(query="q")
    for _, query in ranking_by(by_length)(frame).groupby("qid"):
        documents = len(query.fillna({"text": ""}).drop_duplicates(["docno", "text"]))
        assert query["score"].nunique() == query["score"].max() == documents


# PyTerrier.


def test_the_test_case_of_pyterrier_passes():
    case = pt.testing.transformer_test_class(lambda: ranking_by(nobody))
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


def test_pyterrier_can_inspect_rankgpt_without_a_call():
    ranker = ranking_by(nobody)
    assert pt.inspect.transformer_inputs(ranker) == [["qid", "docno", "query", "text"]]
    columns = pt.inspect.transformer_outputs(ranker, ["qid", "query", "docno", "text"])
    assert columns == ["qid", "query", "docno", "text", *NEW_COLUMNS]
    attributes = {attribute.name: attribute.value for attribute in pt.inspect.transformer_attributes(ranker)}
    assert attributes["llm"] is nobody
    assert pt.inspect.transformer_apply_attributes(ranker, retries=0).retries == 0
    assert pt.inspect.subtransformers(ranker) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 0),
        ("on_failure", "nan"),
        ("text_field", ""),
        ("llm", "gpt"),
        ("schedule", "topdown"),
        ("schedule", BackToFront),
        ("prompt", "Rank these."),
        ("windows", "sentences"),
        ("preselect", 3),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, results):
    with pytest.raises(ValueError, match=f"{name}="):
        RankGPT(**{"llm": nobody, name: value})
    later = RankGPT(nobody)
    setattr(later, name, value)
    with pytest.raises(ValueError, match=f"{name}="):
        later(results)
