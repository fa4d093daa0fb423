"""What a run costs: ledger, estimate and cap."""

from __future__ import annotations

import time

import pytest

from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    LLMClient,
    Pointwise,
    Prices,
    RankGPT,
    Reply,
    SpendCapError,
)

from ..support.llm import Scripted, candidates, oracle

SMALL = {"schedule": BackToFront(4, 2)}


def test_the_ledger_has_calls_tokens_and_cost_of_each_query():
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


def test_tokens_are_estimated_if_the_model_reports_none():
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


def test_estimate_sends_nothing_and_equals_the_cost_of_the_run():
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


@pytest.mark.parametrize("make", [RankGPT, Pointwise])
def test_estimate_has_no_cost_without_prices(make):
    run = candidates(documents=3)
    yes = lambda messages: Reply("Yes", logprobs={"Yes": -1.0, "No": -1.0})  # noqa: E731
    unknown, free = (make(LLMClient(yes, prices=prices)).estimate(run) for prices in (None, Prices(0, 0)))
    assert (unknown.cost, free.cost) == (None, 0)
    assert "cost=None" in repr(unknown)
    assert free.input_tokens == unknown.input_tokens > 0


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("reported", [True, False])
def test_max_cost_includes_earlier_runs_and_nothing_is_paid_twice(tmp_path, concurrency, reported):
    run = candidates(queries=40, documents=2)
    model = Scripted(lambda m: time.sleep(0.002) or (Reply(oracle(m), 80, 9) if reported else oracle(m)))

    def client(cap: float) -> LLMClient:  # a call costs 1
        backend, path = CallableBackend(model, name="m"), tmp_path / "replies.sqlite"
        prices = Prices(1e6 / 80, 0)
        return LLMClient(backend, cache=path, prices=prices, max_cost=cap, tokenizer=lambda text: 6)

    poor = client(10)
    for _ in range(2):  # the second time nothing more is paid for
        with pytest.raises(SpendCapError, match="max_cost=10"):
            RankGPT(poor, concurrency=concurrency)(run)
        paid = len(model.asked)
        assert 10 <= poor.ledger.cost == paid == len(poor.cache) <= 10 + concurrency - 1
    again = client(paid)
    with pytest.raises(SpendCapError, match=f"max_cost={paid}"):
        RankGPT(again)(run)
    assert len(model.asked) == paid
    rich = client(1000)
    out = RankGPT(rich, concurrency=concurrency)(run)
    assert len(model.asked) == 40
    assert rich.ledger.cost == 40 - paid
    assert out.equals(RankGPT(oracle)(run))


def test_the_cost_of_another_model_in_the_cache_does_not_count(tmp_path):
    def ask(name: str, text: str) -> None:  # a call costs 1
        backend = CallableBackend(lambda messages: Reply("[1]", 80, 9), name=name)
        client = LLMClient(backend, cache=tmp_path / "replies.sqlite", prices=Prices(1e6 / 80, 0), max_cost=1)
        client.ask("q", [{"role": "user", "content": text}])
        assert client.ledger.cost == 1

    ask("one", "?")
    ask("another", "?")
    with pytest.raises(SpendCapError):
        ask("one", "??")


def test_max_cost_of_zero_allows_no_call():
    with pytest.raises(SpendCapError):
        RankGPT(LLMClient(Scripted(AssertionError("asked")), prices=Prices(1, 1), max_cost=0))(candidates(documents=2))


@pytest.mark.parametrize("arguments", [{"prices": None}, {"max_cost": -1.0}, {"max_cost": float("nan")}])
def test_max_cost_needs_prices_and_a_number_that_is_not_negative(arguments):
    with pytest.raises(ValueError, match="max_cost"):
        LLMClient(oracle, **{"prices": Prices(1, 1), "max_cost": 1.0, **arguments})


def test_a_negative_price_is_refused():
    with pytest.raises(ValueError, match="input"):
        Prices(-1, 0)
