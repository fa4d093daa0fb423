"""What servers do to a run, through the vendors' real clients, and tiny models in this process and behind a server."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pyterrier_longdoc.listwise import (
    AnthropicBackend,
    BackendError,
    BackToFront,
    ContextOverflowError,
    HuggingFaceBackend,
    IncompleteReplyWarning,
    LLMClient,
    MalformedReplyError,
    OpenAIBackend,
    Prices,
    RankGPT,
    UnreadableReplyError,
)

from ..support import tiny_long
from ..support.llm import Answer, Scripted, candidates, claude_message, completion, oracle, order, serving
from ..support.memory import misplaced

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
tenacity = pytest.importorskip("tenacity")

SECRET = "sk-very-secret-0123456789"
ORDER = "[3] > [1] > [2]"
RUN = candidates(documents=3)
SOON = {"retry-after-ms": "10"}
QUESTION = [{"role": "user", "content": "x"}]


class OpenAI:
    """How the tests talk to the OpenAI-compatible backend."""

    path, parameters, reply = "/v1/chat/completions", {"temperature"}, staticmethod(completion)

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

    path, parameters, reply = "/v1/messages", {"max_tokens"}, staticmethod(claude_message)

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


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("LONGDOC_TEST_KEY", SECRET)


@pytest.fixture(params=[OpenAI, Anthropic])
def api(request):
    return request.param


def ranked(backend, **options):
    return order(RankGPT(backend, **options)(RUN))


def test_a_good_reply(api):
    with serving(Answer(api.reply(ORDER))) as server:
        client = LLMClient(api.backend(server.url), prices=Prices(1.0, 10.0))
        assert ranked(client) == ["d2", "d0", "d1"]
    ((path, _, body),) = server.requests
    assert (path, body["model"]) == (api.path, "tiny")
    assert set(body) - {"model", "messages", "system"} == api.parameters
    assert [message["role"] for message in api.sent(body)] == ["system", *["user", "assistant"] * 4, "user"]
    table = client.ledger.table().iloc[0]
    assert (table["input_tokens"], table["output_tokens"], table["estimated"]) == (100, 10, 0)
    assert client.ledger.cost == pytest.approx((100 * 1.0 + 10 * 10.0) / 1e6)


@pytest.mark.parametrize("status", [400, 401])
def test_what_cannot_get_better_is_asked_once_in_a_run_of_many_queries(api, status):
    with (
        serving(Answer(api.error(f"no, {SECRET} is wrong"), status)) as server,
        pytest.raises(BackendError, match=r"tiny: .*Error at .*, \*\*\* is wrong"),
    ):
        RankGPT(api.backend(server.url), on_failure="keep")(candidates(queries=20, documents=3))
    assert len(server.requests) == 1


def test_what_may_get_better_is_asked_again_so_often(api):
    late = Answer(api.error("busy"), 429, headers={"Retry-After": "0.7"})
    with serving(late, Answer(api.error("busy"), 500, headers=SOON), Answer(api.reply(ORDER))) as server:
        start = time.monotonic()
        assert ranked(api.backend(server.url)) == ["d2", "d0", "d1"]
        assert 0.7 <= time.monotonic() - start < 5
    assert len(server.requests) == 3
    busy = Answer(api.error("busy"), 503, headers=SOON)
    with serving(busy) as server, pytest.raises(BackendError, match=r"tiny: .*busy"):
        ranked(api.backend(server.url, max_retries=2), on_failure="keep")
    assert len(server.requests) == 3


def test_slow_and_absent_servers(api):
    with serving(Answer(api.reply(ORDER), wait=0.6), Answer(api.reply(ORDER))) as server:
        assert ranked(api.backend(server.url, timeout=0.3)) == ["d2", "d0", "d1"]
        assert len(server.requests) == 2
    with serving(Answer(api.reply(ORDER), wait=0.6)) as server, pytest.raises(BackendError, match="APITimeoutError"):
        ranked(api.backend(server.url, timeout=0.3, max_retries=0))
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
def test_broken_replies_are_asked_for_again_and_never_a_ranking(api, kind, monkeypatch):
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **_: tenacity.wait_none())
    with serving(BROKEN[kind], Answer(api.reply(ORDER))) as server:
        assert ranked(api.backend(server.url)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2
    with serving(BROKEN[kind]) as server, pytest.raises(BackendError) as caught:
        ranked(api.backend(server.url, max_retries=1), on_failure="keep")
    assert len(server.requests) == 2
    assert (kind == "cut off") != isinstance(caught.value, MalformedReplyError)


def test_context_overflow_shortens_the_documents(api):
    def answer(body):
        if sum(len(sent["content"]) for sent in api.sent(body)) > 3000:
            return Answer(api.error("This model's maximum context length is 8192 tokens."), 400)
        return Answer(api.reply(ORDER))

    with serving(answer) as server:
        ranker = RankGPT(api.backend(server.url))
        with pytest.warns(UserWarning, match="of documents .* cut by the server"):
            ranker(RUN.assign(text=[f"{i} " + "word " * 500 for i in range(3)]))
    assert 2 <= len(server.requests) < 8
    assert 0.2 < ranker.coverage.share_read < 0.5
    assert ranker.coverage.documents_cut == 3


def test_servers_say_in_many_ways_that_a_prompt_is_too_long():
    errors = [
        OpenAI.error("prompt is too long: 210000 tokens > 200000 maximum"),
        OpenAI.error("input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input"),
        OpenAI.error("the request exceeds the available context size"),
        OpenAI.error("too big", "context_length_exceeded"),
        {"detail": "This model's maximum context length is 8192 tokens."},
    ]
    answers = [Answer(error, status) for error in errors for status in (400, 413, 422)]
    with serving(*answers) as server:
        for _ in answers:
            with pytest.raises(ContextOverflowError):
                OpenAI.backend(server.url)(QUESTION)
    answer_too_long = OpenAI.error("max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens")
    with serving(Answer(answer_too_long, 400)) as server, pytest.raises(BackendError, match="9000 > 8192"):
        ranked(OpenAI.backend(server.url))
    assert len(server.requests) == 1


COMPLAINTS = {
    "detail": ({"detail": "the model is not loaded"}, "the model is not loaded"),
    "details": ({"detail": [{"loc": ["body", "top_k"], "msg": "too small"}]}, '"top_k"], "msg": "too small"'),
    "message": ({"object": "error", "message": "no such model", "code": 404}, "no such model"),
    "error": ({"error": "no such model"}, "no such model"),
    "text": (b"<h1>Bad\n Gateway</h1>", "<h1>Bad Gateway</h1>"),
    "nothing": (b"", "without a word"),
}


@pytest.mark.parametrize("kind", COMPLAINTS)
@pytest.mark.parametrize("status", [404, 422, 500])
def test_an_error_has_the_servers_words_and_address(api, kind, status):
    said, shown = COMPLAINTS[kind]
    with serving(Answer(said, status)) as server, pytest.raises(BackendError) as caught:
        api.backend(server.url, max_retries=0)(QUESTION)
    assert f" at {server.url}{api.path}: {status}, " in str(caught.value)
    assert shown in str(caught.value)
    assert "lacks /v1" not in str(caught.value)


def test_what_is_no_answer_is_shown_with_its_address(api):
    refusal = Answer({"error": f"Unexpected endpoint, your key {SECRET} is good"})
    with serving(refusal) as server, pytest.raises(MalformedReplyError) as caught:
        api.backend(server.url, max_retries=0)(QUESTION)
    assert server.url in str(caught.value)
    assert "Unexpected endpoint, your key *** is good" in str(caught.value)


def test_an_outage_told_with_status_200_does_not_blame_the_address():
    refusal = Answer({"error": {"message": "the model is busy", "code": 503}})
    with serving(refusal) as server, pytest.raises(MalformedReplyError, match=r"the model is busy$"):
        OpenAI.backend(server.url, max_retries=0)(QUESTION)


@pytest.mark.parametrize("address", ["localhost:8000/v1", "127.0.0.1:8000/v1", "//host/v1", ""])
def test_an_address_without_a_protocol_is_refused(address):
    with pytest.raises(ValueError, match=f"base_url='{address}' must begin with http:// or https://"):
        OpenAIBackend("tiny", base_url=address)


@pytest.mark.parametrize("answer", [Answer({"detail": "Not Found"}, 404), Answer(b"", 405), Answer(b"<h1>UI</h1>")])
def test_an_address_without_v1_is_suspected(answer):
    with serving(answer) as server, pytest.raises(BackendError, match="base_url probably lacks /v1"):
        OpenAIBackend("tiny", base_url=server.url, max_retries=0)(QUESTION)


def test_a_dead_server_is_named_without_what_is_secret_in_its_address():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    backend = OpenAIBackend("tiny", base_url=f"http://me:{SECRET}@{place}/v1?key={SECRET}", max_retries=0)
    with pytest.raises(BackendError, match=rf"APIConnectionError at http://{place}/v1.*: .*refused") as caught:
        backend(QUESTION)
    assert SECRET not in str(caught.value)


def test_refusals_and_empty_replies_are_failures(api):
    with serving(Answer(api.reply(""))) as server, pytest.raises(UnreadableReplyError):
        ranked(api.backend(server.url), retries=1)
    assert len(server.requests) == 2
    refusal = Answer(completion(None, refusal="I will not rank these 3."))
    with serving(refusal) as server, pytest.raises(UnreadableReplyError, match="I will not rank these 3"):
        ranked(OpenAI.backend(server.url), retries=0)


def test_eight_requests_overlap_and_no_list_is_paid_twice(api, tmp_path):
    together = threading.Barrier(8, timeout=30)

    def answer(body):
        together.wait()  # nobody is answered before eight have asked
        return Answer(api.reply(oracle(api.sent(body))))

    run = candidates(queries=16, documents=6)
    with serving(answer) as server:
        client = LLMClient(api.backend(server.url), cache=tmp_path / "replies.sqlite")
        ranker = RankGPT(client, schedule=BackToFront(4, 2), concurrency=8)
        assert ranker(run).equals(ranker(run))
    bodies = [str(body) for _, _, body in server.requests]
    assert len(set(bodies)) == len(bodies) == 16 * 2


# Keys.


def test_keys_appear_nowhere(api, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    leaking = [Answer(api.reply(ORDER)), Answer(api.error(f"your key {SECRET} is bad"), 401)]
    with serving(*leaking) as server:
        client = LLMClient(api.backend(server.url), cache=tmp_path / "replies.sqlite")
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


def test_a_key_is_not_pickled_and_goes_only_to_the_server_it_is_for(monkeypatch):
    with serving(Answer(completion(ORDER))) as server:
        ranker = RankGPT(OpenAI.backend(server.url))
        ranker(RUN)
        pickled = pickle.dumps(ranker)
        assert SECRET.encode() not in pickled
        assert pickle.loads(pickled)(RUN).equals(ranker(RUN))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with serving(Answer(completion(ORDER))) as server:
        ranked(OpenAIBackend("tiny", base_url=f"{server.url}/v1"))
    assert SECRET not in str(server.requests)


def test_missing_keys_are_named(monkeypatch):
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "LONGDOC_TEST_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for backend, variable in (
        (OpenAIBackend("gpt"), "OPENAI_API_KEY"),
        (OpenAI.backend("http://127.0.0.1:9"), "LONGDOC_TEST_KEY"),
        (AnthropicBackend("claude"), "ANTHROPIC_API_KEY"),
    ):
        with pytest.raises(BackendError, match=variable):
            RankGPT(backend)(RUN)


def test_wrong_parameters(api):
    with pytest.raises(ValueError, match="must not have api_key, extra_headers"):
        api.backend("http://x", parameters={"extra_headers": {"Authorization": SECRET}, "api_key": SECRET})
    with pytest.raises(TypeError, match="no_such"):
        api.backend("http://x", parameters={"no_such": 1, "max_tokens": 1})(QUESTION)


def test_missing_libraries_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    for backend in (OpenAIBackend("x", base_url="http://127.0.0.1:9"), AnthropicBackend("x")):
        with pytest.raises(ImportError, match=r"pip install (openai|anthropic) .*\[llm\]"):
            RankGPT(backend)(RUN)


def test_a_function_must_return_text():
    with pytest.raises(TypeError, match=r"returned int; it must return a string or a Reply"):
        RankGPT(Scripted(lambda messages: 3))(RUN)


# Models in this process, and of this process behind a server.

TRANSFORMERS = Path(sys.executable).with_name("transformers")
SILENT = {"on_failure": "keep", "retries": 1, "report": True}


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


def test_a_local_model_answers_and_counts_tokens(causal_model):
    backend = small(causal_model)
    reply = backend([{"role": "user", "content": "the old dog"}])
    assert 1 <= reply.output_tokens <= 12
    shown = AutoTokenizer.from_pretrained(causal_model)("user the old dog a ", add_special_tokens=False)
    assert reply.input_tokens == len(shown["input_ids"])
    assert causal_model not in repr(backend)
    assert misplaced(backend._load()[0]) == []
    ranker = RankGPT(LLMClient(backend), **SILENT)
    with pytest.warns(IncompleteReplyWarning, match="1 of 1 prompts had no readable reply"):
        out = ranker(RUN)
    assert out[["llm_failed", "llm_refusals"]].values.tolist() == [[1, 2]] * 3
    assert [call.estimated for call in ranker.ledger.calls] == [False] * 2
    with pytest.warns(IncompleteReplyWarning):
        assert pickle.loads(pickle.dumps(ranker))(RUN).equals(out)


def test_prompts_beyond_the_positions_are_shortened(causal_model):
    backend = small(causal_model)
    with pytest.raises(ContextOverflowError, match="the model takes 4096"):
        backend([{"role": "user", "content": "dog " * 5000}])
    ranker = RankGPT(backend, tokenizer=causal_model, **{**SILENT, "retries": 0})
    with pytest.warns(UserWarning, match="did not read .* of documents|no readable reply"):
        ranker(RUN.assign(text=[f"{i} " + "dog " * 2000 for i in range(3)]))
    assert 0.3 < ranker.coverage.share_read < 0.7
    assert ranker.coverage.documents_cut == 3


def test_a_model_without_a_chat_template_is_refused(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    with pytest.raises(ValueError, match="has no chat template: use a chat"):
        small(folder)(QUESTION)


def with_other_weights(folder) -> None:
    """Changes the weights of a folder; names, sizes and times of its files stay."""
    file = Path(folder, "model.safetensors")
    before, weights = file.stat(), load_file(file)
    # Not in place: whoever has the old file open keeps it.
    file.unlink()
    save_file({name: -weight.clone() for name, weight in weights.items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_replies_are_those_of_the_weights_in_the_folder(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "model")

    def client() -> LLMClient:
        return LLMClient(small(folder), cache=tmp_path / "replies.sqlite")

    first = client()
    old = first.ask("q", QUESTION)
    yes = first.first_token("q", QUESTION, ("yes", "no"), 2)
    who = RankGPT(small(folder)).describe()
    assert client().ask("q", QUESTION) == old
    assert len(first.cache) == 2
    with_other_weights(folder)
    assert RankGPT(small(folder)).describe() != who
    second = client()
    new = second.ask("q", QUESTION)
    assert new == small(folder)(QUESTION).text != old
    assert second.first_token("q", QUESTION, ("yes", "no"), 2) != yes
    # Who has loaded the old ones answers by them.
    assert first.ask("q", QUESTION) == old
    assert first.ask("q", [*QUESTION, *QUESTION]) == first.backend([*QUESTION, *QUESTION]).text
    assert [call.replayed for call in (*first.ledger.calls, *second.ledger.calls)] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    with_other_weights(folder)  # the first ones again
    assert client().ask("q", QUESTION) == old
    assert len(first.cache) == 5


def test_a_folder_that_has_changed_since_it_was_looked_at_is_not_loaded(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "model")
    backend = small(folder)
    assert backend.settings
    with_other_weights(folder)
    with pytest.raises(ValueError, match="has changed"):
        backend(QUESTION)
    assert pickle.loads(pickle.dumps(small(folder)))(QUESTION).text


@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS.exists(), reason="no transformers command")
def test_a_packaged_openai_compatible_server(causal_model):
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
            with pytest.warns(IncompleteReplyWarning, match="2 of 2 prompts"):
                out = RankGPT(client, concurrency=2, **SILENT)(candidates(queries=2, documents=3))
        finally:
            server.terminate()
    assert out["llm_refusals"].tolist() == [2] * 6
    assert all(call.input_tokens > 20 and 0 < call.output_tokens <= 12 for call in client.ledger.calls)
