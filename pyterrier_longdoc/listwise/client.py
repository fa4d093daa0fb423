"""A model with its cache and its ledger, asked until its reply can be read."""

from __future__ import annotations

import functools
import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..common.arguments import arguments_of
from ..common.presentation import described
from ..common.registry import own_code
from .backends import Backend, BackendError, CallableBackend, ContextOverflowError, FirstTokenBackend, Reply
from .calls import Call, Ledger, Prices
from .messages import Message, Tokens, bytes_beyond_ascii, most_tokens

ANSWER_BOUNDS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
"""Settings of the backends that bound the tokens of an answer."""

REPEATED_CHARACTERS = 2000
"""Characters of an unreadable reply that its reminder repeats."""

LOGPROBS_FROM = (
    "ask a model that does, by OpenAIBackend (OpenAI's chat models without reasoning, vLLM, SGLang, llama.cpp) or "
    "HuggingFaceBackend"
)
"""What to do where there are no log-probabilities."""

_SCHEMA = """CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT NOT NULL, settings TEXT NOT NULL, text TEXT NOT NULL,
    input_tokens INTEGER, output_tokens INTEGER, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)"""
_LOGPROBS = "CREATE TABLE IF NOT EXISTS logprobs (key TEXT PRIMARY KEY, tokens TEXT NOT NULL)"
"""Log-probabilities of first tokens, as JSON, of the replies that have some."""
_COUNTED = "CREATE TABLE IF NOT EXISTS counted (key TEXT PRIMARY KEY, input_tokens INTEGER, output_tokens INTEGER)"
"""Tokens by our own count, of the replies whose backend reported none."""

Parsed = TypeVar("Parsed")


class NotInCacheError(LookupError):
    """A run that may only replay its cache asked something new."""


class NoLogprobsError(BackendError):
    """A model answered without the log-probabilities that were asked for."""


class ReplayCache:
    """A sqlite file of replies, keyed by model, settings and messages.

    Prompts are not stored, only their hashes; nor are addresses and keys. Several threads and processes may use one
    file. A reply is on disk before its ranking is used.

    Args:
        path: the file; it is made with its folder when the first reply is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"ReplayCache({str(self.path)!r})"

    def __len__(self) -> int:
        if not self.path.exists():
            return 0
        with self._connected() as connection:
            return int(connection.execute("SELECT count(*) FROM replies").fetchone()[0])

    @staticmethod
    def key(model: str, settings: Mapping[str, Any], messages: Sequence[Message]) -> str:
        """What a reply depends on, as a SHA-256 in hexadecimal digits."""
        try:
            content = json.dumps([model, dict(settings), list(messages)], sort_keys=True, ensure_ascii=True)
        except TypeError as error:
            raise ValueError(f"the settings {settings!r} of {model} cannot be a cache key: {error}") from error
        return hashlib.sha256(content.encode()).hexdigest()

    def get(self, key: str) -> Reply | None:
        """The stored reply, or None."""
        if not self.path.exists():
            return None
        with self._connected() as connection:
            found = connection.execute(
                "SELECT text, input_tokens, output_tokens, tokens FROM replies LEFT JOIN logprobs USING (key) "
                "WHERE key = ?",
                (key,),
            ).fetchone()
        if found is None:
            return None
        text, tokens_in, tokens_out, tokens = found
        return Reply(text, tokens_in, tokens_out, None if tokens is None else json.loads(tokens))

    def tokens(self, model: str) -> tuple[int, int]:
        """Tokens of all prompts of a model and of its replies, which were paid for."""
        if not self.path.exists():
            return 0, 0
        with self._connected() as connection:
            # Made by the first reply that needs it: to read a file must not change it.
            has_counts = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'counted'").fetchone()
            columns = (f"total(coalesce(replies.{name}, counted.{name}))" for name in ("input_tokens", "output_tokens"))
            tokens_in, tokens_out = connection.execute(
                f"SELECT {', '.join(columns)} FROM replies "
                f"LEFT JOIN {'counted' if has_counts else 'replies'} AS counted USING (key) WHERE replies.model = ?",
                (model,),
            ).fetchone()
        return int(tokens_in), int(tokens_out)

    def put(self, key: str, model: str, settings: Mapping[str, Any], reply: Reply, paid: tuple[int, int]) -> None:
        """Stores a reply, and the tokens that were paid for if the backend reported none; the first one stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = json.dumps(dict(settings), sort_keys=True)
        with self._connected() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO replies (key, model, settings, text, input_tokens, output_tokens) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (key, model, stored, reply.text, reply.input_tokens, reply.output_tokens),
            )
            if reply.logprobs is not None:
                tokens = json.dumps(dict(reply.logprobs))
                connection.execute("INSERT OR IGNORE INTO logprobs (key, tokens) VALUES (?, ?)", (key, tokens))
            if reply.input_tokens is None or reply.output_tokens is None:
                connection.execute(_COUNTED)
                connection.execute("INSERT OR IGNORE INTO counted VALUES (?, ?, ?)", (key, *paid))

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # One connection per use costs a fraction of a millisecond and needs no care with threads, forks and pickling.
        with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            connection.execute(_SCHEMA)
            connection.execute(_LOGPROBS)
            yield connection


