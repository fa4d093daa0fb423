"""A reranker behind a server on loopback, in each published form, over a local cross-encoder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from . import tiny
from .llm import Answer, serving

LONGEST = 128
"""Tokens that the tiny cross-encoder takes."""


_ONE_AT_A_TIME = threading.Lock()
"""A server answers in several threads, and a tokenizer changes its settings in each call."""


@cache
def _model() -> tuple[Any, Any]:
    folder = tiny.encoder()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def logits(queries: Sequence[str], texts: Sequence[str]) -> list[float]:
    """The cross-encoder's own scores of pairs, by transformers alone; pairs that are too long are cut."""
    with _ONE_AT_A_TIME, torch.inference_mode():
        model, tokenizer = _model()
        encoded = tokenizer(
            list(queries), list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        return model(**encoded).logits[:, 0].tolist()


def tokens(query: str, text: str) -> int:
    """Tokens of a pair, special ones included."""
    with _ONE_AT_A_TIME:
        return len(_model()[1](query, text)["input_ids"])


class TeiForm:
    api, path = "tei", "/rerank"

    @staticmethod
    def asked(body: dict) -> tuple[str, list[str], bool]:
        assert set(body) - {"model", "user"} == {"query", "texts", "raw_scores", "truncate"}
        assert body["raw_scores"] is True
        return body["query"], body["texts"], body["truncate"]

    @staticmethod
    def reply(scores: list[tuple[int, float]]) -> Any:
        return [{"index": index, "score": score} for index, score in scores]

    @staticmethod
    def too_long(length: int) -> Answer:
        words = f"Input validation error: `inputs` must have less than {LONGEST} tokens. Given: {length}"
        return Answer({"error": words, "error_type": "Validation"}, 413)

    @staticmethod
    def about(path: str) -> Answer:
        told = {"model_id": "tiny", "model_sha": "abc", "max_input_length": LONGEST, "max_client_batch_size": 4}
        return Answer(told) if path == "/info" else Answer({}, 404)


class VllmForm:
    api, path = "vllm", "/score"

    @staticmethod
    def asked(body: dict) -> tuple[str, list[str], bool]:
        assert set(body) - {"model", "user", "truncate_prompt_tokens"} == {"text_1", "text_2", "use_activation"}
        assert body["use_activation"] is False
        return body["text_1"], body["text_2"], "truncate_prompt_tokens" in body

    @staticmethod
    def reply(scores: list[tuple[int, float]]) -> Any:
        data = [{"index": index, "object": "score", "score": score} for index, score in scores]
        return {"id": "score-1", "object": "list", "created": 1, "model": "tiny", "data": data, "usage": {}}

    @staticmethod
    def too_long(length: int) -> Answer:
        words = f"This model's maximum context length is {LONGEST} tokens. However, your prompt has {length}."
        return Answer({"error": {"message": words, "type": "BadRequestError", "code": 400}}, 400)

    @staticmethod
    def about(path: str) -> Answer:
        listed = [{"id": "tiny", "object": "model", "max_model_len": LONGEST}]
        return Answer({"object": "list", "data": listed}) if path == "/v1/models" else Answer({}, 404)


class CohereForm:
    api, path = "cohere", "/v2/rerank"

    @staticmethod
    def asked(body: dict) -> tuple[str, list[str], bool]:
        assert set(body) - {"model", "user"} == {"query", "documents", "top_n"}
        assert body["top_n"] == len(body["documents"])
        return body["query"], body["documents"], True

    @staticmethod
    def reply(scores: list[tuple[int, float]]) -> Any:
        results = [{"index": index, "relevance_score": score} for index, score in scores]
        return {"id": "1", "results": results, "meta": {"api_version": {"version": "2"}}}

    @staticmethod
    def about(path: str) -> Answer:
        return Answer({"message": "not found"}, 404)


class InfinityForm(CohereForm):
    api, path = "infinity", "/rerank"

    @staticmethod
    def asked(body: dict) -> tuple[str, list[str], bool]:
        assert body.pop("raw_scores") is True
        return CohereForm.asked(body)

    @staticmethod
    def about(path: str) -> Answer:
        return Answer({"data": [{"id": "tiny", "backend": "torch"}]}) if path == "/models" else Answer({}, 404)


class LlamaForm:
    api, path = "llama.cpp", "/v1/rerank"

    @staticmethod
    def asked(body: dict) -> tuple[str, list[str], bool]:
        assert set(body) - {"model", "user"} == {"query", "documents"}
        return body["query"], body["documents"], False

    @staticmethod
    def reply(scores: list[tuple[int, float]]) -> Any:
        results = [{"index": index, "relevance_score": score} for index, score in scores]
        return {"model": "tiny", "object": "list", "usage": {}, "results": results}

    @staticmethod
    def too_long(length: int) -> Answer:
        words = f"input ({length} tokens) is too large to process. increase the physical batch size"
        return Answer({"error": {"code": 500, "message": words, "type": "server_error"}}, 500)

    @staticmethod
    def about(path: str) -> Answer:
        return Answer({"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}, 404)


FORMS: list[Any] = [TeiForm, VllmForm, CohereForm, InfinityForm, LlamaForm]


def answers(form: Any, change: Callable[[Any], Any] = lambda reply: reply) -> Callable[[dict], Answer]:
    """Answers with the cross-encoder's scores, the best first, in a form; `change` makes something else of a reply."""

    def answer(body: dict) -> Answer:
        query, texts, cuts = form.asked(dict(body))
        longest = max(tokens(query, text) for text in texts)
        if longest > LONGEST and not cuts:
            return form.too_long(longest)
        scores = logits([query] * len(texts), texts)
        ranked = sorted(enumerate(scores), key=lambda each: -each[1])
        return Answer(form.reply(change(ranked)))

    return answer


def reranker(form: Any, *faults: Any):
    """A server in this form, which first answers with these faults; see `serving`."""
    return serving(*faults, answers(form), about=form.about)


def sent(server: Any, form: Any) -> list[tuple[str, str]]:
    """The pairs that a server was asked for, once for each request that has them."""
    asked = [form.asked(dict(body)) for _, _, body in server.requests]
    return [(query, text) for query, texts, _ in asked for text in texts]
