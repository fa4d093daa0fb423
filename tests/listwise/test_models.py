"""Real models behind the backends: a tiny random causal model in this process, and served by `transformers serve`."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pyterrier_longdoc.listwise import (
    ContextOverflowError,
    HuggingFaceBackend,
    IncompleteReplyWarning,
    LLMClient,
    OpenAIBackend,
    RankGPT,
    UnreadableReplyError,
)

from ..support import tiny
from ..support.llm import candidates

RUN = candidates(queries=2, documents=3)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
SILENT = {"on_failure": "keep", "retries": 1, "report": True}


@pytest.fixture(scope="module")
def causal_model(tmp_path_factory) -> str:
    """Folder of a tiny random Llama with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("causal")
    tokenizer = tiny.tokenizer(segments=False)
    tokenizer.eos_token = "[SEP]"
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def small(model, **changes) -> HuggingFaceBackend:
    return HuggingFaceBackend(model, parameters={"max_new_tokens": 12, "do_sample": False, **changes}, device="cpu")


def test_a_local_model_answers_and_counts_tokens(causal_model):
    backend = small(causal_model)
    messages = [{"role": "user", "content": "the old dog"}]
    reply = backend(messages)
    assert 1 <= reply.output_tokens <= 12
    assert reply.input_tokens == len(tiny.tokenizer()("user the old dog a", add_special_tokens=False)["input_ids"])
    assert backend(messages) == reply
    assert causal_model not in repr(backend)


def test_random_models_are_failures_and_never_rankings(causal_model):
    client = LLMClient(small(causal_model))
    ranker = RankGPT(client, **SILENT)
    with pytest.warns(IncompleteReplyWarning, match="2 of 2 prompts had no readable reply"):
        out = ranker(RUN)
    assert out["llm_failed"].tolist() == [1] * 6
    assert out["llm_refusals"].tolist() == [2] * 6
    assert [call.estimated for call in client.ledger.calls] == [False] * 4
    with pytest.raises(UnreadableReplyError):
        RankGPT(client)(RUN)
    restored = pickle.loads(pickle.dumps(ranker))
    with pytest.warns(IncompleteReplyWarning):
        assert restored(RUN).equals(out)


def test_prompts_beyond_the_positions_are_shortened(causal_model):
    backend = small(causal_model)
    with pytest.raises(ContextOverflowError, match="the model takes 4096"):
        backend([{"role": "user", "content": "dog " * 5000}])
    long = RUN.assign(text=[f"{i} " + "dog " * 2000 for i in range(6)])
    ranker = RankGPT(backend, tokenizer=tiny.tokenizer(), **{**SILENT, "retries": 0})
    with pytest.warns(UserWarning, match="did not read all of the text|no readable reply"):
        ranker(long)
    assert 0.3 < ranker.coverage.share_read < 0.7
    assert ranker.coverage.documents_cut == 6


def test_a_model_without_a_chat_template_is_refused(causal_model, tmp_path):
    folder = shutil.copytree(causal_model, tmp_path / "plain")
    for file in folder.glob("chat_template*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no chat template: use a chat"):
        small(folder)([{"role": "user", "content": "x"}])


@pytest.fixture(scope="module")
def model_server(causal_model, tmp_path_factory):
    """Address of `transformers serve` with the tiny model, an OpenAI-compatible server."""
    for module in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"transformers serve needs {module}")
    if shutil.which("transformers") is None:
        pytest.skip("no transformers command")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = ["transformers", "serve", causal_model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        )
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_until_healthy(server: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            pytest.skip(f"transformers serve does not run here: {log.read_text()[-500:]}")
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.skip("transformers serve did not start within a minute")


@pytest.mark.slow
def test_a_packaged_openai_compatible_server(model_server, causal_model, tmp_path):
    backend = OpenAIBackend(causal_model, base_url=model_server, parameters={"max_tokens": 12, "temperature": 0})
    client = LLMClient(backend, cache=tmp_path / "replies.sqlite")
    ranker = RankGPT(client, concurrency=2, **SILENT)
    with pytest.warns(IncompleteReplyWarning, match="2 of 2 prompts"):
        out = ranker(RUN)
    assert out["llm_refusals"].tolist() == [2] * 6
    assert [call.replayed for call in client.ledger.calls] == [False] * 4
    assert all(call.input_tokens > 20 and 0 < call.output_tokens <= 12 for call in client.ledger.calls)
    replay = LLMClient(backend, cache=tmp_path / "replies.sqlite", replay_only=True)
    with pytest.warns(IncompleteReplyWarning):
        assert RankGPT(replay, **SILENT)(RUN).equals(out)
