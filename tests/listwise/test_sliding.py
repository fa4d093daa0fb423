"""How RankGPT walks through a list: windows, failures, retries, shuffles, budgets."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.listwise import (
    ContextOverflowError,
    IncompleteReplyWarning,
    ListwisePrompt,
    RankGPT,
    UnreadableReplyError,
)
from pyterrier_longdoc.listwise.budget import Tokens, fair_limit
from pyterrier_longdoc.listwise.sliding import sliding_windows

from ..support import tiny
from ..support.llm import Scripted, candidates, oracle, shown, worth

REFUSAL = "I can't rank these 5 passages (policy 3.2)."


def order(frame: pd.DataFrame) -> list[str]:
    return frame.sort_values("rank", kind="stable")["docno"].tolist()


# Windows.


@pytest.mark.parametrize(
    ("n", "windows"),
    [
        (0, []),
        (1, [(0, 1)]),
        (10, [(0, 10)]),
        (20, [(0, 20)]),
        (25, [(5, 25), (0, 15)]),
        (30, [(10, 30), (0, 20)]),
        (100, [(i, i + 20) for i in range(80, -1, -10)]),
    ],
)
def test_windows(n, windows):
    assert sliding_windows(n, 20, 10) == windows


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(2, 40), st.data())
def test_windows_always_reach_the_top_and_overlap(n, size, data):
    stride = data.draw(st.integers(1, size - 1))
    windows = sliding_windows(n, size, stride)
    assert windows[0][1] == n
    assert windows[-1][0] == 0
    assert all(0 < end - start <= size for start, end in windows)
    for (start, _), (_, next_end) in pairwise(windows):
        assert next_end - start == min(size, n) - stride


@pytest.mark.parametrize("form", ["turns", "single"])
def test_oracle_brings_the_true_top_ten_up_in_nine_calls_per_query(form):
    run, calls = candidates(queries=3), []
    # Prompts of the single form have the documents in one message; the oracle reads both.
    ranker = RankGPT(lambda m: calls.append(1) or oracle(m), prompt=ListwisePrompt(form), concurrency=3)
    out = ranker(run)
    assert len(calls) == 9 * 3
    for _, ranked in out.assign(worth=worth(out)).sort_values("rank").groupby("qid"):
        assert ranked["worth"].tolist()[:10] == list(range(99, 89, -1))
        assert (ranked["score"].diff().dropna() == -1).all()


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.listwise.IncompleteReplyWarning")
@pytest.mark.parametrize("n", [1, 2, 10, 20, 25, 30, 100])
@pytest.mark.parametrize("kind", ["reversed", "partial", "duplicated", "random"])
def test_output_is_a_permutation_whatever_the_reply(n, kind):
    rng = random.Random(n)

    def reply(messages):
        ids = [number for number, _ in shown(messages)]
        ids = {
            "reversed": ids[::-1],
            "partial": ids[:0:-2] or ids,
            "duplicated": ids[::-1] * 2,
            "random": rng.sample(ids, len(ids)),
        }[kind]
        return " > ".join(f"[{number}]" for number in ids)

    run = candidates(documents=n)
    out = RankGPT(reply)(run)
    assert sorted(out["rank"]) == list(range(n))
    assert sorted(out["score"]) == list(range(1, n + 1))
    assert out["docno"].tolist() == run["docno"].tolist()


def test_reversing_model_with_one_window():
    assert order(RankGPT(lambda m: "[3] > [2] > [1]")(candidates(documents=3))) == ["d2", "d1", "d0"]


def test_one_document_asks_nothing():
    model = Scripted(AssertionError("asked"))
    assert RankGPT(model)(candidates(documents=1))["score"].tolist() == [1.0]


def test_documents_are_shown_in_the_order_of_the_first_stage():
    run = candidates(documents=4)
    seen = []
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


def test_only_the_top_k_are_shown():
    model = Scripted("[3] > [2] > [1]")
    out = RankGPT(model, top_k=3)(candidates(documents=6))
    assert order(out) == ["d2", "d1", "d0", "d3", "d4", "d5"]
    assert [len(shown(messages)) for messages in model.asked] == [3]


# Failures.


def test_failure_raises_and_says_where():
    model = Scripted("[2] > [1] > [3]", REFUSAL)
    with pytest.raises(UnreadableReplyError, match=r"query 'q0', documents 1 to 3: .* after 1 retries: .*policy 3\.2"):
        RankGPT(model, window_size=3, stride=1, retries=1)(candidates(documents=4))
    assert len(model.asked) == 3


def test_failed_window_keeps_its_order_and_says_so():
    model = Scripted(REFUSAL)
    ranker = RankGPT(model, on_failure="keep", retries=2, report=True)
    with pytest.warns(IncompleteReplyWarning, match="in 1 of 1 queries, 1 of 1 prompts had no readable"):
        out = ranker(candidates(documents=3))
    assert order(out) == ["d0", "d1", "d2"]
    assert out["llm_failed"].tolist() == [1] * 3
    assert (out["llm_refusals"][0], out["llm_retries"][0]) == (3, 2)


def test_failed_window_goes_to_the_bottom():
    def model(messages):
        documents = shown(messages)
        return REFUSAL if any("document 4 " in text for _, text in documents) else oracle(messages)

    run = candidates(documents=5, shuffle=1)  # worth 0, 1, 2, 3, 4
    with pytest.warns(IncompleteReplyWarning):
        out = RankGPT(model, window_size=3, stride=1, retries=0, on_failure="nan-free-bottom")(run)
    assert out.set_index("docno")["score"].to_dict() == {"d1": 5, "d0": 4, "d2": 0, "d3": 0, "d4": 0}
    assert out["rank"].tolist() == [1, 0, 2, 3, 4]


def test_retries_show_the_reply_and_ask_again():
    model = Scripted(REFUSAL, "", "[2] > [1] > [3]")
    ranker = RankGPT(model, report=True)
    out = ranker(candidates(documents=3))
    assert order(out) == ["d1", "d0", "d2"]
    first, second, third = model.asked
    assert second[:-2] == first
    assert (second[-2]["role"], second[-2]["content"]) == ("assistant", REFUSAL)
    assert "all 3 documents" in second[-1]["content"]
    assert third[-2]["content"] == "(no answer)"
    assert ranker.counts.iloc[0].to_dict() == {
        "qid": "q0",
        "llm_windows": 1,
        "llm_missing": 0,
        "llm_duplicates": 0,
        "llm_unknown": 0,
        "llm_refusals": 2,
        "llm_retries": 2,
        "llm_failed": 0,
    }


def test_a_reminder_without_room_is_a_failure():
    model = Scripted(REFUSAL, ContextOverflowError("no room"))
    with pytest.raises(UnreadableReplyError, match="policy"):
        RankGPT(model)(candidates(documents=3))
    with pytest.warns(IncompleteReplyWarning):
        RankGPT(Scripted(REFUSAL, ContextOverflowError("no room")), on_failure="keep")(candidates(documents=3))


def test_counts_are_per_query():
    model = Scripted("[3] > [3] > [9]", "[1] > [2] > [3]")
    with pytest.warns(IncompleteReplyWarning, match="in 1 of 2 queries, 0 of 2 prompts .* left out 2 documents"):
        out = RankGPT(model, report=True)(candidates(queries=2, documents=3))
    columns = ["llm_missing", "llm_duplicates", "llm_unknown"]
    assert out[columns].drop_duplicates().values.tolist() == [[2, 1, 1], [0, 0, 0]]


# Permutation self-consistency.


def test_shuffles_average_out_a_bias_for_the_first_place():
    asked = []

    def biased(messages):
        documents = shown(messages)
        asked.append([text for _, text in documents])
        first, *rest = documents
        ids = [first[0], *sorted((n for n, _ in rest), key=lambda n: -int(documents[n - 1][1].split()[-1][:-1]))]
        return " > ".join(f"[{n}]" for n in ids)

    run = candidates(documents=6, shuffle=5)  # the first is worth least
    assert order(RankGPT(biased)(run))[0] == "d0"
    asked.clear()
    ranker = RankGPT(biased, shuffles=30)
    out = ranker(run)
    assert worth(out.sort_values("rank")).tolist() == [5, 4, 3, 2, 1, 0]
    assert len(asked) == 30
    assert len({tuple(one) for one in asked}) > 20
    first, asked[:] = list(asked), []
    RankGPT(biased, shuffles=30)(run.sample(frac=1, random_state=1))
    assert asked == first  # seeded, whatever the order of the rows
    asked.clear()
    RankGPT(biased, shuffles=30, seed=1)(run)
    assert asked != first


def test_shuffles_that_fail_are_left_out():
    model = Scripted(REFUSAL, oracle)
    ranker = RankGPT(model, shuffles=3, retries=0, on_failure="keep")
    with pytest.warns(IncompleteReplyWarning, match="1 of 3"):
        out = ranker(candidates(documents=6))
    assert worth(out.sort_values("rank")).tolist() == [5, 4, 3, 2, 1, 0]


# Budgets.

LONG = pd.DataFrame({"qid": "1", "query": "q", "docno": ["a", "b", "c"], "text": ["x" * 4000, "y" * 400, "z" * 40]})


def lengths(messages) -> list[int]:
    return [len(text) for _, text in shown(messages)]


def test_first_p_and_long_p():
    model = Scripted("[1] > [2] > [3]")
    first, long = RankGPT(model, max_doc_tokens=50), RankGPT(model)
    with pytest.warns(TruncationWarning, match="2 of them cut: 110 of 1110 tokens"):
        first(LONG)
    long(LONG)
    assert [lengths(messages) for messages in model.asked] == [[200, 200, 40], [4000, 400, 40]]
    assert (first.coverage.documents_cut, first.coverage.tokens_read, long.coverage.share_read) == (2, 110, 1.0)


@pytest.mark.parametrize("budget", [150, 400, 1000])
def test_prompt_budget_shrinks_the_longest(budget):
    model = Scripted("[1] > [2] > [3]")
    ranker = RankGPT(model, max_prompt_tokens=budget, prompt=ListwisePrompt("single", system=""))
    with pytest.warns(TruncationWarning):
        ranker(LONG)
    assert budget - 4 <= Tokens().of_messages(model.asked[0]) <= budget
    a, b, c = lengths(model.asked[0])
    assert c == 40
    assert a >= b
    assert a + b + c == 4 * ranker.coverage.tokens_read


def test_a_budget_too_small_for_any_text_is_refused():
    with pytest.raises(ValueError, match="max_prompt_tokens=60 leaves no room for 3 documents"):
        RankGPT(Scripted("[1]"), max_prompt_tokens=60)(LONG)


def test_prompts_that_the_server_finds_too_long_are_shortened():
    def small(messages):
        if sum(lengths(messages)) > 1000:
            raise ContextOverflowError("too long")
        return "[3] > [2] > [1]"

    model = Scripted(small)
    ranker = RankGPT(model)
    with pytest.warns(TruncationWarning):
        out = ranker(LONG)
    assert order(out) == ["c", "b", "a"]
    assert 750 / 4 <= ranker.coverage.tokens_read <= 250
    assert len(model.asked) < 8
    with pytest.raises(ContextOverflowError):
        RankGPT(Scripted(ContextOverflowError("always")))(LONG)


@pytest.mark.parametrize("kind", [None, "huggingface", "words"])
def test_cutting_keeps_as_much_as_fits(kind):
    tokenizer = {None: None, "huggingface": tiny.tokenizer(), "words": lambda text: len(re.findall(r"\S+", text))}[kind]
    tokens = Tokens(tokenizer)
    text = "the old cat, the dog and the river. " * 50
    for limit in (1, 7, 100):
        cut = tokens.cut(text, limit)
        assert text.startswith(cut)
        assert tokens.count(cut) == limit
    assert tokens.cut(text, 10**6) == text
    assert tokens.cut("", 1) == ""


def test_tokenizers_that_are_none():
    with pytest.raises(ValueError, match="must be a Hugging Face tokenizer, a tiktoken encoding or a function"):
        RankGPT(oracle, tokenizer="bert")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(20, 3000))
def test_fair_limit_uses_the_budget(lengths, budget):
    limit = fair_limit(lengths, budget)
    assert sum(min(length, limit) for length in lengths) <= budget
    if max(lengths) > limit:
        assert sum(min(length, limit + 1) for length in lengths) > budget
