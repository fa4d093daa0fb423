"""The relevance judge: grades, chunks, failures, cache and agreement with people."""

from __future__ import annotations

import re
import warnings

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.analysis.judging import JUDGEMENT_COLUMNS, RelevanceJudge, agreement, parse_grade
from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.listwise import CallableBackend, IncompleteReplyWarning, Reply, UnreadableReplyError
from pyterrier_longdoc.modelling.preselection import BM25Windows

from ..support import tiny
from ..support.llm import Scripted

SENTENCE = "The cat and the dog walk to the river in the rain. "


def marked(messages) -> str:
    """Grades a chunk by the number after "worth" in it."""
    found = re.search(r"worth (\d)", messages[-1]["content"])
    return f"grade: {found[1] if found else 0}"


def frame(*texts: str) -> pd.DataFrame:
    docnos = [f"d{i}" for i in range(len(texts))]
    return pd.DataFrame({"qid": "1", "query": "wet [1] cats", "docno": docnos, "text": list(texts)})


# Grades.


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("grade: 2", 2),
        ("Grade: 0", 0),
        ("**Grade:** 3", 3),
        ("grade = 1", 1),
        ('{"grade": 2}', 2),
        ("3", 3),
        (" **2**. ", 2),
        ("The text fits.\ngrade: 1", 1),
        ("grade: 1? No. Final answer:\ngrade: 3.", 3),
        ("<think>grade: 0</think>grade: 2", 2),
        ("It fits. <answer>grade: 2</answer>", 2),
        ("<answer>3</answer>", 3),
        ("ｇｒａｄｅ：２", 2),  # noqa: RUF001
    ],
)
def test_a_grade_is_read_in_any_form(reply, grade):
    assert parse_grade(reply) == grade


@pytest.mark.parametrize(
    "reply",
    [
        "", "I cannot judge this (rule 3.2).", "grade: 4", "grade: -1", "grade: 2.5", "grade: 23", "grade: 2/10", "two",
        "Grade 2 students would like it.", "upgrade: 2", "5", "[2]", "<think>grade: 2",
    ],
)  # fmt: skip
def test_other_replies_are_not_a_grade(reply):
    assert parse_grade(reply) is None


# Documents.


def test_the_label_is_the_best_grade_of_the_chunks():
    text = SENTENCE * 4 + "This is worth 1 point. " + SENTENCE * 4 + "That is worth 3 points. " + SENTENCE * 4
    judge = RelevanceJudge(marked, chunk_tokens=30)
    out = judge(frame(text, SENTENCE, ""))
    first = out.iloc[0]
    assert out["label"].tolist() == [3, 0, 0]
    assert (first["chunk_grades"][first["best_chunk"]], max(first["chunk_grades"])) == (3, 3)
    start, end = first["chunk_spans"][first["best_chunk"]]
    assert "worth 3" in text[start:end]
    assert out["judged_share"].tolist() == [1.0] * 3
    assert (out["chunk_grades"][2], out["best_chunk"][2]) == ([], -1)


@pytest.mark.parametrize("tokenizer", [None, tiny.tokenizer()])
def test_chunks_are_whole_sentences_and_all_of_the_text(tokenizer):
    text = SENTENCE * 20
    judge = RelevanceJudge(marked, chunk_tokens=30, tokenizer=tokenizer)
    spans = judge.chunks(text)
    assert len(spans) == 10  # two sentences of twelve words and a full stop each
    assert all(text[start:end] == (SENTENCE * 2).strip() for start, end in spans)
    assert judge.chunks(" ") == []


