"""Replies are cached: a second run asks nothing, and a run that was stopped continues."""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path

import pandas as pd
import pytest

from pyterrier_longdoc.listwise import (
    BackendError,
    BackToFront,
    CallableBackend,
    LLMClient,
    NotInCacheError,
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
    reported = LLMClient(lambda m: Reply(oracle(m), 1000, 100))
    RankGPT(reported, concurrency=2, **SMALL)(run)
    assert (reported.calls, reported.input_tokens, reported.output_tokens) == (4, 4000, 400)
    client = LLMClient(Scripted("[2] > [1]"))
    RankGPT(client)(candidates(documents=2))
    assert client.output_tokens == 3  # nine characters
    assert 50 < client.input_tokens < 1000


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


@pytest.mark.parametrize("damaged", ["{", pytest.param("[" * 10**5, id="deep"), '{"texts": "[1]"}', "7"])
def test_a_damaged_cache_is_named(damaged, path):
    run = candidates(documents=3)
    RankGPT(cached(oracle, path))(run)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE store SET value = ?", [damaged])
    with pytest.raises(ValueError, match=path.name):
        RankGPT(cached(oracle, path))(run)


@pytest.mark.parametrize("cls", [RankGPT, LLMClient])
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
