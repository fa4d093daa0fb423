"""Long runs: replay cache, ledger, estimate, spend cap, interruption, `kill -9`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from pyterrier_longdoc.listwise import (
    BackendError,
    CallableBackend,
    LLMClient,
    NotInCacheError,
    Prices,
    RankGPT,
    Reply,
    SpendCapError,
    UnreadableReplyError,
)

from ..support.llm import Scripted, candidates, oracle

ROOT = Path(__file__).parents[2]
SMALL = {"window_size": 4, "stride": 2}


def cached(model, path, **options) -> LLMClient:
    return LLMClient(CallableBackend(model, name="tests.model"), cache=path, **options)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "new folder" / "replies.sqlite"


# Cache.


def test_a_second_run_asks_nothing_and_ranks_the_same(path):
    run, model = candidates(queries=3, documents=6), Scripted(oracle)
    first = RankGPT(cached(model, path), **SMALL)(run)
    assert len(model.asked) == 6
    client = cached(Scripted(AssertionError("asked")), path, prices=Prices(1, 1), replay_only=True)
    ranker = RankGPT(client, **SMALL)
    pd.testing.assert_frame_equal(ranker(run), first)
    assert len(client.cache) == 6
    assert client.ledger.cost == 0
    assert client.ledger.table()[["calls", "replayed"]].values.tolist() == [[2, 2]] * 3
    assert (client.ledger.table()["saved"] > 0).all()
    with pytest.raises(NotInCacheError, match=r"query 'q0': .* has no reply to this prompt"):
        ranker(run.assign(query="something else"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"settings": {"temperature": 1}},
        {"query": "other"},
        {"text": "other is worth 3."},
        {"reverse": True},
    ],
)
def test_the_key_has_all_that_a_reply_depends_on(path, change):
    run, model = candidates(documents=3), Scripted(oracle)
    RankGPT(cached(model, path))(run)
    client = cached(model, path)
    client.backend.model = change.get("model", client.backend.model)
    client.backend.settings = change.get("settings", {})
    if "query" in change:
        run["query"] = change["query"]
    if "text" in change:
        run.loc[0, "text"] = change["text"]
    if "reverse" in change:
        run["score"] = -run["score"]
    RankGPT(client)(run)
    assert len(model.asked) == 2


def test_retries_and_failures_are_replayed_too(path):
    run = candidates(documents=3)
    RankGPT(cached(Scripted("no", "[3] > [2] > [1]"), path))(run)
    replay = RankGPT(cached(Scripted(""), path, replay_only=True), report=True)
    assert replay(run)["llm_retries"].tolist() == [1] * 3


def test_the_same_prompt_in_two_threads_is_paid_once(path):
    run = candidates(documents=3)
    twice = pd.concat([run, run.assign(qid="other")])

    def slow(messages):
        time.sleep(0.2)
        return oracle(messages)

    model = Scripted(slow)
    client = cached(model, path)
    RankGPT(client, concurrency=2)(twice)
    assert len(model.asked) == 1
    assert client.ledger.table()["replayed"].sum() == 1


def test_odd_replies_survive_the_cache(path):
    run = candidates(documents=2)
    reply = "[2] > [1] \ud83d \x00 " + "é" * 1000
    first = RankGPT(cached(Scripted(reply), path))(run)
    assert RankGPT(cached(Scripted(""), path, replay_only=True))(run).equals(first)


def test_functions_without_a_name_need_one(path):
    with pytest.raises(ValueError, match=r"use CallableBackend\(function, name=...\)"):
        LLMClient(lambda messages: "", cache=path)
    with pytest.raises(ValueError, match="use CallableBackend"):
        LLMClient(Scripted(""), cache=path)
    assert LLMClient(oracle, cache=path).backend.model == "tests.support.llm.oracle"
    with pytest.raises(ValueError, match="replay_only=True needs cache="):
        LLMClient(oracle, replay_only=True)


def test_settings_that_cannot_be_stored_are_refused(path):
    client = cached(oracle, path)
    client.backend.settings = {"x": object()}
    with pytest.raises(ValueError, match="cannot be a cache key"):
        RankGPT(client)(candidates(documents=2))


# Ledger, estimate, cap.


def test_ledger_per_query():
    model = CallableBackend(lambda m: Reply(oracle(m), 1000, 100))
    ranker = RankGPT(LLMClient(model, prices=Prices(2.0, 8.0)), **SMALL)
    ranker(candidates(queries=2, documents=6))
    table = ranker.ledger.table()
    assert table["qid"].tolist() == ["q0", "q1"]
    assert table["calls"].tolist() == [2, 2]
    assert table["input_tokens"].tolist() == [2000, 2000]
    assert table["cost"].tolist() == pytest.approx([(2000 * 2 + 200 * 8) / 1e6] * 2)
    assert ranker.ledger.cost == pytest.approx(table["cost"].sum())
    assert table["estimated"].tolist() == [0, 0]


def test_unknown_usage_is_estimated_and_says_so():
    client = LLMClient(Scripted("[2] > [1]"))
    RankGPT(client)(candidates(documents=2))
    call = client.ledger.calls[0]
    assert call.estimated
    assert call.output_tokens == 3  # nine characters
    assert call.input_tokens > 50
    assert client.ledger.table()["cost"].tolist() == [0.0]
    assert RankGPT(client).ledger is client.ledger


def test_an_empty_ledger_has_an_empty_table():
    assert LLMClient(oracle).ledger.table().shape == (0, 8)


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
    assert estimate.input_tokens == pytest.approx(table["input_tokens"].sum(), rel=0.01)
    assert estimate.output_tokens == pytest.approx(table["output_tokens"].sum(), rel=0.01)
    assert estimate.cost == pytest.approx(client.ledger.cost, rel=0.01)
    assert ranker.estimate(run.iloc[:0]).calls == 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_cap_holds_and_finished_windows_are_kept(path, concurrency):
    run = candidates(queries=6, documents=6)
    model = Scripted(lambda m: Reply(oracle(m), 100, 10))
    price = Prices(1e4, 0)  # 1 for each call
    client = cached(model, path, prices=price, max_cost=5.0, tokenizer=lambda text: 10)
    with pytest.raises(SpendCapError, match=r"max_cost=5.0 would be passed"):
        RankGPT(client, concurrency=concurrency, **SMALL)(run)
    paid = len(model.asked)
    assert client.ledger.cost == paid == len(client.cache)
    assert 3 <= paid <= 5
    more = cached(model, path, prices=price, max_cost=100.0)
    RankGPT(more, **SMALL)(run)
    assert len(model.asked) == 12  # none was asked for twice
    assert more.ledger.cost == 12 - paid


def test_the_cap_reckons_with_the_longest_answer_allowed():
    model = CallableBackend(lambda m: Reply(oracle(m), 0, 10))
    model.settings = {"max_tokens": 100}
    client = LLMClient(model, prices=Prices(0, 1e6), max_cost=115, tokenizer=lambda text: 0)
    with pytest.raises(SpendCapError):
        RankGPT(client)(candidates(queries=6, documents=2))
    assert client.ledger.cost == 20  # 20 + 100 would be above it


def test_a_cap_of_nothing_lets_nothing_through():
    model = Scripted(oracle)
    with pytest.raises(SpendCapError):
        RankGPT(LLMClient(model, prices=Prices(1, 1), max_cost=0))(candidates(documents=2))
    assert model.asked == []


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


# Several queries in flight, and stopping.


def test_results_do_not_depend_on_concurrency():
    run = candidates(queries=9, documents=25)
    out = [RankGPT(oracle, concurrency=concurrency)(run) for concurrency in (1, 4, 16)]
    assert out[0].equals(out[1])
    assert out[0].equals(out[2])


def test_the_first_error_stops_all(path):
    def model(messages):
        if "query number 2" in str(messages):
            raise BackendError("outage")
        time.sleep(0.05)
        return oracle(messages)

    asked = Scripted(model)
    with pytest.raises(BackendError, match="outage"):
        RankGPT(cached(asked, path), concurrency=2, on_failure="keep", **SMALL)(candidates(queries=40, documents=6))
    assert len(asked.asked) < 12
    assert threading.active_count() < 5


def test_client_and_ranker_can_be_pickled(path):
    client = cached(oracle, path, prices=Prices(1, 1), max_cost=1.0)
    ranker = RankGPT(client, **SMALL)
    run = candidates(documents=6)
    out = ranker(run)
    copy = pickle.loads(pickle.dumps(ranker))
    assert copy(run).equals(out)
    assert copy.ledger.table()["calls"].tolist() == [4]
    assert ranker.ledger.table()["calls"].tolist() == [2]


CHILD = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

from pyterrier_longdoc.listwise import CallableBackend, LLMClient, RankGPT
from tests.support.llm import candidates, oracle

def model(messages):
    # Atomic in a file opened to append; the reply comes later, as that of a server does.
    with open(sys.argv[1], "a") as calls:
        calls.write(f"{hash(str(messages))}\\n")
    # Slow after some calls, so that whoever is to kill the run finds it running, however busy the machine is.
    with open(sys.argv[1]) as calls:
        time.sleep(0.02 if len(calls.readlines()) < int(sys.argv[5]) else 1.0)
    return oracle(messages)

client = LLMClient(CallableBackend(model, name="m"), cache=sys.argv[2])
out = RankGPT(client, window_size=4, stride=2, concurrency=int(sys.argv[4]))(candidates(queries=50, documents=6))
out.to_csv(sys.argv[3])
"""


