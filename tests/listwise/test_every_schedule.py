"""What holds for every schedule: calls, rows, failures, shuffles; and for one of one's own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.listwise import (
    BackToFront,
    IncompleteReplyWarning,
    PairwiseAll,
    PairwiseBubble,
    ParallelBlocks,
    RankGPT,
    Schedule,
    SetwiseHeapsort,
    SetwiseInsertion,
    TopDown,
    Tournament,
)

from ..support.llm import Scripted, candidates, oracle, shown, worth
from ..support.noisy import NoisyOracle, noisy_order, play

ALL = [
    BackToFront(),
    TopDown(),
    TopDown(budget=None),
    ParallelBlocks(),
    ParallelBlocks(block=10, replicas=3),
    Tournament(),
    Tournament(tournaments=3),
    SetwiseHeapsort(),
    SetwiseInsertion(),
    PairwiseAll(),
    PairwiseBubble(),
]
ADAPTIVE = (TopDown, SetwiseHeapsort, SetwiseInsertion)
"""Answers decide how many prompts there are; `estimate` is a bound."""

SMALL = [
    BackToFront(4, 2),
    TopDown(4, 2, 4),
    ParallelBlocks(4, 2),
    Tournament(2, ((4, 2), (3, 1))),
    SetwiseHeapsort(2, 3),
    SetwiseInsertion(2, 3),
    PairwiseAll(),
    PairwiseBubble(2),
]
each_of_all, each_small = (pytest.mark.parametrize("schedule", some, ids=repr) for some in (ALL, SMALL))


# Calls.


@pytest.mark.parametrize(
    ("schedule", "calls", "rounds"),
    [
        (BackToFront(), 9, 9),  # Sun et al. 2023
        (TopDown(), 7, 3),  # Parry et al. 2024: the first window, five partitions, the candidates
        (ParallelBlocks(10, 2), 20, 1),  # Dedov 2025: n r / k
        (ParallelBlocks(20, 2), 10, 1),
        (Tournament(), 13, 5),  # Chen et al. 2025: 5 + 5 + 1 + 1 + 1
        (Tournament(10), 130, 5),
        (PairwiseAll(), 100 * 99, 1),  # Qin et al. 2024: n^2 - n
        (PairwiseBubble(10), 2 * sum(range(90, 100)), sum(range(90, 100))),  # ten passes
    ],
    ids=repr,
)
def test_published_numbers_of_calls_for_100_documents(schedule, calls, rounds):
    _, asked = play(schedule, 100, oracle_of(random_worth(100)))
    assert (sum(asked), len(asked)) == (calls, rounds)
    assert schedule.estimate(100) == calls


def test_setwise_sorting_stays_within_the_papers_bound():
    """Zhuang et al. 2024 give O(k log n) for the heap once it is built, which takes O(n)."""
    for children in (2, 3, 9):
        bound = SetwiseHeapsort(children, 10).estimate(100)
        assert bound <= 100 / (children - 1) + 10 * math.ceil(math.log(100, children))
    assert SetwiseHeapsort().estimate(100) == 85
    in_order = {document: -document for document in range(100)}
    _, asked = play(SetwiseInsertion(), 100, oracle_of(in_order))
    assert sum(asked) <= SetwiseHeapsort().estimate(10) + 30  # nothing to insert: each set of three is asked about once


def random_worth(n: int, seed: int = 1) -> dict[int, float]:
    return dict(enumerate(random.Random(seed).sample(range(n), n)))


def oracle_of(value):
    return lambda group: sorted(group, key=lambda document: -value[document])


@each_of_all
@given(n=st.integers(2, 130), seed=st.integers(0, 9), p=st.sampled_from([0.0, 0.2, 0.5]), failing=st.booleans())
def test_any_answers_give_a_ranking_within_the_estimated_calls(schedule, n, seed, p, failing):
    if isinstance(schedule, PairwiseAll):
        n = min(n, 40)
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
    if not isinstance(schedule, ADAPTIVE) and not (failing and isinstance(schedule, Tournament)):
        assert sum(asked) == schedule.estimate(n)
    assert schedule.estimate(0) == schedule.estimate(1) == 0


@each_of_all
def test_a_perfect_model_brings_the_best_documents_to_the_top(schedule):
    """From any first stage where the paper says so; within the trusted first window or groups elsewhere."""
    value = random_worth(100)
    best = sorted(value, key=value.get, reverse=True)
    ranking, _ = play(schedule, 100, oracle_of(value))
    if isinstance(schedule, ParallelBlocks | Tournament):
        assert len(set(ranking[:10]) & set(best[:10])) >= 7
        # The last two of a tournament have equal points.
        assert isinstance(schedule, ParallelBlocks) or ranking[0] in best[:2]
    elif schedule == TopDown():  # half of a random ranking is better than its pivot
        assert len(set(ranking[:10]) & set(best[:10])) >= 3
    else:
        assert ranking[:10] == best[:10]


def test_top_down_is_exact_if_the_first_stage_has_a_good_pivot():
    value = {document: -document + 30 * (document % 9 == 5 and document > 20) for document in range(100)}
    best = sorted(value, key=value.get, reverse=True)
    ranking, asked = play(TopDown(), 100, oracle_of(value))
    assert ranking[:10] == best[:10]
    assert sum(asked) == 7


# Rows and failures.


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


@each_small
@pytest.mark.parametrize("refusal", ["No.", "I can't answer in the form [2] > [1]"])
def test_a_refusal_keeps_the_order_of_the_first_stage(schedule, refusal):
    run = candidates(documents=9)
    ranker = RankGPT(Scripted(refusal), schedule=schedule, retries=0, on_failure="keep")
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


def test_contradictory_pairwise_answers_keep_the_order():
    first_shown = lambda group: group  # noqa: E731 - always prefers what it sees first
    assert play(PairwiseAll(), 6, first_shown)[0] == list(range(6))
    assert play(PairwiseBubble(3), 6, first_shown)[0] == list(range(6))


@pytest.mark.parametrize("groups", [[[0, 0]], [[0, 9]]])
def test_a_schedule_that_asks_about_wrong_documents_is_refused(groups):
    class Wrong(BackToFront):
        def rank(self, n):
            yield groups
            return []

    with pytest.raises(ValueError, match="Wrong"):
        RankGPT(oracle, schedule=Wrong())(candidates(documents=5))


# Shuffles and concurrency.


@each_small
def test_concurrency_changes_no_score(schedule):
    run = candidates(queries=5, documents=9)
    out = [RankGPT(NoisyOracle(0.2), schedule=schedule, concurrency=c, shuffles=2)(run) for c in (1, 4)]
    assert out[0].equals(out[1])


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
