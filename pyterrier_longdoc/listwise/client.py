"""A backend with its cache and its ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .backends.base import Backend, CallableBackend, Reply, as_backend
from .budget import Tokens
from .cache import ReplayCache, reply_key
from .errors import NotInCacheError
from .ledger import Call, Ledger, Prices
from .parallel import Lock
from .prompts import Message

ANSWER_BOUNDS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
"""Settings of the backends that bound the tokens of an answer."""


class LLMClient:
    """Asks a model through a replay cache, and keeps the ledger; may be shared by rerankers and judges.

    Args:
        llm: a backend, or a function from messages to text.
        cache: a sqlite file; replies in it are not asked for again. None for no cache.
        prices: of a million tokens.
        max_cost: no call is made that might bring the cost of this object's calls above it; exact as far as
            `tokenizer` is, if the backend's parameters bound the answer (`max_tokens`). Needs `prices`.
        tokenizer: counts tokens where the backend reports none, and before a call: a Hugging Face tokenizer, a
            tiktoken encoding or a function; None counts four characters as a token.
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
        if replay_only and cache is None:
            raise ValueError("replay_only=True needs cache=")
        self.backend: Backend = as_backend(llm)
        if cache is not None and isinstance(self.backend, CallableBackend) and not self.backend.named:
            raise ValueError(
                f"{self.backend!r} has no name of its own by which the cache could know its replies: "
                f"use CallableBackend(function, name=...)"
            )
        self.cache = None if cache is None else ReplayCache(cache)
        self.ledger = Ledger(prices, max_cost)
        self.tokens = Tokens(tokenizer)
        self.replay_only = replay_only
        self._busy: defaultdict[str, Lock] = defaultdict(Lock)
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"LLMClient({self.backend!r})"

    def ask(self, qid: str, messages: Sequence[Message]) -> str:
        """The model's reply, from the cache if it is there.

        Args:
            qid: where the ledger enters the call.
            messages: the conversation.

        Raises:
            BackendError: if the backend has no reply.
            SpendCapError: if the call might pass `max_cost`.
            NotInCacheError: if it may only replay, and cannot.
        """
        if self.cache is None:
            return self._pay(qid, messages).text
        key = reply_key(self.backend.model, self.backend.settings, messages)
        with self._lock:
            busy = self._busy[key]
        # The same prompt of two queries at the same time is paid for once.
        with busy:
            reply = self.cache.get(key)
            if reply is not None:
                self._enter(qid, reply, messages, replayed=True)
                return reply.text
            if self.replay_only:
                raise NotInCacheError(f"query {qid!r}: {self.cache!r} has no reply to this prompt of {self.backend!r}")
            reply = self._pay(qid, messages)
            self.cache.put(key, self.backend.model, self.backend.settings, reply)
            return reply.text

    def _pay(self, qid: str, messages: Sequence[Message]) -> Reply:
        settings = self.backend.settings
        bound = next((int(settings[name]) for name in ANSWER_BOUNDS if settings.get(name)), None)
        with self.ledger.reserving(self.tokens.of_messages(messages), bound):
            reply = self.backend(messages)
            # Half of a surrogate pair, which models do emit, is no text to sqlite and to servers.
            reply = replace(reply, text=reply.text.encode("utf-8", "replace").decode("utf-8"))
            self._enter(qid, reply, messages, replayed=False)
        return reply

    def _enter(self, qid: str, reply: Reply, messages: Sequence[Message], *, replayed: bool) -> None:
        paid_in, paid_out = reply.input_tokens, reply.output_tokens
        self.ledger.add(
            Call(
                qid,
                replayed,
                self.tokens.of_messages(messages) if paid_in is None else paid_in,
                self.tokens.count(reply.text) if paid_out is None else paid_out,
                estimated=paid_in is None or paid_out is None,
            )
        )


def as_client(llm: Any) -> LLMClient:
    """An `LLMClient` as it is; a backend or function as one without cache, prices and cap."""
    return llm if isinstance(llm, LLMClient) else LLMClient(llm)


def wrapped(llm: Any, before: tuple[Any, LLMClient] | None) -> tuple[Any, LLMClient]:
    """A model and its client: the ones from before if it is the same model, so that there is one ledger."""
    return before if before is not None and before[0] is llm else (llm, as_client(llm))