class LLMClient:
    """Asks a model through a replay cache, and keeps the ledger; may be shared by rerankers and judges.

    Args:
        llm: a backend, or a function from messages to text.
        cache: a sqlite file; replies in it are not asked for again, so that a run that `max_cost` has ended goes on
            with a higher one. None for no cache.
        prices: of a million tokens.
        max_cost: no call is made that might bring the cost of this object's calls, and of the model's replies that are
            in the cache as this object is made, above it; the most that a call may cost is reserved before it is sent,
            see `Ledger`. Bound the answers by the backend's parameters (`max_tokens`), or 1,024 tokens are reserved for
            each. Needs `prices`.
        tokenizer: counts tokens where the backend reports none, and before a call: a Hugging Face tokenizer or its
            name, a tiktoken encoding or a function; None counts four characters as one.
        replay_only: ask nothing that is not in the cache; needs neither key nor network.

    Attributes:
        ledger: the calls so far.

    Raises:
        ValueError: for arguments that do not fit together.
    """

    def __init__(
        self,
        llm: Any,
        *,
        cache: str | Path | None = None,
        prices: Prices | None = None,
        max_cost: float | None = None,
        tokenizer: Any = None,
        replay_only: bool = False,
    ) -> None:
        if not callable(llm):
            raise ValueError(f"llm={llm!r} must be a backend, an LLMClient, or a function from messages to text")
        if replay_only and cache is None:
            raise ValueError("replay_only=True needs cache=")
        is_backend = hasattr(llm, "model") and hasattr(llm, "settings")
        self.backend: Backend = llm if is_backend else CallableBackend(llm)
        if cache is not None and isinstance(self.backend, CallableBackend) and not self.backend.named:
            raise ValueError(
                f"{self.backend!r} has no name of its own by which the cache could know its replies: "
                f"use CallableBackend(function, name=...)"
            )
        self.cache = None if cache is None else ReplayCache(cache)
        earlier = 0.0
        if prices is not None and self.cache is not None and not replay_only:
            earlier = prices.cost(*self.cache.tokens(self.backend.model))
        self.ledger = Ledger(prices, max_cost, earlier)
        self.tokens = Tokens(tokenizer)
        self.replay_only = replay_only
        self._busy: dict[str, threading.Lock] = {}

    def __repr__(self) -> str:
        return f"LLMClient({self.backend!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_busy": {}}

    def ask(self, qid: str, messages: Sequence[Message]) -> str:
        """The model's reply, from the cache if it is there; the ledger enters the call under the qid.

        Raises:
            BackendError: if the backend has no reply.
            SpendCapError: if the call might pass `max_cost`.
            NotInCacheError: if it may only replay, and cannot.
        """
        return self._reply(qid, messages, self.backend, self.backend.settings).text

    def first_token(
        self, qid: str, messages: Sequence[Message], words: Sequence[str], top_logprobs: int
    ) -> Mapping[str, float]:
        """Log-probabilities of the first tokens of an answer, as `ask`.

        Args:
            qid: where the ledger enters the call.
            messages: the conversation.
            words: what the answer may be.
            top_logprobs: how many of the likeliest tokens a server is asked for.

        Raises:
            NoLogprobsError: if the model has none.
            BackendError: if the backend has no reply.
            SpendCapError: if the call might pass `max_cost`.
            NotInCacheError: if it may only replay, and cannot.
        """
        backend = self.backend
        if not isinstance(backend, FirstTokenBackend):
            raise NoLogprobsError(f"{backend!r} gives no log-probabilities; {LOGPROBS_FROM}")
        unbound = {name: value for name, value in backend.settings.items() if name not in ANSWER_BOUNDS}
        settings = {**unbound, "max_tokens": 1, "top_logprobs": top_logprobs, "words": list(words)}

        def send(asked: Sequence[Message]) -> Reply:
            reply = backend.first_token(asked, words, top_logprobs)
            if not reply.logprobs:
                raise NoLogprobsError(
                    f"the model {self.backend.model!r} answered without log-probabilities: its server, or this model "
                    f"of it, does not give them; {LOGPROBS_FROM}"
                )
            return reply

        logprobs = self._reply(qid, messages, send, settings).logprobs
        return {} if logprobs is None else logprobs

    def _reply(
        self,
        qid: str,
        messages: Sequence[Message],
        send: Callable[[Sequence[Message]], Reply],
        settings: Mapping[str, Any],
    ) -> Reply:
        """The reply of `send`, or that of the cache to the same messages with the same settings."""
        # Counted only if the cap or the ledger needs it, and then once.
        count = functools.cache(lambda: self.tokens.count_messages(messages))
        if self.cache is None:
            return self._pay(qid, messages, send, settings, count)
        key = ReplayCache.key(self.backend.model, settings, messages)
        # The same prompt of two queries at the same time is paid for once.
        with self._busy.setdefault(key, threading.Lock()):
            reply = self.cache.get(key)
            if reply is not None:
                self._enter(qid, reply, count, replayed=True)
                return reply
            if self.replay_only:
                raise NotInCacheError(f"query {qid!r}: {self.cache!r} has no reply to this prompt of {self.backend!r}")
            reply = self._pay(qid, messages, send, settings, count)
            self.cache.put(key, self.backend.model, settings, reply, self._tokens_of(reply, count))
            return reply

    def _pay(
        self,
        qid: str,
        messages: Sequence[Message],
        send: Callable[[Sequence[Message]], Reply],
        settings: Mapping[str, Any],
        count: Callable[[], int],
    ) -> Reply:
        with self._reserving(messages, settings, count):
            reply = send(messages)
            # Half of a surrogate pair, which models do emit, is no text to sqlite and to servers.
            reply = replace(reply, text=reply.text.encode("utf-8", "replace").decode("utf-8"))
            self._enter(qid, reply, count, replayed=False)
        return reply

    def _reserving(
        self, messages: Sequence[Message], settings: Mapping[str, Any], count: Callable[[], int]
    ) -> AbstractContextManager[None]:
        if self.ledger.max_cost is None:
            return nullcontext()
        bound = next((int(settings[name]) for name in ANSWER_BOUNDS if settings.get(name)), None)
        beyond_ascii = bytes_beyond_ascii(messages)
        return self.ledger.reserving(count(), most_tokens(messages), bound, beyond_ascii=beyond_ascii)

    def _enter(self, qid: str, reply: Reply, count: Callable[[], int], *, replayed: bool) -> None:
        estimated = reply.input_tokens is None or reply.output_tokens is None
        capped = self.ledger.max_cost is not None
        counted = count() if capped and reply.input_tokens is not None else None
        self.ledger.add(Call(qid, replayed, *self._tokens_of(reply, count), estimated, counted))

    def _tokens_of(self, reply: Reply, count: Callable[[], int]) -> tuple[int, int]:
        """Tokens of prompt and answer."""
        tokens_in = count() if reply.input_tokens is None else reply.input_tokens
        return tokens_in, self.tokens.count(reply.text) if reply.output_tokens is None else reply.output_tokens


