"""Models behind a server that scores pairs: requests, replies, and a check that no score is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import requests

from ..common.arguments import argument
from ..common.language import token_counter
from ..common.parallel import RunAll, in_parallel
from ..common.presentation import changes
from ..common.servers import (
    BackendError,
    ContextOverflowError,
    MalformedReplyError,
    OutageError,
    check_address,
    check_parameters,
    error_text,
    is_too_long,
    key_in,
    message_in,
    redact,
    retrying,
)
from ..modelling.external import ExternalScorer, Limits, Scores
from ..modelling.templates import Template, resolve_template


class Api(NamedTuple):
    """A published form of requests for scores and of replies: the path, and the names of the fields."""

    path: str
    query: str
    texts: str
    score: str
    """The field with the score; `index` stands beside it."""
    results: str | None
    """The field of a reply with the scores; None if the reply is a list."""
    fields: Mapping[str, Any] = {}
    count_field: str | None = None
    """The field of a request with the number of texts."""
    truncation: Mapping[str, Any] | None = {}
    """Fields that let the server cut long inputs; none if it always does, None if it always refuses them."""
    info_path: str | None = None
    """Where the server tells how much its model takes."""


APIS = {
    # huggingface/text-embeddings-inference 1.9, docs/openapi.json
    "tei": Api(
        *("/rerank", "query", "texts", "score", None),
        fields={"raw_scores": True, "truncate": False},
        truncation={"truncate": True},
        info_path="/info",
    ),
    # vllm-project/vllm, entrypoints/pooling/scoring/protocol.py
    "vllm": Api(
        *("/score", "text_1", "text_2", "score", "data"),
        fields={"use_activation": False},
        truncation={"truncate_prompt_tokens": -1},
        info_path="/v1/models",
    ),
    # docs.cohere.com/reference/rerank, also of Jina, vLLM and gateways
    "cohere": Api("/v2/rerank", "query", "documents", "relevance_score", "results", count_field="top_n"),
    # michaelfeil/infinity 0.0.78, fastapi_schemas/pymodels.py
    "infinity": Api(
        "/rerank", "query", "documents", "relevance_score", "results", fields={"raw_scores": True}, count_field="top_n"
    ),
    # ggml-org/llama.cpp, tools/server/README.md; its scores are logits
    "llama.cpp": Api("/v1/rerank", "query", "documents", "relevance_score", "results", truncation=None),
}


@dataclass(frozen=True, repr=False)
class ScoreServer(ExternalScorer):
    """A reranker on a server, as the backbone of a model over windows: `ld.MaxP(ld.ScoreServer(url))`.

    No weights are loaded. Each distinct pair of query and window is sent once, in requests with up to `batch_size`
    windows of one query. Time-outs, rate limits (429), server errors and incomplete replies are retried with
    exponential back-off up to 8 seconds, or after the server's Retry-After (up to two minutes). A wrong key or an
    invalid request raises an error at once.

    Text Embeddings Inference and vLLM are asked for logits and not to truncate: a window that is too long raises an
    error. Servers with Cohere's API truncate silently, and most of them return probabilities.

    Args:
        url: the server, e.g. `"http://localhost:8080"`; the path of the API is added unless it ends in `/rerank` or
            `/score`.
        api: its API: `"tei"` (Text Embeddings Inference, `/rerank`), `"vllm"` (`/score`), `"cohere"` (`/v2/rerank`,
            also for Jina, vLLM and gateways), `"infinity"` (`/rerank`) or `"llama.cpp"` (`/v1/rerank`).
        model: the name of the model on the server; None if there is only one. Cohere and `score_cache` require it.
        truncate: let Text Embeddings Inference or vLLM truncate windows that are too long;
            `coverage.windows_cut` counts them.
        parameters: additional or changed fields of a request.
        template: as in `CrossEncoder`, for a served language model: a prompt around query and window, for instance with
            an instruction. The part before the window's line is sent as the query, the rest as the text.
        key_variable: the environment variable with the key, which is sent as a bearer token; None sends no key.
        concurrency: the maximum number of simultaneous requests.
        timeout: seconds to wait for a reply.
        max_retries: the maximum number of retries of a request.
        tokenizer: the tokenizer of the served model, or its name. Windows and queries are then measured in its tokens
            and fit into the maximum input length, so the server does not truncate. None counts words.
        longest_input: the maximum number of tokens of a query and a window, special tokens included; None asks Text
            Embeddings Inference or vLLM.

    Raises:
        ValueError: if the address is missing or has a user, a query or a fragment, if parameters could contain keys, or
            if an argument is out of range.
    """

    url: str
    _: KW_ONLY
    api: str = argument("tei", choices=tuple(APIS))
    model: str | None = None
    truncate: bool = argument(False, needs={"api": tuple(name for name, api in APIS.items() if api.truncation)})
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    template: str | Template | None = None
    key_variable: str | None = None
    concurrency: int = argument(4, at_least=1)
    timeout: float = argument(60.0, at_least=0.001)
    max_retries: int = argument(5, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("url", self.url)
        check_parameters(self.parameters, cure="put the key into key_variable's variable")
        if self.template is not None and resolve_template(self.template).chat:
            raise ValueError(
                f"template={self.template!r} goes into a chat template, which the server must apply itself"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([repr(self.url), *changes(self, hidden=('url',))])})"

    @property
    def _address(self) -> str:
        url = str(self.url).rstrip("/")
        return url if url.endswith(("/rerank", "/score")) else url + APIS[self.api].path

    def limits(self) -> Limits:
        """Return the server's limits, with `longest_input` if given."""
        api, limits = APIS[self.api], Limits()
        if api.info_path is not None:
            address = self._address.removesuffix(api.path) + api.info_path
            get = partial(requests.get, auth=_no_netrc)
            limits = self._ask(get, address, partial(_limits, model=self.model), limits, stop=Event())
        longest = self.longest_input or limits.longest_input
        if longest is not None and self.template is not None:
            longest -= token_counter(self.tokenizer)(["".join(self._parts("", ""))])[0]
        return limits._replace(longest_input=longest)

    def _parts(self, query: str, text: str) -> tuple[str, str]:
        """Return what is sent as query and as text."""
        if self.template is None:
            return query, text
        before, between, after = resolve_template(self.template).surroundings
        with_query, line_break, with_text = between.rpartition("\n")
        return before + query + with_query + line_break, with_text + text + after

    def describe(self) -> dict[str, Any]:
        """Return its address and its requests' form; ValueError without the name of a model."""
        if self.model is None:
            raise ValueError(f"{self!r} needs model= for a score_cache: set it, or omit score_cache")
        request = {"api": self.api, "truncate": self.truncate, "parameters": dict(self.parameters)}
        request |= {} if self.template is None else {"template": "\0".join(self._parts("{query}", "{text}"))}
        return {"type": type(self).__name__, "url": self._address, "model": self.model, **request}

    def warning(self) -> str | None:
        """Return a warning about servers that cut windows silently."""
        if APIS[self.api].truncation != {} or (self.tokenizer is not None and self.longest_input is not None):
            return None
        return f"{self!r} may truncate windows silently; set tokenizer= and longest_input= to avoid it."

    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> Scores:
        """Return the server's scores; BackendError if it cannot be reached, or does not give all of them."""
        rows: dict[str, list[int]] = {}
        for row, query in enumerate(queries):
            rows.setdefault(query, []).append(row)
        batches = [group[i : i + batch_size] for group in rows.values() for i in range(0, len(group), batch_size)]
        stop, values = Event(), np.zeros(len(texts))
        with requests.Session() as session:
            session.mount(self.url, requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency))
            send = partial(session.post, auth=_no_netrc)

            def ask(batch: list[int], _: RunAll) -> Scores:
                return self._query_scores(send, stop, queries[batch[0]], [texts[row] for row in batch])

            replies = in_parallel(ask, batches, self.concurrency, stop=stop)
        for batch, reply in zip(batches, replies, strict=True):
            values[batch] = reply.values
        return Scores(values, sum(reply.cut for reply in replies))

    def _query_scores(self, send: Any, stop: Event, query: str, texts: list[str]) -> Scores:
        """Return the scores of a query's texts; if one is too long and may be cut, send each by itself."""
        ask = partial(self._text_scores, send, stop, query)
        try:
            return Scores(ask(texts))
        except ContextOverflowError as error:
            if not self.truncate:
                longest = max(texts, key=len)
                raise ContextOverflowError(
                    f"{error}. The longest of the {len(texts)} windows has {len(longest)} characters and begins "
                    f"{longest[:80]!r}: set a smaller window_size, or tokenizer= of the served model, so that windows "
                    f"fit" + ", or set truncate=True" * bool(APIS[self.api].truncation)
                ) from None
        if len(texts) == 1:
            return Scores(ask(texts, APIS[self.api].truncation), cut=1)
        parts = [self._query_scores(send, stop, query, [text]) for text in texts]
        return Scores(np.concatenate([part.values for part in parts]), sum(part.cut for part in parts))

    def _text_scores(
        self, send: Any, stop: Event, query: str, texts: list[str], truncation: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        api = APIS[self.api]
        parts = [self._parts(query, text) for text in texts]
        body = {
            api.query: parts[0][0],
            api.texts: [part for _, part in parts],
            **api.fields,
            **(truncation or {}),
            **self.parameters,
        }
        body |= {} if self.model is None else {"model": self.model}
        body |= {} if api.count_field is None else {api.count_field: len(texts)}
        parse = partial(_values, api=api, number=len(texts))
        return np.asarray(self._ask(partial(send, json=body), self._address, parse, stop=stop))

    def _ask(self, send: Any, url: str, parse: Any, default: Any = None, *, stop: Event) -> Any:
        """Return the parsed reply, after retries where these may help; the default, if any, for an unknown address."""
        key = None if self.key_variable is None else key_in(self.key_variable, repr(self))
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}

        def send_once() -> Any:
            if stop.is_set():
                raise CancelledError
            failure: BackendError
            try:
                response = send(url, headers=headers, timeout=self.timeout, allow_redirects=False)
                if response.status_code == 200:
                    return parse(json.loads(response.content))
                if response.status_code == 404 and default is not None:
                    return default
                failure = self._refusal(response)
            except requests.RequestException as error:
                cause = error.args[0] if error.args else error
                failure = OutageError(f"{type(error).__name__}: {getattr(cause, 'reason', cause)}")
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                failure = MalformedReplyError(f"no reply of the form {self.api!r}: {error}")
            # Outside "except": inside it the failure would carry the original error, with the request and its key.
            failure.args = (f"{self!r}, asked at {url}: {redact(str(failure), key)}",)
            raise failure

        return retrying(self.max_retries, OutageError, MalformedReplyError, ended=stop)(send_once)

    def _refusal(self, response: Any) -> BackendError:
        status, words = response.status_code, error_text(response)
        message = f"{status}, {words}"
        if is_too_long(status, words):
            return ContextOverflowError(message)
        if status in (408, 409, 429) or status >= 500:
            outage = OutageError(message)
            with suppress(KeyError, ValueError):  # Retry-After may be a date, which is ignored
                outage.after = max(0.0, float(response.headers["Retry-After"]))
            return outage
        hint = f"; is it a server with api={self.api!r}?" if status in (400, 404, 405, 422) else ""
        if size := re.search(r"maximum allowed batch size (\d+)", words):
            hint = f"; set batch_size={size[1]}"
        return BackendError(message + hint)


