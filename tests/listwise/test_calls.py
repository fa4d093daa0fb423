"""What a run costs: ledger, estimate and cap."""

from __future__ import annotations

import pytest

from pyterrier_longdoc.listwise import CallableBackend, LLMClient, Prices, RankGPT, Reply, SpendCapError

from ..support.llm import Scripted, candidates, oracle

SMALL = {"list_size": 4, "step": 2}


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


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_cap_holds_and_finished_lists_are_not_paid_twice(tmp_path, concurrency):
    run = candidates(queries=6, documents=6)
    model = Scripted(lambda m: Reply(oracle(m), 100, 10))

    def client(cap: float) -> LLMClient:  # a call costs 1
        backend, path = CallableBackend(model, name="m"), tmp_path / "replies.sqlite"
        return LLMClient(backend, cache=path, prices=Prices(1e4, 0), max_cost=cap, tokenizer=lambda text: 10)

    poor, rich = client(5.0), client(100.0)
    with pytest.raises(SpendCapError, match=r"max_cost=5.0 would be passed"):
        RankGPT(poor, concurrency=concurrency, **SMALL)(run)
    paid = len(model.asked)
    assert poor.ledger.cost == paid == len(poor.cache)
    assert 3 <= paid <= 5
    RankGPT(rich, **SMALL)(run)
    assert len(model.asked) == 12  # none was asked for twice
    assert rich.ledger.cost == 12 - paid


def test_the_cap_reckons_with_the_longest_answer_allowed():
    model = CallableBackend(lambda m: Reply(oracle(m), 0, 10))
    model.settings = {"max_tokens": 100}
    client = LLMClient(model, prices=Prices(0, 1e6), max_cost=115, tokenizer=lambda text: 0)
    with pytest.raises(SpendCapError):
        RankGPT(client)(candidates(queries=6, documents=2))
    assert client.ledger.cost == 20  # 20 + 100 would be above it


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