def start(folder: Path, concurrency: int, slow_after: int = 10**6) -> subprocess.Popen:
    files = [str(folder / name) for name in ("calls", "replies.sqlite", "run.csv")]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *files, str(concurrency), str(slow_after)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def wait_for_calls(child: subprocess.Popen, folder: Path, number: int) -> None:
    calls = folder / "calls"
    while not calls.exists() or len(calls.read_text().splitlines()) < number:
        assert child.poll() is None
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_where_it_was(tmp_path, kill):
    child = start(tmp_path, concurrency=4, slow_after=40)
    wait_for_calls(child, tmp_path, 37)
    child.send_signal(kill)
    stderr = child.communicate(timeout=60)[1].decode()
    before = (tmp_path / "calls").read_text().splitlines()
    stored = len(LLMClient(CallableBackend(oracle), cache=tmp_path / "replies.sqlite").cache)
    assert 30 <= stored < 90
    assert not (tmp_path / "run.csv").exists()
    if kill == signal.SIGINT:
        assert "KeyboardInterrupt" in stderr
        assert stored == len(before)  # what was under way was waited for and kept
    else:
        assert len(before) - stored <= 4  # no more is lost than was under way
    assert start(tmp_path, concurrency=4).wait(timeout=120) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) - len(before) == 100 - stored  # each of 50 queries has two windows
    assert len(calls) - len(set(calls)) == len(before) - stored  # no reply that was kept is asked for again
    RankGPT(oracle, **SMALL)(candidates(queries=50, documents=6)).to_csv(tmp_path / "whole.csv")
    assert (tmp_path / "run.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_failed_run_keeps_its_replies(path):
    run, model = candidates(queries=4, documents=3), Scripted(*[oracle] * 3, "no idea")
    with pytest.raises(UnreadableReplyError):
        RankGPT(cached(model, path), retries=0)(run)
    assert len(cached(model, path).cache) == 4  # the unreadable one too: it was paid for