class AsksLLM:
    """What transformers have in common whose argument `llm` is a client, a backend or a function."""

    llm: Any
    _client_of: tuple[Any, LLMClient] | None = None

    @property
    def client(self) -> LLMClient:
        """`llm` as an `LLMClient`: the same one, with one ledger, as long as `llm` is the same."""
        if self._client_of is None or self._client_of[0] is not self.llm:
            self._client_of = self.llm, self.llm if isinstance(self.llm, LLMClient) else LLMClient(self.llm)
        return self._client_of[1]

    @property
    def ledger(self) -> Ledger:
        """The calls of this object, and of all others that share its `LLMClient`."""
        return self.client.ledger


def description(asker: Any, *not_asked: str, own_prompt: bool = False) -> dict[str, Any]:
    """Who a reranker is, JSON-able: the language model by its name and settings, and what it is asked.

    Args:
        asker: with the arguments `llm` and `preselect`.
        not_asked: further arguments that decide nothing about scores.
        own_prompt: whether a function makes its prompts.

    Raises:
        ValueError: if the model or the prompt is a function, of which it cannot be told whether it stays the same.
    """
    backend = asker.client.backend
    if isinstance(backend, CallableBackend) or own_prompt:
        raise ValueError(f"{asker!r} asks a function, of which it cannot be told whether it stays the same")
    left_out = ("llm", "concurrency", "text_loader", "verbose", *not_asked)
    asked: dict[str, Any] = {
        name: described(value) for name, value in arguments_of(asker).items() if name not in left_out
    }
    if asker.preselect is not None:
        asked["preselect"] = asker.preselect.identity()
    parts = [getattr(asker, name, None) for name in ("schedule", "answer", "prompt", "preselect", "windows")]
    return {"model": backend.model, "settings": dict(backend.settings), "arguments": asked, **own_code(asker, *parts)}


def read_reply(
    ask: Callable[[list[Message]], str],
    messages: list[Message],
    reply: str,
    parse: Callable[[str], Parsed | None],
    *,
    request: str,
    retries: int,
) -> tuple[Parsed | None, list[str]]:
    """Reads a reply, and asks again as long as `parse` finds nothing, with the conversation, the reply and `request`.

    Returns:
        What was found, and the replies in which nothing was.
    """
    unreadable: list[str] = []
    while (parsed := parse(reply)) is None:
        unreadable.append(reply)
        if len(unreadable) > retries:
            break
        # Some servers refuse messages that are empty or end in white space.
        answered = reply.strip()[:REPEATED_CHARACTERS].rstrip() or "(no answer)"
        messages = [*messages, {"role": "assistant", "content": answered}, {"role": "user", "content": request}]
        try:
            reply = ask(messages)
        except ContextOverflowError:  # no room for a reminder
            break
    return parsed, unreadable
