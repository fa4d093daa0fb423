"""A client for a model with a replay cache, counts of calls and tokens, and retries after unreadable replies."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from ..common.arguments import check_type
from ..common.servers import ContextOverflowError
from ..common.store import Store
from .backends import Backend, CallableBackend, Reply
from .prompt_budget import Tokens
from .prompts import Message

REPEATED_CHARACTERS = 2000
"""Maximum number of characters of an unreadable reply that are repeated in the reminder."""

Parsed = TypeVar("Parsed")

# One lock for all clients, because a lock per client could not be pickled.
_COUNTING = threading.Lock()


class NotInCacheError(LookupError):
    """The cache has no reply to a prompt, and `replay_only` is set."""


class LLMClient:
    """Calls a model through a replay cache and counts its calls and tokens; can be shared by rerankers and judges.

    Args:
        llm: a backend, or a function from messages to text.
        cache: a SQLite file of replies, found by a hash of model, settings and messages; API keys and addresses are not
            stored. Several threads and processes can use it. A reply is stored before it is used, so that none is lost
            when a run is stopped. None for no cache.
        replay_only: read all replies from the cache, without key or network.

    Attributes:
        calls: the number of replies of the model so far, without those of the cache.
        cached: the number of replies of the cache so far.
        input_tokens: the tokens of the prompts of `calls`; four characters count as one if the backend reports none.
        output_tokens: the tokens generated for `calls`, including reasoning, counted in the same way.
    """

    def __init__(self, llm: Any, *, cache: str | Path | None = None, replay_only: bool = False) -> None:
        if isinstance(llm, str):
            raise ValueError(
                f"llm={llm!r} must be a backend: ld.OpenAIBackend({llm!r}) for a model on a server, or "
                f"ld.HuggingFaceBackend({llm!r}) for a local model"
            )
        check_type(Callable, "a backend, an LLMClient, or a function from messages to text", llm=llm)
        is_backend = hasattr(llm, "model") and hasattr(llm, "settings")
        self.backend: Backend = llm if is_backend else CallableBackend(llm)
        if cache is not None and isinstance(self.backend, CallableBackend) and not self.backend.has_name:
            raise ValueError(
                f"{self.backend!r} needs a name to identify its replies in the cache: "
                f"use CallableBackend(function, name=...)"
            )
        self.cache = None if cache is None else Store(cache)
        self.calls = self.cached = self.input_tokens = self.output_tokens = 0
        self.replay_only = replay_only

    def __repr__(self) -> str:
        return f"LLMClient({self.backend!r})"

    def ask(self, qid: str, messages: Sequence[Message]) -> Reply:
        """Return the reply of the cache or else the model, and count it; the qid is for errors."""
        identity = [self.backend.model, dict(self.backend.settings), list(messages)]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        found = {} if self.cache is None else self.cache.get_many([key])
        if found:
            with _COUNTING:
                self.cached += 1
            return Reply(**found[key])
        if self.replay_only:
            raise NotInCacheError(f"query {qid!r}: no reply of {self.backend!r} to this prompt in {self.cache}")
        reply = self.backend(messages)
        # Models can generate lone surrogates, which servers refuse in the reminder that repeats the reply.
        reply = replace(reply, text=reply.text.encode("utf-8", "replace").decode("utf-8"))
        tokens = Tokens()
        with _COUNTING:
            self.calls += 1
            self.input_tokens += tokens.count_messages(messages) if reply.input_tokens is None else reply.input_tokens
            self.output_tokens += tokens.count(reply.text) if reply.output_tokens is None else reply.output_tokens
        if self.cache is not None:
            self.cache.put_many({key: asdict(reply)})
        return reply


class AsksLLM:
    """Base class of transformers with the argument `llm`: a client, a backend or a function."""

    llm: Any
    _client_of: tuple[Any, LLMClient] | None = None

    @property
    def client(self) -> LLMClient:
        """`llm` as an `LLMClient`; the same one as long as `llm` is the same object."""
        if self._client_of is None or self._client_of[0] is not self.llm:
            self._client_of = self.llm, self.llm if isinstance(self.llm, LLMClient) else LLMClient(self.llm)
        return self._client_of[1]


def read_reply(
    ask: Callable[[list[Message]], Reply], parse: Callable[[str], Parsed | None], *, request: str, retries: int
) -> tuple[Parsed | None, list[Reply]]:
    """Return a parsed reply (None if none is readable) and the unreadable replies before it.

    `ask` sends the prompt with a reminder: none, or the unreadable replies so far, each followed by `request`.
    """
    reminder, unreadable = list[Message](), list[Reply]()
    while not unreadable or (len(unreadable) <= retries and unreadable[-1].problem is None):
        try:
            reply = ask(reminder)
        except ContextOverflowError:
            if not reminder:
                raise
            break  # no room for a reminder
        if (parsed := parse(reply.text)) is not None:
            return parsed, unreadable
        unreadable.append(reply)
        # Some servers refuse empty messages and messages that end in white space.
        answer = reply.text.strip()[:REPEATED_CHARACTERS].rstrip() or "(no answer)"
        reminder = [*reminder, {"role": "assistant", "content": answer}, {"role": "user", "content": request}]
    return None, unreadable


def describe_failure(what: str, unreadable: Sequence[Reply]) -> str:
    """Return a part of a message: no reply has `what`, and why or what the last one has instead."""
    problem = unreadable[-1].problem or repr(unreadable[-1].text[:200])
    return f"no {what} in the reply after {len(unreadable) - 1} retries: {problem}"
