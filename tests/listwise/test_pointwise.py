"""Pointwise asks about one document at a time and scores it by log-probabilities."""

from __future__ import annotations

import math

import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.listwise import IncompleteReplyWarning, LLMClient, Pointwise, Reply, UnreadableReplyError
from pyterrier_longdoc.listwise.prompt_budget import Tokens
from pyterrier_longdoc.modelling.windows import SentenceWindows

from ..support.llm import GRADE, Scripted, candidates, order, worth


def judge(messages):
    value = int(GRADE.search(messages[-1]["content"])[1])
    return Reply("Yes", 30, 1, logprobs={"Yes": -1.0, " yes": -1.0, "No": -value / 10, "The": -9.0})


def judged(run):
    """The scores of `judge`: log-odds, p(yes) being that of both tokens."""
    return pytest.approx((math.log(2) - 1.0 + worth(run) / 10).tolist())


def grader(messages):
    value = int(GRADE.search(messages[-1]["content"])[1])
    return Reply("2", 30, 1, logprobs={"0": -value / 10, " 2": -1.0, "2": -1.0, "The": -0.1, "7": -0.1})


def in_words(messages):
    return Reply("Good", 30, 1, logprobs={"Good": -1.0, "Bad": -2.0})


def only_yes_for_2(messages):
    return Reply("", logprobs={"Yes": -1.0}) if "document 2" in messages[-1]["content"] else judge(messages)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_scores_are_the_log_odds_of_yes(concurrency):
    run = candidates(queries=2, documents=6)
    assert Pointwise(judge, concurrency=concurrency)(run)["score"].tolist() == judged(run)


def test_the_input_is_unchanged_and_its_index_kept():
    run = candidates(queries=2, documents=6)
    before = run.copy()
    assert Pointwise(judge)(run).index.equals(before.index)
    assert run.equals(before)


def test_equal_rows_share_one_prompt():
    client = LLMClient(judge)
    assert Pointwise(client)(candidates(documents=4).loc[[0, 0, 3]])["score"].nunique() == 2
    assert client.calls == 2


def test_grades_are_expected_values():
    run = candidates(documents=6)
    two = 2 * math.exp(-1)
    expected = 2 * two / (two + (-worth(run) / 10).map(math.exp))
    assert Pointwise(grader, grades=4)(run)["score"].tolist() == pytest.approx(expected.tolist())


def test_the_prompt_names_the_scale_of_the_grades():
    model = Scripted(grader)
    Pointwise(model, grades=4)(candidates(documents=1))
    Pointwise(model, grades=3, request="{query} {text} Grade to {best}:")(candidates(documents=1))
    default, own = (messages[-1]["content"] for messages in model.asked)
    assert "from 0 (not at all) to 3 (fully)" in default
    assert own.endswith("Grade to 2:")


@pytest.mark.parametrize(("grades", "model"), [(None, only_yes_for_2), (4, in_words)])
def test_replies_without_the_needed_tokens_raise(grades, model):
    with pytest.raises(UnreadableReplyError, match="'q0'"):
        Pointwise(model, grades=grades)(candidates(documents=4))


def test_documents_without_a_log_probability_can_be_put_last():
    with pytest.warns(IncompleteReplyWarning, match="1 of 4"):
        out = Pointwise(only_yes_for_2, on_failure="last")(candidates(documents=4))
    assert order(out)[-1] == "d2"
    assert out["score"].notna().all()


@pytest.mark.parametrize(
    ("name", "value"), [("grades", 1), ("grades", 11), ("request", "{query} {text} {best}"), ("preselect", "bm25")]
)
def test_wrong_arguments_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Pointwise(judge, **{name: value})


def test_preselect_shows_the_best_passages_within_the_limits():
    run = candidates(documents=3).assign(query="document about topic")
    run["text"] = "Filler goes first. " * 60 + run["text"] + ". " + "Filler goes last. " * 60
    model = Scripted(judge)
    ranker = Pointwise(
        model, preselect=ld.BM25Windows(1), windows=SentenceWindows(max_tokens=20), max_prompt_tokens=120
    )
    assert ranker(run)["score"].tolist() == judged(run)
    assert max(Tokens().count_messages(messages) for messages in model.asked) <= 120
    assert list(ranker.coverage.truncated) == [f"preselect={ranker.preselect!r}"]
