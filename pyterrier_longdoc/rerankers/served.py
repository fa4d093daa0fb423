"""Models behind a server that scores pairs: what is sent, what comes back, and whether that is all of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import requests

from ..common.arguments import argument
from ..common.presentation import changes
from ..common.servers import (
    BackendError,
    ContextOverflowError,
    MalformedReplyError,
    OutageError,
    check_address,
    is_too_long,
    key_in,
    message_in,
    public,
    retrying,
    words_of,
)
from ..modelling.external import ExternalScorer, Limits, Scores


class Api(NamedTuple):
    """A published form of requests for scores, and of replies: where they go, and how their fields are called."""

    path: str
    query: str
    texts: str
    score: str
    """Beside its `index`."""
    listed: str | None
    """The field of a reply with the scores; None if it is a list itself."""
    further: Mapping[str, Any] = {}
    number: str | None = None
    """The field of a request with the number of texts."""
    cutting: Mapping[str, Any] = {}
    """Fields that let the server cut inputs that are too long; none if it always does."""
    about: str | None = None
    """Where the server tells how much its model takes."""


APIS = {
    # huggingface/text-embeddings-inference 1.9, docs/openapi.json
    "tei": Api(
        *("/rerank", "query", "texts", "score", None),
        further={"raw_scores": True, "truncate": False},
        cutting={"truncate": True},
        about="/info",
    ),
    # vllm-project/vllm, entrypoints/pooling/scoring/protocol.py
    "vllm": Api(
        *("/score", "text_1", "text_2", "score", "data"),
        further={"use_activation": False},
        cutting={"truncate_prompt_tokens": -1},
        about="/v1/models",
    ),
    # docs.cohere.com/reference/rerank, which Jina, vLLM and gateways have as well
    "cohere": Api("/v2/rerank", "query", "documents", "relevance_score", "results", number="top_n"),
    # michaelfeil/infinity 0.0.78, fastapi_schemas/pymodels.py
    "infinity": Api(
        "/rerank", "query", "documents", "relevance_score", "results", further={"raw_scores": True}, number="top_n"
    ),
}


@dataclass(frozen=True, repr=False)
class ScoreServer(ExternalScorer):
    """A reranker behind a running server, as backbone of a model over windows: `ld.MaxP(ld.ScoreServer(url))`.

    No weights are loaded here. Each distinct query and window of a run is sent once, in requests of up to the model's
    `batch_size` windows of one query. Time-outs, rate limits (429), server errors and replies without exactly one
    finite score for each window are asked for again, with exponential back-off up to 8 seconds or as the server's
    Retry-After says (up to two minutes); a bad key or a bad request ends the run at once.

    Text Embeddings Inference and vLLM are asked for logits and not to cut windows: one that is too long ends the run,
    with a word about what to do. Servers with Cohere's form cut without a word, and mostly give probabilities.

    Args:
        url: the server, e.g. `"http://localhost:8080"`; one that ends in `/rerank` or `/score` is taken as it is.
        api: the form of its requests: `"tei"` (Text Embeddings Inference, `/rerank`), `"vllm"` (`/score`), `"cohere"`
            (`/v2/rerank`, also of Jina, vLLM and gateways) or `"infinity"` (`/rerank`).
        model: its name on the server. None for the only one; Cohere needs it, and so does a `score_cache`.
        truncate: let Text Embeddings Inference or vLLM cut windows that are too long; each of them, which the server
            has refused first, counts in `coverage.windows_cut`.
        parameters: further fields of a request, or others in place of those that are sent.
        key_variable: the environment variable with the key, which is sent as a bearer token; None sends none.
        concurrency: requests in flight at the same time.
        timeout: seconds to wait for a reply.
        max_retries: most further requests after failed ones.
        tokenizer: the served model's tokenizer, or its name: windows and queries are counted in its tokens and fit into
            the longest input, so that the server has nothing to cut. None counts words.
        longest_input: most tokens of a query and a window together, special ones included; None for what Text
            Embeddings Inference or vLLM say.

    Raises:
        ValueError: for an address that is none or holds a user, a key or a query, or an argument out of its range.
    """

    url: str
    _: KW_ONLY
    api: str = argument("tei", choices=tuple(APIS))
    model: str | None = None
    truncate: bool = argument(False, needs={"api": tuple(name for name, api in APIS.items() if api.cutting)})
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    key_variable: str | None = None
    concurrency: int = argument(4, at_least=1)
    timeout: float = argument(60.0, at_least=0.001)
    max_retries: int = argument(5, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = urlsplit(str(self.url))
        if "@" in parts.netloc or parts.query:
            # Shown, stored and compared, an address must hold no secret: it is not repeated here either.
            raise ValueError("url must hold neither user nor query: put the key into key_variable's variable")
        check_address("url", self.url)

    def __repr__(self) -> str:
        shown = [change for change in changes(self) if not change.startswith("url=")]
        return f"{type(self).__name__}({', '.join([repr(self.url), *shown])})"

    @property
    def _address(self) -> str:
        url = str(self.url).rstrip("/")
        return url if url.endswith(("/rerank", "/score")) else url + APIS[self.api].path

    def limits(self) -> Limits:
        """Return what the server says, or what it is said to take."""
        api, said = APIS[self.api], Limits()
        if api.about is not None:
            address = self._address.removesuffix(api.path) + api.about
            said = self._ask(partial(requests.get, auth=_as_it_is), address, partial(_limits, model=self.model), said)
        return said if self.longest_input is None else said._replace(longest_input=self.longest_input)

    def identity(self) -> dict[str, Any]:
        """Return where it is and what it is asked for; ValueError if nobody names its model."""
        if self.model is None:
            raise ValueError(
                f"{self!r} names no model, by which its scores could be known again: give it a name, "
                f"ScoreServer(..., model=...), or leave score_cache out"
            )
        asked = {"api": self.api, "truncate": self.truncate, "parameters": dict(self.parameters)}
        return {"type": type(self).__name__, "url": self._address, "model": self.model, **asked}

    def warning(self) -> str | None:
        """Return a word about servers that cut windows without one."""
        if APIS[self.api].cutting or (self.tokenizer is not None and self.longest_input is not None):
            return None
        return (
            f"{self!r} may cut windows without a word: servers with api={self.api!r} do not tell. With tokenizer= and "
            f"longest_input= of its model windows are sure to fit."
        )

    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> Scores:
        """Return the server's scores; raise BackendError if it cannot be asked, or does not give all of them."""
        rows: dict[str, list[int]] = {}
        for row, query in enumerate(queries):
            rows.setdefault(query, []).append(row)
        batches = [own[start : start + batch_size] for own in rows.values() for start in range(0, len(own), batch_size)]
        values, cut, ended = np.zeros(len(texts)), 0, Event()
        with requests.Session() as session, ThreadPoolExecutor(self.concurrency) as pool:
            session.mount(self.url, requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency))
            send = partial(session.post, auth=_as_it_is)

            def ask(batch: list[int]) -> Scores:
                try:
                    return self._of_query(send, ended, queries[batch[0]], [texts[row] for row in batch])
                except BaseException:
                    ended.set()
                    raise

            batch_of = {pool.submit(ask, batch): batch for batch in batches}
            try:
                for reply in as_completed(batch_of):
                    scores, batch = reply.result(), batch_of[reply]
                    values[batch], cut = scores.values, cut + scores.cut
            finally:  # at an error, and at Ctrl-C, only the requests under way are waited for
                ended.set()
        return Scores(values, cut)

    def _of_query(self, send: Any, ended: Event, query: str, texts: list[str]) -> Scores:
        """Return the scores of a query's texts; where one is too long, and may be cut, each is sent by itself."""
        ask = partial(self._of_texts, send, ended, query)
        try:
            return Scores(ask(texts))
        except ContextOverflowError as error:
            if not self.truncate:
                longest = max(texts, key=len)
                raise ContextOverflowError(
                    f"{error}. The longest of the {len(texts)} windows has {len(longest)} characters and begins "
                    f"{longest[:80]!r}: give a smaller window_size, or tokenizer= of the served model, whose windows "
                    f"fit, or let the server cut with truncate=True"
                ) from None
        if len(texts) == 1:
            return Scores(ask(texts, APIS[self.api].cutting), cut=1)
        parts = [self._of_query(send, ended, query, [text]) for text in texts]
        return Scores(np.concatenate([part.values for part in parts]), sum(part.cut for part in parts))

    def _of_texts(
        self, send: Any, ended: Event, query: str, texts: list[str], cutting: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        api = APIS[self.api]
        body = {api.query: query, api.texts: texts, **api.further, **(cutting or {}), **self.parameters}
        body |= {} if self.model is None else {"model": self.model}
        body |= {} if api.number is None else {api.number: len(texts)}
        read = partial(_values, api=api, number=len(texts))
        values: np.ndarray = self._ask(partial(send, json=body), self._address, read, ended=ended)
        return values

    def _ask(
        self, send: Any, address: str, read: Callable[[Any], Any], unknown: Any = None, ended: Event | None = None
    ) -> Any:
        """Return what `read` makes of a reply, asked again where that may help; `unknown` of an unknown address."""
        key = None if self.key_variable is None else key_in(self.key_variable, repr(self))
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}

        def once() -> Any:
            if ended is not None and ended.is_set():
                raise CancelledError
            failure: BackendError
            try:
                response = send(address, headers=headers, timeout=self.timeout, allow_redirects=False)
                if response.status_code == 200:
                    return read(json.loads(response.content))
                if response.status_code == 404 and unknown is not None:
                    return unknown
                failure = self._refusal(response)
            except requests.RequestException as error:
                cause = error.args[0] if error.args else error
                failure = OutageError(f"{type(error).__name__}: {getattr(cause, 'reason', cause)}")
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                failure = MalformedReplyError(f"no reply of the form {self.api!r}: {error}")
            # Not within "except": the original would hang on it, with the request, which has the key.
            failure.args = (f"{self!r}, asked at {address}: {public(str(failure), key)}",)
            raise failure

        return retrying(self.max_retries, OutageError, MalformedReplyError, ended=ended)(once)

    def _refusal(self, response: Any) -> BackendError:
        status, words = response.status_code, words_of(response)
        said = f"{status}, {words}"
        if is_too_long(status, words):
            return ContextOverflowError(said)
        if status in (408, 409, 429) or status >= 500:
            outage = OutageError(said)
            with suppress(KeyError, ValueError):  # a date is not followed
                outage.after = max(0.0, float(response.headers["Retry-After"]))
            return outage
        hint = f"; is it a server with api={self.api!r}?" if status in (400, 404, 405, 422) else ""
        return BackendError(said + hint)


def _limits(reply: Any, model: str | None) -> Limits:
    """Return how much Text Embeddings Inference, or a model in vLLM's list of them, takes."""
    if "data" in reply:
        listed = {entry["id"]: entry for entry in reply["data"]}
        return Limits(listed.get(model or next(iter(listed), ""), {}).get("max_model_len"))
    return Limits(reply.get("max_input_length"), reply.get("max_client_batch_size"))


def _values(reply: Any, api: Api, number: int) -> np.ndarray:
    """Return `(number,)` scores, each at its index, whatever the order; ValueError if one is missing or no number."""
    with suppress(KeyError, TypeError, ValueError):
        entries = reply if api.listed is None else reply[api.listed]
        found = {entry["index"]: float(entry[api.score]) for entry in entries}
        values = np.array([found[index] for index in range(number)])
        if len(entries) == number and np.isfinite(values).all():
            return values
    raise ValueError(f"not one finite {api.score} for each of {number} windows in {message_in(reply)}")


def _as_it_is(request: Any) -> Any:
    """Add no other key than the given one: `requests` would look for one in a file of the user's."""
    return request
