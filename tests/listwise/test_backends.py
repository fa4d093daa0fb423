"""What servers do to a run, through the vendors' real clients, and tiny models in this process and behind a server."""

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
    MalformedReplyError,
    OpenAIBackend,
    Pointwise,
    Prices,
    RankGPT,
    UnreadableReplyError,
)

from ..support import tiny_long
from ..support.llm import SECRET, SECRET_PARAMETERS, Answer, candidates, completion, order, serving
from ..support.memory import misplaced

pytest.importorskip("openai")
tenacity = pytest.importorskip("tenacity")

HUGE = pytest.param(10**400, id="huge")
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


def test_a_good_reply():
    with serving(Answer(completion(ORDER))) as server:
        client = LLMClient(backend_at(server.url), prices=Prices(1.0, 10.0))
        assert ranked(client) == ["d2", "d0", "d1"]
    ((path, _, body),) = server.requests
    assert (path, body["model"]) == ("/v1/chat/completions", "tiny")
    assert set(body) - {"model", "messages"} == {"temperature"}
    assert [message["role"] for message in body["messages"]] == ["system", *["user", "assistant"] * 4, "user"]
    table = client.ledger.table().iloc[0]
    assert (table["input_tokens"], table["output_tokens"], table["estimated"]) == (100, 10, 0)
    assert client.ledger.cost == pytest.approx((100 * 1.0 + 10 * 10.0) / 1e6)


@pytest.mark.parametrize("status", [400, 401])
def test_what_cannot_get_better_is_asked_once_in_a_run_of_many_queries(status):
    with serving(Answer(complaint("no"), status)) as server, pytest.raises(BackendError, match="no"):
        RankGPT(backend_at(server.url), on_failure="keep")(candidates(queries=20, documents=3))
    assert len(server.requests) == 1


def test_what_may_get_better_is_asked_again_so_often():
    late = Answer(complaint("busy"), 429, headers={"Retry-After": "0.7"})
    with serving(late, Answer(complaint("busy"), 500, headers=SOON), Answer(completion(ORDER))) as server:
        start = time.monotonic()
        assert ranked(backend_at(server.url)) == ["d2", "d0", "d1"]
        assert time.monotonic() - start >= 0.7
    assert len(server.requests) == 3
    busy = Answer(complaint("busy"), 503, headers=SOON)
    with serving(busy) as server, pytest.raises(BackendError, match="busy"):
        ranked(backend_at(server.url, max_retries=2), on_failure="keep")
    assert len(server.requests) == 3


def test_slow_and_absent_servers():
    with serving(Answer(completion(ORDER), wait=0.6), Answer(completion(ORDER))) as server:
        assert ranked(backend_at(server.url, timeout=0.3)) == ["d2", "d0", "d1"]
        assert len(server.requests) == 2
    with pytest.raises(BackendError, match="APIConnectionError"):
        ranked(backend_at(server.url, max_retries=0))


BROKEN = {
    "refusal": Answer({"error": f"Unexpected endpoint, your key {SECRET} is good"}),
    "cut off": Answer(b'{"id": "1", "choi', cut=500),
    "malformed": Answer(b'{"id": "1", "choices": ['),
    "no JSON": Answer(b"<html>welcome</html>", headers={"Content-Type": "text/html"}),
    "another form": Answer({"hello": "world"}),
    "not UTF-8": Answer(b"\xff\xfe{"),
    "null": Answer(b"null"),
    "no text": Answer(completion({"type": "text"})),
    "deep": Answer(b"[" * 10**5 + b"]" * 10**5),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_replies_are_asked_for_again_and_never_a_ranking(kind, monkeypatch):
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **_: tenacity.wait_none())
    with serving(BROKEN[kind], Answer(completion(ORDER))) as server:
        assert ranked(backend_at(server.url)) == ["d2", "d0", "d1"]
    assert len(server.requests) == 2
    with serving(BROKEN[kind]) as server, pytest.raises(BackendError) as caught:
        ranked(backend_at(server.url, max_retries=1), on_failure="keep")
    assert len(server.requests) == 2
    assert (kind == "cut off") != isinstance(caught.value, MalformedReplyError)
    assert server.url in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("logprob", [HUGE, float("nan"), None, "likely"])
def test_log_probabilities_that_are_no_numbers_are_asked_for_again(logprob, monkeypatch):
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda **_: tenacity.wait_none())
    first = Answer(with_logprobs({"Yes": logprob, "No": -1.0}))
    with serving(first, Answer(with_logprobs({"Yes": -0.5, "No": -1.0}))) as server:
        found = Pointwise(backend_at(server.url))(RUN[:1])
        assert found["score"].tolist() == pytest.approx([0.5])
    assert len(server.requests) == 2


def with_logprobs(logprobs):
    tokens = [{"token": token, "logprob": value, "bytes": None} for token, value in logprobs.items()]
    reply = completion("Yes")
    reply["choices"][0]["logprobs"] = {"content": [{"token": "Yes", "logprob": 0.0, "top_logprobs": tokens}]}
    return reply


@pytest.mark.parametrize("count", [HUGE, -5, "many"])
def test_a_usage_that_is_no_number_of_tokens_is_counted_here(count):
    reply = {**completion(ORDER), "usage": {"prompt_tokens": count, "completion_tokens": 10}}
    with serving(Answer(reply)) as server:
        client = LLMClient(backend_at(server.url), prices=Prices(1.0, 10.0))
        assert ranked(client) == ["d2", "d0", "d1"]
    (call,) = client.ledger.calls
    assert call.estimated
    assert call.input_tokens > 50


