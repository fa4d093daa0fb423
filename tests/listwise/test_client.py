"""Replies are cached: a second run asks nothing, and a run that was stopped continues."""

from __future__ import annotations

import hashlib
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from pyterrier_longdoc.listwise import (
    BackendError,
    BackToFront,
    CallableBackend,
    LLMClient,
    NotInCacheError,
    Pointwise,
    RankGPT,
    Reply,
)

from ..support.llm import Scripted, candidates, oracle

SMALL = {"schedule": BackToFront(4, 2)}


def cached(model, path, **options) -> LLMClient:
    return LLMClient(CallableBackend(model, name="tests.model"), cache=path, **options)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "new folder" / "replies.sqlite"


def test_a_second_run_uses_the_cache_and_ranks_the_same(path):
    run, model = candidates(queries=3, documents=6), Scripted(oracle)
    first = RankGPT(cached(model, path), **SMALL)(run)
    assert len(model.asked) == 6
    client = cached(Scripted(AssertionError("asked")), path, replay_only=True)
    ranker = RankGPT(client, **SMALL)
    pd.testing.assert_frame_equal(ranker(run), first)
    assert len(client.cache) == 6
    assert (client.calls, client.cached, client.input_tokens, client.output_tokens) == (0, 6, 0, 0)


def test_tokens_are_those_the_model_reports_and_estimated_if_it_reports_none():
    run = candidates(queries=2, documents=6)
    reported = LLMClient(lambda m: Reply(oracle(m), 1000, 100), tokenizer=lambda text: pytest.fail("counted"))
    RankGPT(reported, concurrency=2, **SMALL)(run)
    assert (reported.calls, reported.input_tokens, reported.output_tokens) == (4, 4000, 400)
    counted = []
    client = LLMClient(Scripted("[2] > [1]"), tokenizer=lambda text: counted.append(text) or -(-len(text) // 4))
    RankGPT(client)(candidates(documents=2))
    assert len(counted) == 8 + 1  # the messages and the answer, once each
    assert client.output_tokens == 3  # nine characters
    assert client.input_tokens > 50


def test_replay_only_refuses_a_prompt_that_is_not_in_the_cache(path):
    client = cached(Scripted(AssertionError("asked")), path, replay_only=True)
    with pytest.raises(NotInCacheError, match="q0"):
        RankGPT(client)(candidates(documents=2))


def test_another_model_setting_query_text_or_order_needs_a_new_call(path):
    run, model = candidates(documents=3), Scripted(oracle)
    client = cached(model, path)
    other_model, other_settings = cached(model, path), cached(model, path)
    other_model.backend.model = "other"
    other_settings.backend.settings = {"temperature": 1}
    for asked, (llm, frame) in enumerate(
        (
            (client, run),
            (other_model, run),
            (other_settings, run),
            (client, run.assign(query="other")),
            (client, run.assign(text=["other is worth 3.", *run["text"][1:]])),
            (client, run.assign(score=-run["score"])),
        ),
        start=1,
    ):
        for _ in range(2):
            RankGPT(llm)(frame)
            assert len(model.asked) == asked


def test_the_same_prompt_in_two_threads_is_sent_once(path):
    run = candidates(documents=3)
    model = Scripted(lambda messages: time.sleep(0.2) or oracle(messages))
    client = cached(model, path)
    ranker = RankGPT(client, concurrency=2)
    ranker(pd.concat([run, run.assign(qid="other")]))
    assert len(model.asked) == 1
    assert (client.calls, client.cached) == (1, 1)
    assert (ranker.coverage.queries, ranker.coverage.documents) == (1, 3)  # distinct ones


@pytest.mark.parametrize("damaged", ["{", pytest.param("[" * 10**5, id="deep"), '{"text": "[1]"}', "7"])
def test_a_damaged_cache_is_named(damaged, path):
    run = candidates(documents=3)
    RankGPT(cached(oracle, path))(run)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE store SET value = ?", [damaged])
    with pytest.raises(ValueError, match=path.name):
        RankGPT(cached(oracle, path))(run)


@pytest.mark.parametrize("cls", [RankGPT, Pointwise, LLMClient])
def test_the_name_of_a_model_is_refused_as_llm(cls):
    with pytest.raises(ValueError, match="llm="):
        cls("gpt-4o")


def test_a_run_continues_after_an_outage_with_the_replies_in_the_cache(path):
    run, second = candidates(queries=2, documents=3), Scripted(oracle)
    with pytest.raises(BackendError, match="down"):
        RankGPT(cached(Scripted(oracle, BackendError("the server is down")), path))(run)
    RankGPT(cached(second, path))(run)
    assert len(second.asked) == 1


@pytest.mark.parametrize("function", [lambda messages: "", Scripted("")])
def test_a_cache_needs_a_function_with_a_name(function, path):
    with pytest.raises(ValueError, match="name="):
        LLMClient(function, cache=path)


def test_client_and_ranker_can_be_pickled(path):
    ranker = RankGPT(cached(oracle, path), **SMALL)
    run = candidates(documents=6)
    out = pickle.loads(pickle.dumps(ranker))(run)
    assert ranker(run).equals(out)
    copy = pickle.loads(pickle.dumps(ranker))
    assert copy(run).equals(out)
    counts = [(one.client.calls, one.client.cached) for one in (copy, ranker)]
    assert counts == [(0, 4), (0, 2)]  # each has its own


RUN = candidates(queries=50, documents=6)


def asked(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def rank_slowly(folder: Path, slow_after: int) -> None:
    """Ranks, while every call leaves a line in a file."""

    def model(messages):
        # Atomic in a file opened to append; the reply comes later, as that of a server does.
        with (folder / "calls").open("a") as calls:
            calls.write(f"{hashlib.sha256(str(messages).encode()).hexdigest()}\n")
        # Slow after some calls, so that whoever is to kill the run finds it running, however busy the machine is.
        time.sleep(0.02 if len(asked(folder)) < slow_after else 1.0)
        return oracle(messages)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    RankGPT(cached(model, folder / "replies.sqlite"), concurrency=4, **SMALL)(RUN).to_csv(folder / "run.csv")


def start(folder: Path, slow_after: int = 10**6) -> subprocess.Popen:
    """Ranks in a new process: Ctrl-C in a copy of this one may end in a fault of a library that is loaded here."""
    call = f"rank_slowly(Path({str(folder)!r}), {slow_after})"
    code = f"from pathlib import Path; from {__name__} import rank_slowly; {call}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_continues_without_repeating_calls(tmp_path, kill):
    child = start(tmp_path, slow_after=40)
    while len(asked(tmp_path)) < 37:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(kill)
    assert child.wait(timeout=120) == -kill
    before, stored = asked(tmp_path), len(cached(oracle, tmp_path / "replies.sqlite").cache)
    # No more is lost than was under way, and nothing of what Ctrl-C waits for.
    assert 30 <= stored < 90
    assert len(before) - stored <= (4 if kill == signal.SIGKILL else 0)
    assert start(tmp_path).wait(timeout=120) == 0
    after = asked(tmp_path)
    assert len(after) - len(before) == 100 - stored  # each of 50 queries has two lists
    assert len(after) - len(set(after)) == len(before) - stored  # no reply that was stored is asked for again
    RankGPT(oracle, **SMALL)(RUN).to_csv(tmp_path / "whole.csv")
    assert (tmp_path / "run.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
