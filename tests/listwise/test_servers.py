"""What servers do to a run, through the vendors' real clients: errors, time-outs, cut-off and malformed replies."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import traceback

import pytest

from pyterrier_longdoc.listwise import (
    AnthropicBackend,
    BackendError,
    ContextOverflowError,
    LLMClient,
    MalformedReplyError,
    OpenAIBackend,
    Prices,
    RankGPT,
    UnreadableReplyError,
)

from ..support.llm import Answer, candidates, claude_message, completion, oracle, serving

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("tenacity")

SECRET = "sk-very-secret-0123456789"
ORDER = "[3] > [1] > [2]"
RUN = candidates(documents=3)
LATE = Answer({}, 429, headers={"Retry-After": "0.7"})


class OpenAI:
    """How the tests talk to the OpenAI-compatible backend."""

    path = "/v1/chat/completions"
    reply = staticmethod(completion)
    parameters = ("temperature",)

    @staticmethod
    def backend(url, **options):
        return OpenAIBackend("tiny", base_url=f"{url}/v1", key_variable="LONGDOC_TEST_KEY", **options)

    @staticmethod
    def error(message, code=None):
        return {"error": {"message": message, "type": "x", "code": code}}

    @staticmethod
    def sent(body):
        return body["messages"]


class Anthropic:
    """How the tests talk to the Anthropic backend."""

    path = "/v1/messages"
    reply = staticmethod(claude_message)
    parameters = ("max_tokens",)

    @staticmethod
    def backend(url, *, timeout=60.0, max_retries=5, **options):
        client = anthropic.Anthropic(base_url=url, api_key=SECRET, timeout=timeout, max_retries=max_retries)
        return AnthropicBackend("tiny", client=client, max_retries=max_retries, **options)

    @staticmethod
    def error(message, code=None):
        return {"type": "error", "error": {"type": "x", "message": message}}

    @staticmethod
    def sent(body):
        return [{"role": "system", "content": body["system"]}, *body["messages"]]


@pytest.fixture(params=[OpenAI, Anthropic])
def api(request, monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)
    return request.param


def ranked(backend, **options):
    out = RankGPT(backend, **options)(RUN)
    return out.sort_values("rank")["docno"].tolist()


def test_a_good_reply(api):
    with serving(Answer(api.reply(ORDER))) as server:
        client = LLMClient(api.backend(server.url), prices=Prices(1.0, 10.0))
        assert ranked(client) == ["d2", "d0", "d1"]
    ((path, _, body),) = server.requests
    assert path == api.path
    assert body["model"] == "tiny"
    assert set(body) - {"model", "messages", "system"} == set(api.parameters)
    assert [message["role"] for message in api.sent(body)] == ["system", *["user", "assistant"] * 4, "user"]
    table = client.ledger.table().iloc[0]
    assert (table["input_tokens"], table["output_tokens"], table["estimated"]) == (100, 10, 0)
    assert client.ledger.cost == pytest.approx((100 * 1.0 + 10 * 10.0) / 1e6)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_cannot_get_better_is_asked_once(api, status):
    with (
        serving(Answer(api.error(f"no, {SECRET} is wrong"), status)) as server,
        pytest.raises(BackendError, match=r"tiny: .*Error: .*\*\*\* is wrong"),
    ):
        ranked(api.backend(server.url), on_failure="keep")
    assert len(server.requests) == 1


def test_an_invalid_key_makes_one_request_in_a_run_of_many_queries(api):
    with serving(Answer(api.error("bad key"), 401)) as server, pytest.raises(BackendError, match="bad key"):
        RankGPT(api.backend(server.url), concurrency=1)(candidates(queries=20, documents=3))
    assert len(server.requests) == 1


def test_retry_after_is_honoured(api):
    with serving(LATE, Answer(api.reply(ORDER))) as server:
        start = time.monotonic()
        assert ranked(api.backend(server.url)) == ["d2", "d0", "d1"]
        assert 0.7 <= time.monotonic() - start < 5
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_get_better_is_asked_again_so_often(api, status):
    soon = {"retry-after-ms": "10"}
    with serving(Answer(api.error("busy"), status, headers=soon), Answer(api.reply(ORDER))) as server:
        assert ranked(api.backend(server.url)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2
    with (
        serving(Answer(api.error("busy"), status, headers=soon)) as server,
        pytest.raises(BackendError, match=r"tiny: .*busy"),
    ):
        ranked(api.backend(server.url, max_retries=2), on_failure="keep")
    assert len(server.requests) == 3


def test_slow_replies_time_out(api):
    with serving(Answer(api.reply(ORDER), wait=1.5), Answer(api.reply(ORDER))) as server:
        assert ranked(api.backend(server.url, timeout=0.3)) == ["d2", "d0", "d1"]
        assert len(server.requests) == 2
    with serving(Answer(api.reply(ORDER), wait=1.5)) as server, pytest.raises(BackendError, match="APITimeoutError"):
        ranked(api.backend(server.url, timeout=0.3, max_retries=0))


def test_nobody_there(api):
    with serving(Answer({})) as server:
        pass
    with pytest.raises(BackendError, match="APIConnectionError"):
        ranked(api.backend(server.url, max_retries=0))


BROKEN = {
    "cut off": Answer(b'{"id": "1", "choi', cut=500),
    "malformed": Answer(b'{"id": "1", "choices": ['),
    "no JSON": Answer(b"<html>welcome</html>", headers={"Content-Type": "text/html"}),
    "another form": Answer({"hello": "world"}),
    "not UTF-8": Answer(b"\xff\xfe{"),
    "null": Answer(b"null"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_replies_are_asked_for_again_and_never_a_ranking(api, kind):
    with serving(BROKEN[kind], Answer(api.reply(ORDER))) as server:
        assert ranked(api.backend(server.url)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2
    with serving(BROKEN[kind]) as server, pytest.raises(BackendError) as caught:
        ranked(api.backend(server.url, max_retries=1), on_failure="keep")
    assert len(server.requests) == 2
    assert (kind == "cut off") != isinstance(caught.value, MalformedReplyError)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens.",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "the request exceeds the available context size",
    ],
)
def test_context_overflow_shortens_the_documents(api, message):
    def answer(body):
        if sum(len(sent["content"]) for sent in api.sent(body)) > 3000:
            return Answer(api.error(message), 400)
        return Answer(api.reply(ORDER))

    run = RUN.assign(text="word " * 500)
    run["text"] = [f"{i} {text}" for i, text in enumerate(run["text"])]
    with serving(answer) as server:
        ranker = RankGPT(api.backend(server.url))
        with pytest.warns(UserWarning, match="3 of them cut"):
            ranker(run)
    assert 2 <= len(server.requests) < 8
    assert 0.2 < ranker.coverage.share_read < 0.5


def test_openai_error_code_for_overflow(monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)
    error = Answer(OpenAI.error("too big", "context_length_exceeded"), 400)
    with serving(error) as server, pytest.raises(ContextOverflowError):
        OpenAI.backend(server.url)([{"role": "user", "content": "x"}])


def test_refusals_and_empty_replies_are_failures(api):
    with serving(Answer(api.reply(""))) as server, pytest.raises(UnreadableReplyError):
        ranked(api.backend(server.url), retries=1)
    assert len(server.requests) == 2


def test_openai_refusal_field_is_the_reply(monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)
    with (
        serving(Answer(completion(None, refusal="I will not rank these 3."))) as server,
        pytest.raises(UnreadableReplyError, match="I will not rank these 3"),
    ):
        ranked(OpenAI.backend(server.url), retries=0)


def test_eight_requests_overlap_and_no_window_is_paid_twice(api, tmp_path):
    together = threading.Barrier(8, timeout=30)

    def answer(body):
        together.wait()  # nobody is answered before eight have asked
        return Answer(api.reply(oracle(api.sent(body))))

    run = candidates(queries=16, documents=6)
    with serving(answer) as server:
        client = LLMClient(api.backend(server.url), cache=tmp_path / "replies.sqlite")
        ranker = RankGPT(client, window_size=4, stride=2, concurrency=8)
        out = ranker(run)
        assert len(server.requests) == 16 * 2
        again = ranker(run)
        assert len(server.requests) == 16 * 2
    assert out.equals(again)
    bodies = [str(body) for _, _, body in server.requests]
    assert len(set(bodies)) == len(bodies)


# Keys.


def test_keys_appear_nowhere(api, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    cache = tmp_path / "replies.sqlite"
    leaking = [Answer(api.reply(ORDER)), Answer(api.error(f"your key {SECRET} is bad"), 401)]
    with serving(*leaking) as server:
        client = LLMClient(api.backend(server.url), cache=cache)
        ranker = RankGPT(client)
        ranker(RUN)
        with pytest.raises(BackendError) as caught:
            ranker(RUN.assign(query="other"))
    assert SECRET in str(server.requests)  # it was sent
    assert caught.value.__context__ is None
    shown = [
        *(repr(one) + str(one) for one in (client.backend, client, ranker, client.ledger, client.cache, caught.value)),
        "".join(traceback.format_exception(caught.value)),
        str(client.ledger.table()),
        str(vars(caught.value)),
        caplog.text,
    ]
    assert not any(SECRET in text for text in shown)
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()


def test_a_key_from_the_environment_is_not_pickled(monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)
    with serving(Answer(completion(ORDER))) as server:
        ranker = RankGPT(OpenAI.backend(server.url))
        ranker(RUN)
        pickled = pickle.dumps(ranker)
        assert SECRET.encode() not in pickled
        assert pickle.loads(pickled)(RUN).equals(ranker(RUN))


def test_a_key_goes_only_to_the_server_it_is_for(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with serving(Answer(completion(ORDER))) as server:
        ranked(OpenAIBackend("tiny", base_url=f"{server.url}/v1"))
    assert SECRET not in str(server.requests)


def test_missing_keys_are_named(monkeypatch):
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "LONGDOC_TEST_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for backend, variable in (
        (OpenAIBackend("gpt"), "OPENAI_API_KEY"),
        (OpenAIBackend("x", base_url="http://127.0.0.1:9", key_variable="LONGDOC_TEST_KEY"), "LONGDOC_TEST_KEY"),
        (AnthropicBackend("claude"), "ANTHROPIC_API_KEY"),
    ):
        with pytest.raises(BackendError, match=variable):
            RankGPT(backend)(RUN)


@pytest.mark.parametrize("backend", [OpenAIBackend, AnthropicBackend])
def test_parameters_with_keys_are_refused(backend):
    with pytest.raises(ValueError, match="must not have api_key, extra_headers"):
        backend("tiny", parameters={"extra_headers": {"Authorization": SECRET}, "api_key": SECRET})
