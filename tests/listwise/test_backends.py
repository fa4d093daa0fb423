"""OpenAIBackend and HuggingFaceBackend: errors of servers, keys, and local models."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pyterrier_longdoc.listwise import (
    BackendError,
    ContextOverflowError,
    HuggingFaceBackend,
    IncompleteReplyWarning,
    LLMClient,
    OpenAIBackend,
    RankGPT,
    UnreadableReplyError,
)

from ..support import tiny_long
from ..support.llm import SECRET, SECRET_PARAMETERS, Answer, candidates, completion, order, serving

pytest.importorskip("openai")

ORDER = "[3] > [1] > [2]"
RUN = candidates(documents=3)
SOON = {"retry-after-ms": "10"}
QUESTION = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)


def backend_at(url, **options) -> OpenAIBackend:
    return OpenAIBackend("tiny", base_url=f"{url}/v1", key_variable="LONGDOC_TEST_KEY", **options)


def complaint(message, code=None):
    return {"error": {"message": message, "type": "x", "code": code}}


def ranked(backend, **options):
    return order(RankGPT(backend, **options)(RUN))


# Replies.


def test_a_chat_completion_becomes_a_ranking():
    with serving(Answer(completion(ORDER))) as server:
        assert ranked(backend_at(server.url)) == ["d2", "d0", "d1"]
    ((path, _, body),) = server.requests
    assert (path, body["model"]) == ("/v1/chat/completions", "tiny")
    assert set(body) - {"model", "messages"} == {"temperature"}
    assert [message["role"] for message in body["messages"]] == ["system", *["user", "assistant"] * 4, "user"]


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}])
def test_the_usage_of_a_reply_is_counted_and_estimated_if_the_server_reports_none(usage):
    with serving(Answer({**completion(ORDER), "usage": usage})) as server:
        client = LLMClient(backend_at(server.url))
        ranked(client)
    assert client.output_tokens == (10 if usage else 4)
    assert client.input_tokens == 100 if usage else 50 < client.input_tokens < 1000


def ended(reason, text=None, **message):
    reply = completion(text, **message)
    reply["choices"][0]["finish_reason"] = reason
    return reply


CALL = {"id": "1", "type": "function", "function": {"name": "rank", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("reply", "requests", "named"),
    [
        (completion(""), 3, "retries="),
        (completion(None, refusal="I will not rank these 3."), 3, "I will not"),
        (ended("length", "The documents are about"), 3, "The documents"),
        (ended("length"), 1, "max_tokens"),
        (ended("length", "<think>Which one"), 1, "max_tokens"),
        (ended("tool_calls", tool_calls=[CALL]), 1, "tools"),
        (ended("function_call", function_call=CALL["function"]), 1, "functions"),
        (ended("content_filter"), 1, "filter"),
        (ended("stop", reasoning_content="[3] > [1] > [2]"), 1, "reasoning"),
        (ended("stop", "", reasoning="[3] > [1] > [2]"), 1, "reasoning"),
    ],
)
@pytest.mark.parametrize("cache", [False, True])
def test_a_reply_without_an_answer_is_requested_again_if_that_can_help(reply, requests, named, cache, tmp_path):
    with serving(Answer(reply)) as server:
        for _ in range(2):
            client = LLMClient(backend_at(server.url), cache=tmp_path / "replies.sqlite" if cache else None)
            with pytest.raises(UnreadableReplyError, match=named):
                ranked(client)
    assert len(server.requests) == requests * (1 if cache else 2)
    with serving(Answer(reply)) as server, pytest.warns(IncompleteReplyWarning, match=named.rstrip("=")):
        assert ranked(backend_at(server.url), on_failure="keep") == ["d0", "d1", "d2"]


BROKEN = {
    "refusal": Answer({"error": f"Unexpected endpoint, your key {SECRET} is good"}),
    "cut off": Answer(b'{"id": "1", "choi', cut=500),
    "malformed": Answer(b'{"id": "1", "choices": ['),
    "no JSON": Answer(b"<html>welcome</html>", headers={"Content-Type": "text/html"}),
    "another form": Answer({"hello": "world"}),
    "not UTF-8": Answer(b"\xff\xfe{"),
    "null": Answer(b"null"),
    "no text": Answer(completion({"type": "text"})),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_reply_is_requested_again_and_named_without_the_key(kind, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving(BROKEN[kind], Answer(completion(ORDER))) as server:
        assert ranked(backend_at(server.url)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2
    with serving(BROKEN[kind]) as server, pytest.raises(BackendError, match=server.url) as caught:
        ranked(backend_at(server.url, max_retries=0), on_failure="keep")
    assert SECRET not in str(caught.value)


# Errors of servers.


TOO_LONG = [
    complaint("prompt is too long: 210000 tokens > 200000 maximum"),
    complaint("input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input"),
    complaint("the request exceeds the available context size"),
    complaint("too big", "context_length_exceeded"),
    {"detail": "This model's maximum context length is 8192 tokens."},
]
MAX_TOKENS = "max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens"


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (complaint("no"), 400, BackendError),
        (complaint("no"), 401, BackendError),
        (complaint(MAX_TOKENS), 400, BackendError),
        *((body, status, ContextOverflowError) for body in TOO_LONG for status in (400, 413, 422)),
    ],
)
def test_permanent_errors_are_told_apart_and_not_repeated(body, status, error):
    with serving(Answer(body, status)) as server, pytest.raises(BackendError) as caught:
        backend_at(server.url)(QUESTION)
    assert type(caught.value) is error
    assert len(server.requests) == 1


def test_a_busy_server_is_called_again_max_retries_times():
    with serving(Answer(complaint("busy"), 503, headers=SOON)) as server, pytest.raises(BackendError, match=server.url):
        ranked(backend_at(server.url, max_retries=2), on_failure="keep")
    assert len(server.requests) == 3


def test_a_server_that_exceeds_the_timeout_is_called_again():
    with serving(Answer(completion(ORDER), wait=0.6), Answer(completion(ORDER))) as server:
        assert ranked(backend_at(server.url, timeout=0.3)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2


def test_an_unreachable_server_is_named_without_the_secrets_in_its_address():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    backend = OpenAIBackend("tiny", base_url=f"http://me:{SECRET}@{place}/v1?key={SECRET}", max_retries=0)
    with pytest.raises(BackendError, match=f"http://{place}/v1") as caught:
        backend(QUESTION)
    assert SECRET not in str(caught.value)


# Keys.


def test_keys_are_in_no_repr_error_log_or_file(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    leaking = [Answer(completion(ORDER)), Answer(complaint(f"your key {SECRET} is bad"), 401)]
    with serving(*leaking) as server:
        client = LLMClient(backend_at(server.url), cache=tmp_path / "replies.sqlite")
        ranker = RankGPT(client)
        ranker(RUN)
        with pytest.raises(BackendError) as caught:
            ranker(RUN.assign(query="other"))
    assert SECRET in str(server.requests)  # it was sent
    assert caught.value.__context__ is None
    shown = [
        *(repr(one) + str(one) for one in (client.backend, client, ranker, client.cache, caught.value)),
        "".join(traceback.format_exception(caught.value)),
        str(vars(caught.value)),
        caplog.text,
    ]
    assert not any(SECRET in text for text in shown)
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()


def test_a_pickled_ranker_has_no_key_and_ranks_as_before():
    with serving(Answer(completion(ORDER))) as server:
        ranker = RankGPT(backend_at(server.url))
        before = ranker(RUN)
        pickled = pickle.dumps(ranker)
        assert SECRET.encode() not in pickled
        assert pickle.loads(pickled)(RUN).equals(before)


def test_openais_key_is_not_sent_to_other_servers(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with serving(Answer(completion(ORDER))) as server:
        ranked(OpenAIBackend("tiny", base_url=f"{server.url}/v1"))
    assert SECRET not in str(server.requests)


def test_a_server_that_wants_a_key_is_an_error_that_names_the_argument():
    with serving(Answer(complaint("no"), 401)) as server, pytest.raises(BackendError, match="key_variable="):
        OpenAIBackend("tiny", base_url=f"{server.url}/v1")(QUESTION)


@pytest.mark.parametrize(
    ("backend", "variable"),
    [(OpenAIBackend("gpt"), "OPENAI_API_KEY"), (backend_at("http://127.0.0.1:9"), "LONGDOC_TEST_KEY")],
)
def test_a_missing_key_is_an_error_that_names_its_variable(backend, variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BackendError, match=variable):
        RankGPT(backend)(RUN)


@pytest.mark.parametrize("parameters", SECRET_PARAMETERS)
def test_parameters_that_hold_keys_are_refused(parameters):
    with pytest.raises(ValueError, match="parameters") as caught:
        backend_at("http://x", parameters=parameters)
    assert SECRET not in str(caught.value)


def test_a_schema_can_have_fields_with_any_name():
    schema = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
    parameters = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert backend_at("http://x", parameters=parameters).settings == {"api": "openai", **parameters}


def test_a_function_must_return_a_string_or_a_reply():
    with pytest.raises(TypeError, match="len returned int"):
        ranked(len)


# Models in this process, and of this process behind a server.

TRANSFORMERS = Path(sys.executable).with_name("transformers")
SILENT = {"on_failure": "keep", "retries": 1}


@pytest.fixture(scope="module")
def causal_model(tmp_path_factory) -> str:
    """Folder of a tiny random Llama with a chat template."""
    folder = tiny_long.decoder(tmp_path_factory.mktemp("causal"), "llama", max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def small(model) -> HuggingFaceBackend:
    return HuggingFaceBackend(model, parameters={"max_new_tokens": 12, "do_sample": False}, device="cpu")


def test_a_local_model_counts_its_tokens(causal_model):
    reply = small(causal_model)([{"role": "user", "content": "the old dog"}])
    shown = AutoTokenizer.from_pretrained(causal_model)("user the old dog a ", add_special_tokens=False)
    assert reply.input_tokens == len(shown["input_ids"])
    assert 1 <= reply.output_tokens <= 12


def test_a_local_model_without_an_answer_within_its_tokens_is_called_once(causal_model):
    # Only the special token 0, which is decoded as nothing.
    parameters = {"max_new_tokens": 3, "suppress_tokens": list(range(1, 380)), "eos_token_id": 379}
    client = LLMClient(HuggingFaceBackend(causal_model, parameters=parameters))
    with pytest.raises(UnreadableReplyError, match="max_new_tokens"):
        ranked(client)
    assert client.calls == 1


def test_a_prompt_beyond_the_positions_of_a_local_model_is_a_context_overflow(causal_model):
    with pytest.raises(ContextOverflowError, match="4096"):
        small(causal_model)([{"role": "user", "content": "dog " * 5000}])


def test_a_ranker_with_a_local_model_can_be_pickled(causal_model):
    ranker = RankGPT(LLMClient(small(causal_model)), **SILENT)
    with pytest.warns(IncompleteReplyWarning):
        out = ranker(RUN)
    assert ranker.counts[["llm_failed", "llm_refusals"]].values.tolist() == [[1, 2]]
    assert ranker.client.calls == 2
    with pytest.warns(IncompleteReplyWarning):
        assert pickle.loads(pickle.dumps(ranker))(RUN).equals(out)


def with_other_weights(folder) -> None:
    """Changes the weights of a folder; names, sizes and times of its files stay."""
    file = Path(folder, "model.safetensors")
    before, weights = file.stat(), load_file(file)
    # Not in place: whoever has the old file open keeps it.
    file.unlink()
    save_file({name: -weight.clone() for name, weight in weights.items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_cached_replies_are_used_only_with_the_same_weights(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "model")

    def reply() -> tuple:
        client = LLMClient(small(folder), cache=tmp_path / "replies.sqlite")
        return client.ask("q", QUESTION), client.cached

    first, _ = reply()
    with_other_weights(folder)
    other, replayed = reply()
    assert other.text == small(folder)(QUESTION).text != first.text
    assert replayed == 0
    with_other_weights(folder)  # the first ones again
    assert reply() == (first, 1)


@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS.exists(), reason="no transformers command")
def test_a_server_of_transformers_can_rank(causal_model):
    for module in ("fastapi", "uvicorn"):
        pytest.importorskip(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [TRANSFORMERS, "serve", causal_model, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    parameters = {"max_tokens": 12, "temperature": 0}
    # It is asked again and again until it has started.
    backend = OpenAIBackend(causal_model, base_url=f"http://127.0.0.1:{port}/v1", parameters=parameters, max_retries=20)
    client = LLMClient(backend)
    with subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}) as server:
        try:
            ranker = RankGPT(client, concurrency=2, **SILENT)
            with pytest.warns(IncompleteReplyWarning):
                ranker(candidates(queries=2, documents=3))
        finally:
            server.terminate()
    assert ranker.counts["llm_refusals"].tolist() == [2] * 2
    assert client.input_tokens > 20 * client.calls
    assert 0 < client.output_tokens <= 12 * client.calls
