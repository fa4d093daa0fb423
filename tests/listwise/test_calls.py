"""What a run costs: ledger, estimate and cap."""

from __future__ import annotations

import re
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pyterrier_longdoc.common.language import token_counter
from pyterrier_longdoc.common.presentation import readable
from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    ListwisePrompt,
    LLMClient,
    OpenAIBackend,
    Pointwise,
    Prices,
    RankGPT,
    Reply,
    SpendCapError,
)
from pyterrier_longdoc.listwise.messages import most_tokens

from ..support import tiny
from ..support.llm import Answer, Scripted, candidates, completion, oracle, serving

SMALL = {"schedule": BackToFront(4, 2)}


def test_ledger_per_query():
    model = CallableBackend(lambda m: Reply(oracle(m), 1000, 100))
    count = lambda text: pytest.fail("the model has counted")  # noqa: E731
    ranker = RankGPT(LLMClient(model, prices=Prices(2.0, 8.0), tokenizer=count), **SMALL)
    assert ranker.ledger.table().shape == (0, 8)
    ranker(candidates(queries=2, documents=6))
    table = ranker.ledger.table()
    assert table["qid"].tolist() == ["q0", "q1"]
    assert table[["calls", "replayed", "estimated", "input_tokens"]].values.tolist() == [[2, 0, 0, 2000]] * 2
    assert table["cost"].tolist() == pytest.approx([(2000 * 2 + 200 * 8) / 1e6] * 2)
    assert ranker.ledger.cost == pytest.approx(table["cost"].sum())
    assert repr(ranker.ledger) == "Ledger(4 calls, 0 replayed, cost 0.0112)"


