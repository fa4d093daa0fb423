"""Models behind a server that scores pairs: what is sent, what comes back, and whether that is all of it."""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from numbers import Real
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from ..common.arguments import check_choice, check_given
from ..common.parallel import in_parallel
from ..common.presentation import changes
from ..common.servers import (
    BackendError,
    BadRequestError,
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
from ..modelling.foreign import ForeignScorer, Limits, Scores

PASSING = (408, 409, 429)
"""Statuses that may pass, as all from 500 on: what the `openai` client asks again for, too."""

TRUNCATING = ("truncate", "truncate_prompt_tokens", "truncation_direction", "truncation_side")
"""Parameters that `truncate` gives."""

Body = dict[str, Any]


class Served(NamedTuple):
    """What a server says of its model.

    Attributes:
        model: its name, with the revision if the server knows it.
        limits: how much it takes.
    """

    model: str
    limits: Limits = Limits()


class Api(ABC):
    """A published form of requests for scores, and of replies."""

    path: ClassVar[str]
    about: ClassVar[str | None] = None
    """Where it tells which model it serves; None for nowhere."""
    score: ClassVar[str]
    """What a score is called in a reply."""
    refuses_long_inputs: ClassVar[bool] = True
    """Whether a server refuses inputs that are too long, unless it is told to cut them."""

    @staticmethod
    @abstractmethod
    def body(query: str, texts: Sequence[str], *, truncate: bool) -> Body:
        """A request, without the model's name."""

    @staticmethod
    @abstractmethod
    def entries(reply: Any) -> Any:
        """The list of entries with an index and a score."""

    @staticmethod
    def served(reply: Any, model: str | None) -> Served:
        """What `about` tells of the model that is asked for.

        Raises:
            ValueError: if several are served, and none is named.
        """
        listed = {entry["id"]: entry for entry in reply["data"]}
        if model is None and len(listed) > 1:
            raise ValueError(f"the server has the models {', '.join(listed)}: name one of them, model=...")
        name = model or next(iter(listed))
        return Served(name, Limits(listed.get(name, {}).get("max_model_len")))


class Tei(Api):
    """Text Embeddings Inference (huggingface/text-embeddings-inference 1.9, `docs/openapi.json`): `/rerank`."""

    path, about, score = "/rerank", "/info", "score"

    @staticmethod
    def body(query: str, texts: Sequence[str], *, truncate: bool) -> Body:
        return {"query": query, "texts": texts, "raw_scores": True, "truncate": truncate}

    @staticmethod
    def entries(reply: Any) -> Any:
        return reply

    @staticmethod
    def served(reply: Any, model: str | None) -> Served:
        revision = reply.get("model_sha")
        name = reply["model_id"] + (f"@{revision}" if revision else "")
        return Served(name, Limits(reply.get("max_input_length"), reply.get("max_client_batch_size")))


class Vllm(Api):
    """vLLM (vllm-project/vllm, `entrypoints/pooling/scoring/protocol.py`): `/score`."""

    path, about, score = "/score", "/v1/models", "score"

    @staticmethod
    def body(query: str, texts: Sequence[str], *, truncate: bool) -> Body:
        cut = {"truncate_prompt_tokens": -1} if truncate else {}
        return {"text_1": query, "text_2": texts, "use_activation": False, **cut}

    @staticmethod
    def entries(reply: Any) -> Any:
        return reply["data"]


class Cohere(Api):
    """Cohere's API, version 2 (docs.cohere.com/reference/rerank), which Jina, vLLM and gateways have as well."""

    path, score, refuses_long_inputs = "/v2/rerank", "relevance_score", False

    @staticmethod
    def body(query: str, texts: Sequence[str], *, truncate: bool) -> Body:
        return {"query": query, "documents": texts, "top_n": len(texts)}

    @staticmethod
    def entries(reply: Any) -> Any:
        return reply["results"]


class Infinity(Cohere):
    """infinity (michaelfeil/infinity 0.0.78, `fastapi_schemas/pymodels.py`): Cohere's form, with logits."""

    path, about = "/rerank", "/models"

    @staticmethod
    def body(query: str, texts: Sequence[str], *, truncate: bool) -> Body:
        return {**Cohere.body(query, texts, truncate=truncate), "raw_scores": True}


APIS: dict[str, type[Api]] = {"tei": Tei, "vllm": Vllm, "cohere": Cohere, "infinity": Infinity}


@dataclass(frozen=True, repr=False)
class ScoreServer(ForeignScorer):
    """A reranker behind a running server, as backbone of a model over windows: `ld.MaxP(ld.ScoreServer(url))`.

    No weights are loaded here. Each distinct query and window of a run is sent once, in requests of up to the model's
    `batch_size` windows of one query. Time-outs, rate limits (429), server errors and replies that are cut off or lack
    a score are asked again for, with exponential back-off up to 8 seconds or as the server's Retry-After says (up to
    two minutes); a bad key or a bad request ends the run at once. Scores are told apart by their index, whatever the
    order of the reply; one that is missing, double or not finite is an error, never a guess.

    Text Embeddings Inference and vLLM are asked for logits and not to cut windows: one that is too long ends the run,
    with a word about what to do. Servers with Cohere's form cut without a word, and mostly give probabilities.

    Args:
        url: the server, e.g. `"http://localhost:8080"`; one that ends in `/rerank` or `/score` is taken as it is.
        api: the form of its requests: `"tei"` (Text Embeddings Inference, `/rerank`), `"vllm"` (`/score`), `"cohere"`
            (`/v2/rerank`, also of Jina, vLLM and gateways) or `"infinity"` (`/rerank`).
        model: its name on the server. None for the only one; Cohere needs it.
        truncate: let Text Embeddings Inference or vLLM cut windows that are too long; each of them, which the server
            has refused first, counts in `coverage.windows_cut`.
        parameters: further fields of a request.
        key_variable: the environment variable with the key, which is sent as a bearer token; None sends none.
        concurrency: requests in flight at the same time.
        timeout: seconds to wait for a reply.
        max_retries: most further requests after failed ones.
        tokenizer: the served model's tokenizer, or its name: windows and queries are counted in its tokens and fit into
            the longest input, so that the server has nothing to cut. None counts words.
        longest_input: most tokens of a query and a window together, special ones included; None for what Text
            Embeddings Inference or vLLM say.

    Raises:
        ValueError: for an address that is none or holds a user, a key or a query, or parameters that have another
            argument.
    """

    url: str
    _: KW_ONLY
    api: str = "tei"
    model: str | None = None
    truncate: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    key_variable: str | None = None
    concurrency: int = 4
    timeout: float = 60.0
    max_retries: int = 5

    _idle: ClassVar[list[Any]]  # each object's own: no field, as it says nothing of the server

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_idle", [])
        check_choice("api", self.api, tuple(APIS))
        check_given(concurrency=self.concurrency)
        parts = urlsplit(str(self.url))
        if "@" in parts.netloc or parts.query:
            # Shown, stored and compared, an address must hold no secret: it is not repeated here either.
            raise ValueError(
                "url must hold neither user nor query: put the key into an environment variable, and its "
                "name into key_variable"
            )
        check_address("url", self.url)
        if self.max_retries < 0 or not self.timeout > 0:
            raise ValueError(f"max_retries={self.max_retries} must be at least 0, and timeout={self.timeout} above it")
        if self.truncate and not self._form.refuses_long_inputs:
            raise ValueError(f"truncate=True would have no effect: servers with api={self.api!r} always cut")
        own = {"model", *TRUNCATING, *self._form.body("", [], truncate=False)} & set(self.parameters)
        if own:
            raise ValueError(f"parameters must not have {', '.join(sorted(own))}: there are arguments for them")

    def __repr__(self) -> str:
        shown = [change for change in changes(self) if not change.startswith("url=")]
        return f"{type(self).__name__}({', '.join([repr(self.url), *shown])})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}  # connections stay here

    @property
    def _form(self) -> type[Api]:
        return APIS[self.api]

    @property
    def _address(self) -> str:
        url = str(self.url).rstrip("/")
        return url if url.endswith(("/rerank", "/score")) else url + self._form.path

    # What it says of itself.

    def served(self) -> Served | None:
        """Which model the server has, and how much it takes; None if it does not tell.

        Raises:
            BackendError: if the server cannot be asked.
        """
        if self._form.about is None:
            return None
        base = self._address.removesuffix(self._form.path)
        said = self._ask("GET", base + self._form.about, missing_is_none=True)
        if said is None:
            return None
        try:
            return self._form.served(said, self.model)
        except (AttributeError, KeyError, StopIteration, TypeError):
            raise MalformedReplyError(f"{self!r} names no model at {self._form.about}: {_shown(said)}") from None

    def limits(self) -> Limits:
        """What the server says, or what it is said to take."""
        served = self.served()
        limits = Limits() if served is None else served.limits
        return limits if self.longest_input is None else limits._replace(longest_input=self.longest_input)

    def identity(self) -> dict[str, Any]:
        """Where it is, which model it serves now, and what it is asked for; ValueError if no one tells the model."""
        served = self.served()
        model = self.model if served is None else served.model
        if model is None:
            raise ValueError(
                f"{self!r} does not tell which model it serves, so that its scores could not be known again: name it, "
                f"ScoreServer(..., model=...), or leave score_cache out"
            )
        asked = {"api": self.api, "truncate": self.truncate, "parameters": dict(self.parameters)}
        return {"type": type(self).__name__, "url": self._address, "model": model, **asked}

    def warning(self) -> str | None:
        """See the base class."""
        if self._form.refuses_long_inputs or (self.tokenizer is not None and self.longest_input is not None):
            return None
        return (
            f"{self!r} may cut windows without a word: servers with api={self.api!r} do not tell. With tokenizer= and "
            f"longest_input= of its model windows are sure to fit."
        )

    # Scores.

    def score(
        self, queries: Sequence[str], texts: Sequence[str], batch_size: int, done: Callable[[int], None]
    ) -> Scores:
        """See the base class.

        Raises:
            BackendError: if the server cannot be asked, or its replies are not complete; ContextOverflowError for a
                window that is too long.
        """
        rows: dict[str, list[int]] = {}
        for row, query in enumerate(queries):
            rows.setdefault(query, []).append(row)
        jobs = [own[start : start + batch_size] for own in rows.values() for start in range(0, len(own), batch_size)]

        def ask(job: list[int], step: Callable[[], None]) -> Scores:
            return self._of_query(queries[job[0]], [texts[row] for row in job], step)

        values, cut = np.zeros(len(texts)), 0
        sizes = iter(map(len, jobs))
        for job, scores in zip(
            jobs, in_parallel(ask, jobs, self.concurrency, on_done=lambda: done(next(sizes))), strict=True
        ):
            values[job], cut = scores.values, cut + scores.cut
        return Scores(values, cut)

    def _of_query(self, query: str, texts: list[str], step: Callable[[], None]) -> Scores:
        """The scores of a query's texts; where one is too long, and may be cut, each is sent by itself."""
        try:
            return Scores(self._request(query, texts, step, truncate=False))
        except ContextOverflowError as error:
            refusal = error
        if not self.truncate:
            longest = max(texts, key=len)
            raise ContextOverflowError(
                f"{refusal}. The longest of the {len(texts)} windows has {len(longest)} characters and begins "
                f"{longest[:80]!r}: give a smaller window_size, or tokenizer= of the served model, whose windows fit, "
                f"or let the server cut with truncate=True"
            )
        if len(texts) == 1:
            return Scores(self._request(query, texts, step, truncate=True), cut=1)
        parts = [self._of_query(query, [text], step) for text in texts]
        return Scores(np.concatenate([part.values for part in parts]), sum(part.cut for part in parts))

    def _request(self, query: str, texts: list[str], step: Callable[[], None], *, truncate: bool) -> np.ndarray:
        named = {} if self.model is None else {"model": self.model}
        body = {**named, **self._form.body(query, texts, truncate=truncate), **self.parameters}
        read = partial(self._scores, number=len(texts))
        try:
            values: np.ndarray = self._ask("POST", self._address, body, read, step=step)
        except BadRequestError as error:
            blank = sum(not text.strip() for text in texts)
            if not blank:
                raise
            raise BadRequestError(
                f"{error} {blank} of the {len(texts)} windows have no text, which some servers refuse, and no score "
                f"is made up for them: leave such documents out, results[results['text'].str.strip() != '']"
            ) from None
        return values

    def _scores(self, reply: Any, number: int) -> np.ndarray:
        """`(number,)` scores, each at its index.

        Raises:
            MalformedReplyError: if one is missing, double or not finite, or belongs to no text.
        """
        name, found = self._form.score, {}
        try:
            pairs = [(entry["index"], entry[name]) for entry in self._form.entries(reply)]
        except (IndexError, KeyError, TypeError):
            raise MalformedReplyError(f"no list with index and {name}: {_shown(reply)}") from None
        for index, value in pairs:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < number:
                raise MalformedReplyError(f"index {index!r}, where {number} windows were sent")
            if index in found:
                raise MalformedReplyError(f"two scores for window {index} of {number}")
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise MalformedReplyError(f"{name} {value!r} for window {index} of {number}")
            found[index] = float(value)
        missing = [index for index in range(number) if index not in found]
        if missing:
            raise MalformedReplyError(
                f"no score for {len(missing)} of {number} windows, the first of them {missing[0]}"
            )
        return np.array([found[index] for index in range(number)])

    # Over HTTP.

    def _ask(
        self,
        method: str,
        url: str,
        body: Body | None = None,
        read: Callable[[Any], Any] = lambda reply: reply,
        *,
        step: Callable[[], None] = lambda: None,
        missing_is_none: bool = False,
    ) -> Any:
        """What `read` makes of a reply; asks again for what may pass.

        Args:
            method: `"GET"` or `"POST"`.
            url: the address.
            body: of a request.
            read: raises MalformedReplyError for what is not complete.
            step: is called before each request; ends the work by an error of its own.
            missing_is_none: None for a server that does not know the address.

        Raises:
            BackendError: if there is no reply.
        """
        key = None if self.key_variable is None else key_in(self.key_variable, repr(self))
        exchange = partial(self._exchange, method, url, body, key)

        def once() -> Any:
            step()
            status, reply = exchange()
            if status == 404 and missing_is_none:
                return None
            try:
                return read(reply)
            except MalformedReplyError as error:
                raise MalformedReplyError(self._said(url, str(error), key)) from None

        return retrying(self.max_retries, OutageError, MalformedReplyError)(once)

    def _exchange(self, method: str, url: str, body: Body | None, key: str | None) -> tuple[int, Any]:
        """Status and JSON of a reply; None for the JSON of what is not found."""
        requests = importlib.import_module("requests")  # of ir_datasets
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        failure: OutageError | None = None
        try:
            with self._session() as session:
                response = session.request(
                    method, url, json=body, headers=headers, timeout=self.timeout, allow_redirects=False, auth=_as_it_is
                )
        except requests.RequestException as error:
            cause = error.args[0] if error.args else error
            failure = OutageError(self._said(url, f"{type(error).__name__}: {getattr(cause, 'reason', cause)}", key))
        if failure is not None:
            # Not within "except": the original would hang on it, with the request, which has the key.
            raise failure
        if response.status_code == 404 and method == "GET":
            return 404, None
        if response.status_code != 200:
            raise self._refusal(url, response, key)
        try:
            return 200, json.loads(response.content)
        except ValueError:
            raise MalformedReplyError(self._said(url, f"no JSON: {words_of(response)}", key)) from None

    @contextmanager
    def _session(self) -> Iterator[Any]:
        """A session that is kept, with its connections, for later requests; none serves two threads at a time."""
        try:
            session = self._idle.pop()
        except IndexError:
            session = importlib.import_module("requests").Session()
        try:
            yield session
        finally:
            self._idle.append(session)

    def _refusal(self, url: str, response: Any, key: str | None) -> BackendError:
        status, words = response.status_code, words_of(response)
        said = self._said(url, f"{status}, {words}", key)
        if is_too_long(status, words):
            return ContextOverflowError(said)
        if status in PASSING or status >= 500:
            outage = OutageError(said)
            with suppress(KeyError, ValueError):  # a date is not followed
                outage.after = max(0.0, float(response.headers["Retry-After"]))
            return outage
        if status in (400, 404, 405, 422):
            return BadRequestError(f"{said}; is it a server with api={self.api!r}?")
        return BackendError(said)

    def _said(self, url: str, words: str, key: str | None) -> str:
        return f"{self!r}, asked at {url}: {public(words, key)}"


def _shown(reply: Any) -> str:
    return public(message_in(reply))


def _as_it_is(request: Any) -> Any:
    """No other key than the given one: `requests` would look for one in a file of the user's."""
    return request
