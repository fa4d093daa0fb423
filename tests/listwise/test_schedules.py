"""How RankGPT walks through a list from back to front: failures, retries, shuffles, budgets, several queries."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.listwise import (
    BackToFront,
    ContextOverflowError,
    IncompleteReplyWarning,
    ListwisePrompt,
    Pointwise,
    RankGPT,
    Reply,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.prompt_budget import Tokens

from ..support.llm import Scripted, candidates, order, shown, worth

REFUSAL = "I can't rank these 5 passages (policy 3.2)."


# Lists.


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_windows_of_back_to_front_overlap_and_reach_the_top(n, size, data):
    step = data.draw(st.integers(1, size - 1))
    places = BackToFront(size, step).windows(n)
    assert places[0][1] == n
    assert places[-1][0] == 0
    assert all(1 < end - start <= size for start, end in places)
    for (start, _), (_, next_end) in pairwise(places):
        assert next_end - start == min(size, n) - step


def test_documents_are_shown_in_the_order_of_the_first_stage():
    run, seen = candidates(documents=4), []
    model = Scripted(lambda m: seen.append([t.split()[1] for _, t in shown(m)]) or "[1] > [2] > [3] > [4]")
    for frame in (
        run.iloc[[2, 0, 3, 1]],
        run.drop(columns="rank").iloc[[3, 2, 1, 0]],
        run.drop(columns="score").iloc[[1, 0, 3, 2]],
        run.assign(score=1.0).iloc[[3, 0, 2, 1]],
        run.drop(columns=["score", "rank"]),
        run.assign(score=[3.0, 2.0, 1.0, float("nan")], rank=0).iloc[[3, 1, 2, 0]],
    ):
        assert order(RankGPT(model)(frame)) == ["d0", "d1", "d2", "d3"]
    assert seen == [["0", "1", "2", "3"]] * 6


def test_only_the_top_k_documents_are_shown():
    model = Scripted("[3] > [2] > [1]")
    assert order(RankGPT(model, top_k=3)(candidates(documents=6))) == ["d2", "d1", "d0", "d3", "d4", "d5"]
    assert [len(shown(messages)) for messages in model.asked] == [3]


# Failures.


def test_a_reply_without_a_ranking_raises_with_query_and_documents():
    model = Scripted("[2] > [1] > [3]", REFUSAL)
    with pytest.raises(UnreadableReplyError, match=r"'q0', documents 1, 3, 2 of .*policy 3\.2"):
        RankGPT(model, schedule=BackToFront(3, 1), retries=1)(candidates(documents=4))
    assert len(model.asked) == 3


def test_a_retry_shows_the_reply_and_a_reminder():
    refusal = REFUSAL * 100
    model = Scripted(refusal, " \n", "[2] > [1] > [3]")
    ranker = RankGPT(model)
    assert order(ranker(candidates(documents=3))) == ["d1", "d0", "d2"]
    first, second, third = model.asked
    assert second[:-2] == first
    assert (second[-2]["role"], second[-2]["content"]) == ("assistant", refusal[:2000])
    assert "all 3 documents" in second[-1]["content"]
    assert third[:-2] == second
    assert third[-2]["content"] == "(no answer)"
    counts = {"prompts": 1, "rounds": 1, "missing": 0, "duplicates": 0, "unknown": 0}
    counts |= {"refusals": 2, "retries": 2, "failed": 0}
    assert ranker.counts.iloc[0].to_dict() == {"qid": "q0", **{f"llm_{name}": n for name, n in counts.items()}}


def test_a_retry_that_does_not_fit_the_context_is_a_failure():
    with pytest.raises(UnreadableReplyError, match="policy"):
        RankGPT(Scripted(REFUSAL, ContextOverflowError("no room")))(candidates(documents=3))
    with pytest.warns(IncompleteReplyWarning):
        RankGPT(Scripted(REFUSAL, ContextOverflowError("no room")), on_failure="keep")(candidates(documents=3))


def test_report_counts_missing_duplicate_and_unknown_documents_of_each_query():
    ranker = RankGPT(Scripted("[3] > [3] > [9]", "[1] > [2] > [3]"))
    with pytest.warns(IncompleteReplyWarning):
        ranker(candidates(queries=2, documents=3))
    columns = ["llm_missing", "llm_duplicates", "llm_unknown"]
    assert ranker.counts[columns].values.tolist() == [[2, 1, 1], [0, 0, 0]]


# Permutation self-consistency.


def test_shuffles_average_out_a_positional_bias():
    asked = []

    def biased(messages):
        documents = shown(messages)
        asked.append(tuple(text for _, text in documents))
        first, *rest = documents
        ids = [first[0], *sorted((n for n, _ in rest), key=lambda n: -int(documents[n - 1][1].split()[-1][:-1]))]
        return " > ".join(f"[{n}]" for n in ids)

    run = candidates(documents=6, shuffle=5)  # the first is worth least
    assert order(RankGPT(biased)(run))[0] == "d0"
    prompts = []
    for seed, frame in ((42, run), (42, run.sample(frac=1, random_state=1)), (1, run)):
        asked.clear()
        out = RankGPT(biased, shuffles=30, seed=seed)(frame)
        assert worth(out.sort_values("rank")).tolist() == [5, 4, 3, 2, 1, 0]
        prompts.append(list(asked))
    assert len(prompts[0]) == 30
    assert len(set(prompts[0])) > 20
    assert prompts[1] == prompts[0]  # seeded, whatever the order of the rows
    assert prompts[2] != prompts[0]


# Budgets.

LONG = pd.DataFrame({"qid": "1", "query": "q", "docno": ["a", "b", "c"], "text": ["x" * 4000, "y" * 400, "z" * 40]})


def lengths(messages) -> list[int]:
    return [len(text) for _, text in shown(messages)]


def test_max_doc_len_limits_each_document():
    model = Scripted("[1] > [2] > [3]")
    first, long = RankGPT(model, max_doc_len=50), RankGPT(model, max_doc_len=None)
    with pytest.warns(TruncationWarning, match="max_doc_len=50"):
        first(LONG)
    long(LONG)
    with pytest.warns(TruncationWarning, match="max_doc_len=512"):
        RankGPT(model)(LONG)
    assert [lengths(m) for m in model.asked] == [[200, 200, 40], [4000, 400, 40], [2048, 400, 40]]
    assert (first.coverage.pairs_truncated, first.coverage.tokens_read, long.coverage.share_read) == (2, 110, 1.0)


@pytest.mark.parametrize("budget", [150, 1000])
def test_max_prompt_tokens_shortens_the_longest_documents(budget):
    model = Scripted("[1] > [2] > [3]")
    ranker = RankGPT(model, max_doc_len=None, max_prompt_tokens=budget, prompt=ListwisePrompt("single", system=""))
    with pytest.warns(TruncationWarning):
        ranker(LONG)
    assert budget - 4 <= Tokens().count_messages(model.asked[0]) <= budget
    a, b, c = lengths(model.asked[0])
    assert c == 40
    assert a >= b
    assert a + b + c == 4 * ranker.coverage.tokens_read


@pytest.mark.parametrize(
    ("limits", "room", "second", "least"),
    [
        ({"max_prompt_tokens": 400}, 10**6, "max_prompt_tokens=400", 250),
        ({"max_prompt_tokens": 9000}, 1000, "the server", 187),
        ({}, 1000, "the server", 187),
    ],
)
def test_coverage_counts_the_tokens_truncated_by_each_limit(limits, room, second, least):
    def model(messages):
        if sum(lengths(messages)) > room:
            raise ContextOverflowError("too long")
        return "[3] > [2] > [1]"

    ranker = RankGPT(model, max_doc_len=500, prompt=ListwisePrompt("single", system=""), **limits)
    with pytest.warns(TruncationWarning):
        assert order(ranker(LONG)) == ["c", "b", "a"]
    assert ranker.coverage.truncated == {"max_doc_len=500": 500, second: 610 - ranker.coverage.tokens_read}
    assert least <= ranker.coverage.tokens_read <= min(room / 4, limits.get("max_prompt_tokens", 10**6))


def test_a_retry_begins_at_the_length_that_the_server_accepted():
    sizes, replies = [], ["no ranking", "[3] > [2] > [1]"]

    def model(messages):
        sizes.append(sum(map(len, (message["content"] for message in messages))))
        if sum(lengths(messages)) > 1000:
            raise ContextOverflowError("too long")
        return replies.pop(0)

    assert order(RankGPT(model, prompt=ListwisePrompt("single", system=""))(LONG)) == ["c", "b", "a"]
    assert sizes[-3] > sizes[-2]  # refused, then accepted
    assert 0 < sizes[-1] - sizes[-2] < 300  # the same documents, the reply and a reminder


def test_max_prompt_tokens_without_room_for_a_text_is_refused():
    with pytest.raises(ValueError, match="max_prompt_tokens=60"):
        RankGPT(Scripted("[1]"), max_prompt_tokens=60)(LONG)
    with pytest.raises(ValueError, match="max_prompt_tokens=5"):
        Pointwise(lambda messages: Reply("yes"), max_prompt_tokens=5)(LONG)
