"""Schedules, and how RankGPT follows them: calls, rows, failures, retries, shuffles, budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass
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
    RankGPT,
    Schedule,
    TopDown,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.prompt_budget import Tokens

from ..support.llm import Scripted, candidates, oracle, order, shown, worth
from ..support.noisy import NoisyOracle, noisy_order, play

REFUSAL = "I can't rank these 5 passages (policy 3.2)."

each_schedule = pytest.mark.parametrize("schedule", [BackToFront(), TopDown(), TopDown(budget=None)], ids=repr)
each_small = pytest.mark.parametrize("schedule", [BackToFront(4, 2), TopDown(4, 2, 4)], ids=repr)


# Calls.


@pytest.mark.parametrize(
    ("schedule", "calls", "rounds"),
    [
        (BackToFront(), 9, 9),  # Sun et al. 2023
        (TopDown(), 7, 3),  # Parry et al. 2024: the first window, five partitions, the candidates
    ],
    ids=repr,
)
def test_published_numbers_of_calls_for_100_documents(schedule, calls, rounds):
    _, asked = play(schedule, 100, oracle_of(random_worth(100)))
    assert (sum(asked), len(asked)) == (calls, rounds)
    assert schedule.estimate(100) == calls


def random_worth(n: int, seed: int = 1) -> dict[int, float]:
    return dict(enumerate(random.Random(seed).sample(range(n), n)))


def oracle_of(value):
    return lambda group: sorted(group, key=lambda document: -value[document])


@each_schedule
@given(n=st.integers(2, 130), seed=st.integers(0, 9), p=st.sampled_from([0.0, 0.2, 0.5]), failing=st.booleans())
def test_any_answers_give_a_ranking_within_the_estimated_calls(schedule, n, seed, p, failing):
    rng, value = random.Random(seed), random_worth(n, seed)

    def order(group):
        assert len(set(group)) == len(group)
        assert set(group) <= set(range(n))
        if failing and rng.random() < 0.3:
            return None
        return [group[position] for position in noisy_order([value[document] for document in group], p, rng)]

    ranking, asked = play(schedule, n, order)
    assert len(set(ranking)) == len(ranking)
    assert set(ranking) <= set(range(n))
    assert sum(asked) <= schedule.estimate(n)
    if isinstance(schedule, BackToFront):
        assert sum(asked) == schedule.estimate(n)
    assert schedule.estimate(0) == schedule.estimate(1) == 0


@each_schedule
def test_a_perfect_model_brings_the_best_documents_to_the_top(schedule):
    value = random_worth(100)
    best = sorted(value, key=value.get, reverse=True)
    ranking, _ = play(schedule, 100, oracle_of(value))
    if schedule == TopDown():  # half of a random ranking is better than its pivot
        assert len(set(ranking[:10]) & set(best[:10])) >= 3
    else:
        assert ranking[:10] == best[:10]


def test_top_down_is_exact_if_the_first_stage_has_a_good_pivot():
    value = {document: -document + 30 * (document % 9 == 5 and document > 20) for document in range(100)}
    best = sorted(value, key=value.get, reverse=True)
    ranking, asked = play(TopDown(), 100, oracle_of(value))
    assert ranking[:10] == best[:10]
    assert sum(asked) == 7


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_windows_of_back_to_front_overlap_and_reach_the_top(n, size, data):
    step = data.draw(st.integers(1, size - 1))
    places = BackToFront(size, step).windows(n)
    assert places[0][1] == n
    assert places[-1][0] == 0
    assert all(1 < end - start <= size for start, end in places)
    for (start, _), (_, next_end) in pairwise(places):
        assert next_end - start == min(size, n) - step


# Rows.


@each_small
def test_rows_and_columns_are_kept_and_the_best_is_first(schedule):
    run = candidates(queries=3, documents=9).assign(extra="x").sample(frac=1, random_state=1)
    ranker = RankGPT(oracle, schedule=schedule, top_k=7, concurrency=3)
    out = ranker(run)
    assert out["extra"].tolist() == run["extra"].tolist()
    assert out["docno"].tolist() == run["docno"].tolist()
    for _, rows in out.groupby("qid"):
        assert sorted(rows["score"]) == list(range(1, 10))
        in_order = rows.sort_values("rank")
        assert in_order["docno"].tolist()[7:] == ["d7", "d8"]  # beyond top_k, as the first stage had them
        assert worth(in_order).iloc[0] == worth(rows[rows["docno"] < "d7"]).max() or isinstance(schedule, TopDown)


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


@each_small
def test_concurrency_changes_no_score(schedule):
    run = candidates(queries=5, documents=9)
    out = [RankGPT(NoisyOracle(0.2), schedule=schedule, concurrency=c, shuffles=2)(run) for c in (1, 4)]
    assert out[0].equals(out[1])


# Failures.


@each_small
def test_a_refusal_keeps_the_order_of_the_first_stage(schedule):
    run = candidates(documents=9)
    ranker = RankGPT(Scripted("No."), schedule=schedule, retries=0, on_failure="keep")
    with pytest.warns(IncompleteReplyWarning):
        out = ranker(run)
    (counts,) = ranker.counts.to_dict("records")
    assert counts["llm_failed"] == counts["llm_prompts"] > 0
    assert out.sort_values("rank")["docno"].tolist() == [f"d{d}" for d in range(9)]


@each_small
def test_last_puts_documents_of_a_failed_prompt_last(schedule):
    """One document makes every prompt fail that shows it; those that never met it are ranked above."""

    def model(messages):
        return "No." if any("document 4 " in text for _, text in shown(messages)) else oracle(messages)

    run = candidates(documents=9)
    with pytest.warns(IncompleteReplyWarning):
        out = RankGPT(model, schedule=schedule, retries=0, on_failure="last")(run)
    scores = out.set_index("docno")["score"]
    assert scores["d4"] == 0
    assert sorted(scores[scores > 0]) == list(range(1 + (scores == 0).sum(), 10))


@pytest.mark.parametrize("groups", [[[0, 0]], [[0, 9]]])
def test_a_schedule_that_asks_about_wrong_documents_is_refused(groups):
    class Wrong(BackToFront):
        def rank(self, n):
            yield groups
            return []

    with pytest.raises(ValueError, match="Wrong"):
        RankGPT(oracle, schedule=Wrong())(candidates(documents=5))


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


# A schedule of one's own.


@dataclass(frozen=True)
class OneByOne(Schedule):
    """The best document of the whole list, then the best of the others, and so on, `k` times."""

    k: int = 3

    def rank(self, n):
        left = list(range(n))
        top = []
        for _ in range(min(self.k, n)):
            (answer,) = yield [left]
            top += (answer or left)[:1]
            left = [document for document in left if document != top[-1]]
        return top

    def estimate(self, n):
        return min(self.k, n - 1)


def test_rankgpt_accepts_a_custom_schedule():
    model = Scripted(oracle)
    ranker = RankGPT(model, schedule=OneByOne())
    out = ranker(candidates(documents=9, shuffle=1))
    assert worth(out.sort_values("rank")).tolist() == [8, 7, 6, 0, 1, 2, 3, 4, 5]
    assert [len(shown(messages)) for messages in model.asked] == [9, 8, 7]
    assert ranker.counts[["llm_prompts", "llm_rounds"]].values.tolist() == [[3, 3]]