def _limits(reply: Any, model: str | None) -> Limits:
    """Return how much Text Embeddings Inference, or the model in vLLM's list, takes."""
    if "data" in reply:
        models = {entry["id"]: entry for entry in reply["data"]}
        if model is None and len(models) > 1:
            raise BackendError(f"the server has the models {', '.join(models)}: choose one with model=")
        return Limits(_count(models.get(model or next(iter(models), ""), {}).get("max_model_len")))
    return Limits(_count(reply.get("max_input_length")), _count(reply.get("max_client_batch_size")))


def _count(value: Any) -> int | None:
    if value is not None and not (isinstance(value, int) and float(value) > 0):
        raise ValueError(f"the limit {value!r} is not a number of tokens or windows")
    return value


def _values(reply: Any, api: Api, number: int) -> np.ndarray:
    """Return `(number,)` scores in order of their index; ValueError if one is missing or no finite number."""
    with suppress(KeyError, OverflowError, TypeError, ValueError):
        entries = reply if api.results is None else reply[api.results]
        score_of_index = {entry["index"]: float(entry[api.score]) for entry in entries}
        values = np.array([score_of_index[index] for index in range(number)])
        if len(entries) == number and np.isfinite(values).all():
            return values
    raise ValueError(f"expected one finite {api.score} for each of {number} windows, got {message_in(reply)}")


def _no_netrc(request: Any) -> Any:
    """Keep a request as it is: `requests` would look for a key in the user's netrc file."""
    return request