def test_an_outage_told_in_deep_json_is_one():
    deep = Answer(b"[" * 10**5 + b"]" * 10**5, 503, headers=SOON)
    with serving(deep) as server, pytest.raises(BackendError, match=f"InternalServerError at {server.url}"):
        ranked(backend_at(server.url, max_retries=1))
    assert len(server.requests) == 2


TOO_LONG = [
    complaint("prompt is too long: 210000 tokens > 200000 maximum"),
    complaint("input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input"),
    complaint("the request exceeds the available context size"),
    complaint("too big", "context_length_exceeded"),
    {"detail": "This model's maximum context length is 8192 tokens."},
]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_servers_say_in_many_ways_that_a_prompt_is_too_long(status):
    with serving(*(Answer(said, status) for said in TOO_LONG)) as server:
        for _ in TOO_LONG:
            with pytest.raises(ContextOverflowError):
                backend_at(server.url)(QUESTION)
    other = complaint("max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens")
    with serving(Answer(other, status)) as server, pytest.raises(BackendError, match="9000 > 8192"):
        ranked(backend_at(server.url))
    assert len(server.requests) == 1


def test_a_dead_server_is_named_without_what_is_secret_in_its_address():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    backend = OpenAIBackend("tiny", base_url=f"http://me:{SECRET}@{place}/v1?key={SECRET}", max_retries=0)
    with pytest.raises(BackendError, match=rf"APIConnectionError at http://{place}/v1.*: .*refused") as caught:
        backend(QUESTION)
    assert SECRET not in str(caught.value)


def test_refusals_and_empty_replies_are_failures():
    with serving(Answer(completion(""))) as server, pytest.raises(UnreadableReplyError):
        ranked(backend_at(server.url), retries=0)
    refusal = Answer(completion(None, refusal="I will not rank these 3."))
    with serving(refusal) as server, pytest.raises(UnreadableReplyError, match="I will not rank these 3"):
        ranked(backend_at(server.url), retries=0)


# Keys.


def test_keys_appear_nowhere(tmp_path, caplog):
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
        ranker = RankGPT(backend_at(server.url))
        ranker(RUN)
        pickled = pickle.dumps(ranker)
        assert SECRET.encode() not in pickled
        assert pickle.loads(pickled)(RUN).equals(ranker(RUN))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with serving(Answer(completion(ORDER))) as server:
        ranked(OpenAIBackend("tiny", base_url=f"{server.url}/v1"))
    assert SECRET not in str(server.requests)


def test_missing_keys_are_named(monkeypatch):
    for variable in ("OPENAI_API_KEY", "LONGDOC_TEST_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for backend, variable in (
        (OpenAIBackend("gpt"), "OPENAI_API_KEY"),
        (backend_at("http://127.0.0.1:9"), "LONGDOC_TEST_KEY"),
    ):
        with pytest.raises(BackendError, match=variable):
            RankGPT(backend)(RUN)


@pytest.mark.parametrize("parameters", SECRET_PARAMETERS)
def test_parameters_that_hold_keys_are_refused(parameters):
    with pytest.raises(ValueError, match=r"parameters must not have .*client=") as caught:
        backend_at("http://x", parameters=parameters)
    assert SECRET not in str(caught.value)


def test_a_schema_may_have_fields_of_any_name():
    schema = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
    parameters = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert backend_at("http://x", parameters=parameters).settings == {"api": "openai", **parameters}


def test_wrong_parameters():
    with pytest.raises(ValueError, match="api_key, extra_headers"):
        backend_at("http://x", parameters={"extra_headers": {"Authorization": SECRET}, "api_key": SECRET})
    with pytest.raises(TypeError, match="no_such"):
        backend_at("http://x", parameters={"no_such": 1, "max_tokens": 1})(QUESTION)
    with pytest.raises(TypeError, match="len returned int"):
        ranked(len)


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
    with pytest.raises(ContextOverflowError, match="4096"):
        backend([{"role": "user", "content": "dog " * 5000}])
    ranker = RankGPT(LLMClient(backend), **SILENT)
    with pytest.warns(IncompleteReplyWarning):
        out = ranker(RUN)
    assert out[["llm_failed", "llm_refusals"]].values.tolist() == [[1, 2]] * 3
    assert [call.estimated for call in ranker.ledger.calls] == [False] * 2
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


def test_replies_are_those_of_the_weights_in_the_folder(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "model")

    def client() -> LLMClient:
        return LLMClient(small(folder), cache=tmp_path / "replies.sqlite")

    first, late = client(), small(folder)
    old, yes = first.ask("q", QUESTION), first.first_token("q", QUESTION, ("yes", "no"), 2)
    who = RankGPT(late).describe()  # the folder is looked at
    assert client().ask("q", QUESTION) == old
    with_other_weights(folder)
    with pytest.raises(ValueError, match="has changed"):
        late(QUESTION)
    assert RankGPT(small(folder)).describe() != who
    second = client()
    assert second.ask("q", QUESTION).text == small(folder)(QUESTION).text != old.text
    assert second.first_token("q", QUESTION, ("yes", "no"), 2) != yes
    assert not any(call.replayed for call in second.ledger.calls)
    # Who has loaded the old ones answers by them.
    assert first.ask("q", [*QUESTION, *QUESTION]) == first.backend([*QUESTION, *QUESTION])
    with_other_weights(folder)  # the first ones again
    assert client().ask("q", QUESTION) == old
    assert len(first.cache) == 5


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