def test_unknown_usage_is_estimated_and_says_so():
    counted = []
    count = lambda text: counted.append(text) or -(-len(text) // 4)  # noqa: E731
    client = LLMClient(Scripted("[2] > [1]"), tokenizer=count)
    RankGPT(client)(candidates(documents=2))
    call = client.ledger.calls[0]
    assert call.estimated
    assert len(counted) == 8 + 1  # the messages and the answer, once each
    assert call.output_tokens == 3  # nine characters
    assert call.input_tokens > 50
    assert client.ledger.table()["cost"].tolist() == [0.0]
    assert RankGPT(client).ledger is client.ledger


def test_estimate_asks_nothing_and_is_right():
    model, run = Scripted(oracle), candidates(queries=3)
    client = LLMClient(model, prices=Prices(1.0, 4.0))
    ranker = RankGPT(client, shuffles=2)
    estimate = ranker.estimate(run)
    assert model.asked == []
    assert client.ledger.calls == []
    ranker(run)
    assert estimate.calls == len(model.asked) == 3 * 9 * 2
    table = client.ledger.table()
    for name in ("input_tokens", "output_tokens", "cost"):
        assert getattr(estimate, name) == pytest.approx(table[name].sum(), rel=0.01)
    assert ranker.estimate(run.iloc[:0]).calls == 0


def test_without_prices_there_is_no_cost_to_estimate():
    run = candidates(documents=3)
    yes = lambda messages: Reply("Yes", logprobs={"Yes": -1.0, "No": -1.0})  # noqa: E731
    for make in (RankGPT, Pointwise):
        unknown, free = (make(LLMClient(yes, prices=prices)).estimate(run) for prices in (None, Prices(0, 0)))
        assert unknown.cost is None
        assert "cost=None" in repr(unknown)
        assert free.cost == 0
        assert free.input_tokens == unknown.input_tokens > 0


@pytest.mark.parametrize("reported", [True, False])
def test_the_cap_holds_over_restarts(tmp_path, reported):
    """Also where the backend reports no tokens, so that they are counted here."""
    run = candidates(queries=80, documents=2)
    model = Scripted(lambda m: Reply(oracle(m), 80, 9) if reported else oracle(m))

    def client(cap: float | None, name: str = "m") -> LLMClient:  # a call costs 1
        backend, path = CallableBackend(model, name=name), tmp_path / "replies.sqlite"
        prices = Prices(1e6 / 80, 0)
        return LLMClient(backend, cache=path, prices=prices, max_cost=cap, tokenizer=lambda text: 6)

    first = client(None)
    RankGPT(first)(run[run["qid"].isin([f"q{q}" for q in range(15)])])
    assert first.ledger.cost == len(model.asked) == 15
    for _ in range(3):
        with pytest.raises(SpendCapError, match="max_cost=40"):
            RankGPT(client(40))(run)
        assert 15 < len(model.asked) <= 40
    last = client(100)
    RankGPT(last)(run)
    assert len(model.asked) == 80
    assert last.ledger.cost < 80 - 15  # its own calls
    other = client(20, "another model")
    other.ask("q", [{"role": "user", "content": "?"}])  # of which nothing was asked before
    assert other.ledger.cost > 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_cap_holds_and_finished_lists_are_not_paid_twice(tmp_path, concurrency):
    run = candidates(queries=20, documents=6)
    model = Scripted(lambda m: Reply(oracle(m), 100, 10))

    def client(cap: float) -> LLMClient:  # a call costs 1
        backend, path = CallableBackend(model, name="m"), tmp_path / "replies.sqlite"
        return LLMClient(backend, cache=path, prices=Prices(1e4, 0), max_cost=cap, tokenizer=lambda text: 10)

    poor, rich = client(25.0), client(100.0)
    with pytest.raises(SpendCapError, match=r"max_cost=25.0 would be passed"):
        RankGPT(poor, concurrency=concurrency, **SMALL)(run)
    paid = len(model.asked)
    assert poor.ledger.cost == paid == len(poor.cache)
    assert 23 <= paid <= 25
    RankGPT(rich, **SMALL)(run)
    assert len(model.asked) == 40  # none was asked for twice
    assert rich.ledger.cost == 40 - paid


def hungry(messages) -> Reply:
    """Takes a token for every two characters, where our own count says four, and more or less of them by the prompt."""
    characters = sum(len(message["content"]) for message in messages)
    return Reply(oracle(messages), characters * (48 + characters % 5) // 100, 30)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("cap", [0.0005, 0.002, 0.004])
def test_the_cap_holds_where_servers_count_more_tokens_than_we_do(tmp_path, cap, concurrency):
    run = candidates(queries=30, documents=6)
    model = Scripted(lambda m: time.sleep(0.002) or hungry(m))
    backend = CallableBackend(model, name="m")
    backend.settings = {"max_tokens": 40}
    client = LLMClient(backend, cache=tmp_path / "replies.sqlite", prices=Prices(0.15, 0.6), max_cost=cap)
    with pytest.raises(SpendCapError) as error:
        RankGPT(client, concurrency=concurrency, **SMALL)(run)
    ledger = client.ledger
    assert 0 < ledger.cost <= cap
    spent = readable(ledger.cost, 6)
    assert re.search(rf"max_cost={cap} .*: {spent} spent, 0 reserved .* may cost [\d.]+ ", str(error.value))
    # All but what a call or two may cost is spent.
    paid = len(model.asked)
    assert cap - ledger.cost < 2 * ledger.cost / paid or paid < 5
    ledger.max_cost = 1.0
    out = RankGPT(client, concurrency=concurrency, **SMALL)(run)
    assert len(model.asked) == 60  # nothing is asked for twice
    assert out.equals(RankGPT(oracle, **SMALL)(run))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_cap_holds_where_scripts_change(concurrency):
    """What English prompts have cost says nothing of Chinese ones, of which we count a quarter of the tokens."""
    run = candidates(queries=40, documents=6)
    chinese = run["qid"].isin(run["qid"].unique()[20:])
    run = run.assign(text=run["text"].where(~chinese, run["text"] + "\u732b\u72d7" * 400))

    def answer(messages) -> Reply:
        text = "".join(message["content"] for message in messages)
        wide = sum(letter > "\x7f" for letter in text)
        return Reply(oracle(messages), (len(text) - wide) // 4 + wide, 30)

    backend = CallableBackend(lambda m: time.sleep(0.002) or answer(m))
    backend.settings = {"max_tokens": 40}

    def cost(part) -> float:
        client = LLMClient(backend, prices=Prices(1.0, 1.0))
        RankGPT(client, **SMALL)(part)
        return client.ledger.cost

    english = cost(run[~chinese])
    cap = english + cost(run[chinese]) / 20  # one of 20 Chinese queries
    client = LLMClient(backend, prices=Prices(1.0, 1.0), max_cost=cap)
    with pytest.raises(SpendCapError):
        RankGPT(client, concurrency=concurrency, **SMALL)(run)
    # So many of the 20 English queries may still be open when a Chinese one is refused.
    finished = 1 - (concurrency - 1) / 20
    assert 0.99 * finished * english < client.ledger.cost <= cap


def test_a_cap_changes_no_reply():
    numbers = iter(range(9))
    client = LLMClient(CallableBackend(lambda m: str(next(numbers))), prices=Prices(0, 0), max_cost=1.0)
    assert [client.ask("1", [{"role": "user", "content": "same"}]) for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize("cap", [0.003, 0.05])
def test_the_cap_holds_for_requests_at_the_same_time(cap):
    pytest.importorskip("openai")

    def answer(body):
        reply, used = completion(oracle(body["messages"])), hungry(body["messages"])
        reply["usage"] = {"prompt_tokens": used.input_tokens, "completion_tokens": 30, "total_tokens": 0}
        return Answer(reply, wait=0.01)

    with serving(answer) as server:
        backend = OpenAIBackend("tiny", base_url=f"{server.url}/v1", parameters={"max_tokens": 30}, max_retries=0)
        client = LLMClient(backend, prices=Prices(2.5, 10.0), max_cost=cap)
        with pytest.raises(SpendCapError):
            RankGPT(client, concurrency=6, **SMALL)(candidates(queries=60, documents=6))
    costs = [client.ledger.prices.cost(call.input_tokens, call.output_tokens) for call in client.ledger.calls]
    assert len(costs) == len(server.requests)  # none was under way unseen
    assert sum(costs) <= cap


def test_a_call_waits_for_those_under_way_rather_than_end_the_run():
    """Of four calls at a time three do not fit beside the first, by the most that they may take; all do in fact."""
    run = candidates(queries=4, documents=3)
    model = CallableBackend(lambda m: time.sleep(0.01) or Reply(oracle(m), 50, 10))
    model.settings = {"max_tokens": 1000}
    client = LLMClient(model, prices=Prices(1.0, 1.0), max_cost=0.0025)
    RankGPT(client, concurrency=4)(run)
    assert client.ledger.cost == pytest.approx(4 * 60e-6)


def test_an_answer_without_a_bound_is_reckoned_with():
    model = Scripted(lambda m: Reply(oracle(m), 0, 20))
    client = LLMClient(model, prices=Prices(0, 1e6), max_cost=1000.0)
    with pytest.raises(SpendCapError, match="1024 of answer"):
        RankGPT(client)(candidates(documents=2))
    assert model.asked == []


def test_the_cap_reckons_with_the_longest_answer_allowed():
    model = CallableBackend(lambda m: Reply(oracle(m), 0, 10))
    model.settings = {"max_tokens": 100}
    client = LLMClient(model, prices=Prices(0, 1e6), max_cost=115, tokenizer=lambda text: 0)
    with pytest.raises(SpendCapError):
        RankGPT(client)(candidates(queries=6, documents=2))
    assert client.ledger.cost == 20  # 20 + 100 would be above it


def test_no_tokenizer_makes_more_tokens_than_are_reserved():
    messages = ListwisePrompt()("naïve 猫 q?", ["\U0001f600" * 9, "a.b_c" * 50, "é" * 20, "\x00 \t\n"])
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    of_bytes = Tokenizer(models.BPE(letters, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for tokenizer in (of_bytes, tiny.tokenizer()):
        tokens = sum(token_counter(tokenizer)([message["content"] for message in messages]))
        assert 400 < tokens < most_tokens(messages)


def test_a_cap_of_nothing_lets_nothing_through():
    with pytest.raises(SpendCapError):
        RankGPT(LLMClient(Scripted(AssertionError("asked")), prices=Prices(1, 1), max_cost=0))(candidates(documents=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_cost": 1.0}, "needs prices"),
        ({"max_cost": -1.0, "prices": Prices(1, 1)}, "must be 0 or more"),
        ({"max_cost": float("nan"), "prices": Prices(1, 1)}, "must be 0 or more"),
    ],
)
def test_wrong_caps(arguments, message):
    with pytest.raises(ValueError, match=message):
        LLMClient(oracle, **arguments)
    with pytest.raises(ValueError, match="cannot be negative"):
        Prices(-1, 0)
