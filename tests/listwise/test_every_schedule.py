"""What holds for every schedule: calls, rows, failures, shuffles, caches, caps."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    IncompleteReplyWarning,
    LLMClient,
    PairwiseAll,
    PairwiseBubble,
    ParallelBlocks,
    Prices,
    RankGPT,
    Reply,
    SetwiseHeapsort,
    SetwiseInsertion,
    SpendCapError,
    TopDown,
    Tournament,
    UnreadableReplyError,
    schedules,
)

from ..support.llm import Scripted, candidates, oracle, shown, worth
from ..support.noisy import NoisyOracle, noisy_order, play

ALL = [
    BackToFront(),
    TopDown(),
    TopDown(budget=None),
    ParallelBlocks(),
    ParallelBlocks(block=10, replicas=3, aggregation="winrate"),
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


def test_all_schedules_are_here():
    classes = {getattr(schedules, name) for name in schedules.__all__} - {schedules.Schedule}
    assert {type(schedule) for schedule in ALL} == {type(schedule) for schedule in SMALL} == classes


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


def test_the_bounds_of_setwise_sorting():
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
@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 130), seed=st.integers(0, 9), p=st.sampled_from([0.0, 0.2, 0.5]), failing=st.booleans())
def test_any_answers_make_a_ranking_within_the_estimate(schedule, n, seed, p, failing):
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
def test_a_perfect_model_brings_the_best_up(schedule):
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


def test_top_down_is_exact_where_the_first_stage_has_a_good_pivot():
    value = {document: -document + 30 * (document % 9 == 5 and document > 20) for document in range(100)}
    best = sorted(value, key=value.get, reverse=True)
    ranking, asked = play(TopDown(), 100, oracle_of(value))
    assert ranking[:10] == best[:10]
    assert sum(asked) == 7
    in_order = {document: -document for document in range(100)}
    assert play(TopDown(), 100, oracle_of(in_order))[1] == [1, 5]  # nothing better: no third round


# Rows and failures.


@each_small
def test_each_row_is_kept(schedule):
    run = candidates(queries=3, documents=9).assign(extra="x").sample(frac=1, random_state=1)
    ranker = RankGPT(oracle, schedule=schedule, top_k=7, report=True, concurrency=3)
    out = ranker(run)
    assert out["extra"].tolist() == run["extra"].tolist()
    assert out["docno"].tolist() == run["docno"].tolist()
    for qid, rows in out.groupby("qid"):
        assert sorted(rows["score"]) == list(range(1, 10))
        in_order = rows.sort_values("rank")
        assert in_order["docno"].tolist()[7:] == ["d7", "d8"]  # beyond top_k, as the first stage had them
        assert worth(in_order).iloc[0] == worth(rows[rows["docno"] < "d7"]).max() or isinstance(schedule, TopDown)
        assert rows["llm_rounds"].unique().tolist() == [len(ranker.rounds[qid])]


@each_small
def test_what_a_schedule_leaves_out_follows_in_the_order_of_the_first_stage(schedule):
    n, value = 9, random_worth(9)
    ranking, _ = play(schedule, n, oracle_of(value))
    run = candidates(documents=n)
    run["text"] = [f"document is worth {value[d]}." for d in range(n)]
    out = RankGPT(oracle, schedule=schedule)(run).sort_values("rank")
    rest = [f"d{d}" for d in range(n) if d not in ranking]
    assert out["docno"].tolist() == [*(f"d{d}" for d in ranking), *rest]


@each_small
@pytest.mark.parametrize("refusal", ["No.", "I can't answer in the form [2] > [1]"])
def test_a_refusal_is_never_an_order(schedule, refusal):
    run = candidates(documents=9)
    with pytest.raises(UnreadableReplyError, match="of the first stage: no ranking in the reply"):
        RankGPT(Scripted("I cannot rank these (rule 3)."), schedule=schedule, retries=0)(run)
    ranker = RankGPT(Scripted(refusal), schedule=schedule, retries=0, on_failure="keep", report=True)
    with pytest.warns(IncompleteReplyWarning, match="had no readable reply"):
        out = ranker(run)
    assert (out["llm_failed"] == out["llm_prompts"]).all()
    assert out["llm_failed"].iloc[0] > 0
    assert out.sort_values("rank")["docno"].tolist() == [f"d{d}" for d in range(9)]
    ranker = RankGPT(Scripted(refusal), schedule=schedule, retries=0, on_failure="nan-free-bottom")
    with pytest.warns(IncompleteReplyWarning):
        assert (ranker(run)["score"] == 0).any()


@each_small
def test_documents_of_a_failed_prompt_are_at_the_bottom(schedule):
    """One document makes every prompt fail that shows it; those that never met it are ranked above."""

    def model(messages):
        return "No." if any("document 4 " in text for _, text in shown(messages)) else oracle(messages)

    run = candidates(documents=9)
    with pytest.warns(IncompleteReplyWarning):
        out = RankGPT(model, schedule=schedule, retries=0, on_failure="nan-free-bottom")(run)
    scores = out.set_index("docno")["score"]
    assert scores["d4"] == 0
    assert sorted(scores[scores > 0]) == list(range(1 + (scores == 0).sum(), 10))


def test_pairwise_answers_that_contradict_each_other_count_half():
    first_shown = lambda group: group  # noqa: E731 - always prefers what it sees first
    assert play(PairwiseAll(), 6, first_shown)[0] == list(range(6))
    assert play(PairwiseBubble(3), 6, first_shown)[0] == list(range(6))


@pytest.mark.parametrize("groups", [[[0, 0]], [[0, 9]]])
def test_what_a_schedule_must_not_ask(groups):
    class Wrong(BackToFront):
        def rank(self, n):
            yield groups
            return []

    with pytest.raises(ValueError, match="must be distinct documents of 0 to 4"):
        RankGPT(oracle, schedule=Wrong())(candidates(documents=5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BackToFront(1), "stride=10 must be smaller than window=1"),
        (lambda: BackToFront(stride=0), "stride=0 must be at least 1"),
        (lambda: TopDown(pivot=20), "pivot=20 must be smaller than window=20"),
        (lambda: TopDown(budget=0), "budget=0 must be"),
        (lambda: ParallelBlocks(1), "block=1 must be at least 2"),
        (lambda: ParallelBlocks(aggregation="borda"), "aggregation='borda' is unknown"),
        (lambda: Tournament(stages=((2, 2),)), "stages="),
        (lambda: Tournament(0), "tournaments=0"),
        (lambda: SetwiseHeapsort(0), "children=0"),
        (lambda: SetwiseInsertion(k=0), "k=0"),
        (lambda: PairwiseBubble(None), "k=None"),
    ],
)
def test_wrong_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Shuffles, concurrency, caches, caps.


@each_small
def test_shuffles_compose_with_each(schedule):
    run, model = candidates(documents=9), Scripted(oracle)
    plain, shuffled = (RankGPT(model, schedule=schedule, shuffles=n, report=True) for n in (0, 3))
    once = plain(run)
    thrice = shuffled(run)
    assert thrice["score"].tolist() == once["score"].tolist()
    assert thrice["llm_prompts"].iloc[0] == 3 * once["llm_prompts"].iloc[0]
    assert shuffled.estimate(run).calls == 3 * plain.estimate(run).calls


@each_small
def test_concurrency_changes_nothing(schedule):
    run = candidates(queries=5, documents=9)
    out = [RankGPT(NoisyOracle(0.2), schedule=schedule, concurrency=c, shuffles=2)(run) for c in (1, 4)]
    assert out[0].equals(out[1])


@each_small
def test_a_stopped_run_goes_on_without_paying_twice(schedule, tmp_path):
    run = candidates(queries=8, documents=8)

    def client(*replies, cap=None):
        model = Scripted(*replies)
        backend, prices = CallableBackend(model, name="tests.model"), Prices(1e4, 0)
        return model, LLMClient(
            backend, cache=tmp_path / "r.sqlite", prices=prices, max_cost=cap, tokenizer=lambda text: 10
        )

    dying, first = client(*[lambda m: Reply(NoisyOracle(0.3)(m), 100, 1)] * 4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        RankGPT(first, schedule=schedule, concurrency=2)(run)
    stored = len(first.cache)
    assert 3 <= stored <= len(dying.asked)
    poor, second = client(lambda m: Reply(NoisyOracle(0.3)(m), 100, 1), cap=14.0)
    with pytest.raises(SpendCapError):
        RankGPT(second, schedule=schedule, concurrency=2)(run)
    assert second.ledger.cost == len(poor.asked) <= 14.0
    stored = len(second.cache)
    rest, third = client(lambda m: Reply(NoisyOracle(0.3)(m), 100, 1))
    out = RankGPT(third, schedule=schedule, concurrency=2)(run)
    whole = Scripted(lambda m: Reply(NoisyOracle(0.3)(m), 100, 1))
    assert out.equals(RankGPT(whole, schedule=schedule)(run))
    assert len(rest.asked) == len({str(messages) for messages in whole.asked}) - stored


def test_schedules_share_the_cache(tmp_path):
    run, model = candidates(documents=12), Scripted(NoisyOracle(0.1))
    client = LLMClient(CallableBackend(model, name="m"), cache=tmp_path / "r.sqlite")
    RankGPT(client, schedule=PairwiseAll())(run)
    assert len(model.asked) == 12 * 11
    RankGPT(client, schedule=PairwiseBubble(3))(run)
    assert len(model.asked) == 12 * 11  # every pair was known
    assert client.ledger.table()["replayed"].tolist() == [2 * (11 + 10 + 9)]