def test_preselect_chooses_the_chunks_that_are_judged():
    far = SENTENCE * 6 + "Wet cats purr, worth 3. " + SENTENCE * 6 + "Wet cats, worth 1."
    model = Scripted(marked)
    judge = RelevanceJudge(model, chunk_tokens=13, max_chunks=2, preselect=BM25Windows(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruncationWarning)
        out = judge(frame(far, SENTENCE, ""))
    assert out["label"].tolist() == [3, 0, 0]
    assert out["chunk_grades"].tolist() == [[3, 1], [0], []]
    found = " ".join(far[start:end].strip() for start, end in out["chunk_spans"][0])
    assert found == "Wet cats purr, worth 3. Wet cats, worth 1."
    assert 0 < out["judged_share"][0] < 0.1
    assert out["judged_share"].tolist()[1:] == [1.0, 1.0]
    assert out["best_chunk"].tolist() == [0, 0, -1]
    assert len(model.asked) == 3


def test_chunks_beyond_max_chunks_cause_a_warning():
    model = Scripted(marked)
    judge = RelevanceJudge(model, chunk_tokens=13, max_chunks=2)
    with pytest.warns(TruncationWarning, match="max_chunks=2 leaves 6 of 9 chunks"):
        out = judge(frame(SENTENCE * 8, SENTENCE))
    assert len(model.asked) == 3
    assert out["judged_share"].tolist() == pytest.approx([2 / 8, 1], abs=0.01)


def test_an_unreadable_grade_is_asked_for_again():
    model = Scripted("no", "grade: 2")
    assert RelevanceJudge(model, retries=1).grade("q", "text") == 2
    assert "grade: N" in model.asked[1][-1]["content"]


@pytest.mark.parametrize(
    ("reply", "named", "calls"), [(Reply("no"), "'no'", 2), (Reply("", problem="raise max_tokens"), "max_tokens", 1)]
)
def test_a_grade_that_stays_unreadable_raises(reply, named, calls):
    judge = RelevanceJudge(lambda messages: reply, retries=1)
    with pytest.raises(UnreadableReplyError, match=f"query '1': .*{named}"):
        judge(frame("x"))
    assert judge.client.calls == calls


def test_chunks_without_a_grade_can_be_left_unjudged():
    judge = RelevanceJudge(Scripted("no"), retries=0, on_failure="unjudged", chunk_tokens=13)
    with pytest.warns(IncompleteReplyWarning, match="2 of 2"):
        out = judge(frame(SENTENCE * 2))
    assert out["label"].tolist() == [-1]
    assert (out["chunk_grades"][0], out["best_chunk"][0]) == ([-1, -1], -1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"chunk_tokens": 0}, "chunk_tokens"), ({"preselect": 3}, "preselect"), ({"request": "{query}"}, "request")],
)
def test_wrong_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        RelevanceJudge(**{"llm": marked, **arguments})


@pytest.fixture
def judge() -> RelevanceJudge:
    return RelevanceJudge(CallableBackend(marked, name="marked"), verbose=True)


def test_a_judge_keeps_rows_and_columns_and_replaces_labels(judge, results):
    inp = results.assign(label="replaced").set_index(pd.Index([7, 7, 0, 3, 3]))
    out = judge(inp)
    pd.testing.assert_frame_equal(out[results.columns], inp[results.columns])
    assert out["label"].tolist() == [0] * 5


def test_an_empty_frame_gets_the_columns_of_judgements(judge, results):
    empty, out = judge(results.iloc[:0]), judge(results)
    assert set(empty.columns) == {*results.columns, *JUDGEMENT_COLUMNS}
    assert empty.dtypes[list(JUDGEMENT_COLUMNS)].equals(out.dtypes[list(JUDGEMENT_COLUMNS)])
    columns = pt.inspect.transformer_outputs(judge, ["qid", "query", "docno", "text"])
    assert columns == ["qid", "query", "docno", "text", *JUDGEMENT_COLUMNS]


# Agreement.


def labels(values, column="docno") -> pd.DataFrame:
    return pd.DataFrame({"qid": 1, column: [f"d{i}" for i in range(len(values))], "label": values})


HUMAN, MODEL = labels([0, 0, 1, 2, 3, 3, -2, 1]), labels([0, 1, 1, 2, 3, 2, 0, -1])


def test_agreement_is_cohens_kappa_of_all_grades_and_of_relevance_from_a_grade():
    pytest.importorskip("sklearn")
    found = agreement(MODEL.assign(qid="1"), HUMAN)
    assert found[["pairs", "unjudged"]].tolist() == [7, 1]
    observed = 5 / 7
    expected = (3 * 2 + 1 * 2 + 1 * 2 + 2 * 1) / 49
    assert found["kappa"] == pytest.approx((observed - expected) / (1 - expected))
    binary_expected = (3 * 2 + 4 * 5) / 49
    assert found["binary kappa"] == pytest.approx((6 / 7 - binary_expected) / (1 - binary_expected))
    assert found["weighted kappa"] > found["kappa"]
    strict = agreement(MODEL, HUMAN, relevant_from=3)
    assert strict["binary kappa"] == pytest.approx((6 / 7 - (5 * 6 + 2 * 1) / 49) / (1 - (5 * 6 + 2 * 1) / 49))
