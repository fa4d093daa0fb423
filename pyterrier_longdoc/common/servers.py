"""Models on servers: retries, and addresses, keys and errors without secrets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from .files import import_extra

_LONGEST_WAIT = 120.0
"""Maximum pause before a retry in seconds, whatever the server requests."""

_OVERFLOW = re.compile(
    r"context[ _](?:length|window|size|limit)|maximum(?![^.]{0,30}output)[^.]{0,30}(?:context|tokens|length)|"
    r"prompt is too long|too many tokens|too large to process|must have less than \d+ tokens",
    re.IGNORECASE,
)
"""Errors of servers for an input that is too long, but not for a `max_tokens` or batch that is too large."""

_SECRET = re.compile(
    r"(?:api|access|private|subscription|functions?)key|^key$|secret|passw(?:or)?d|passphrase|^(?:pass|pwd)$|credential|"
    r"authorization|auth$|bearer|cookie|(?:^|access|api|auth|hf|id|refresh|security|session)token$"
)
_HOLDERS = re.compile(r"headers$|^extraquery$")
"""Names of parameters that are secret or contain secrets, as lower-case letters and digits."""


class BackendError(RuntimeError):
    """A model gave no reply: wrong key, bad request, outage or time-out."""


class OutageError(BackendError):
    """A server was busy, failed or did not answer, which can be temporary.

    Attributes:
        after: the pause requested by the server in seconds; None if it requests none.
    """

    after: float | None = None


class MalformedReplyError(BackendError):
    """The reply of the server does not conform to its API."""


class ContextOverflowError(BackendError):
    """The prompt, or a query with its window, has more tokens than the model allows."""


def retrying(max_retries: int, *temporary: type[BackendError], ended: Event | None = None) -> Any:
    """Return a retrier that calls a function again, with growing pauses, while it raises a temporary error.

    After `max_retries` retries, the last error is raised. Once `ended` is set, there are no further calls or pauses.
    """
    tenacity = import_extra("tenacity", "llm", "this needs tenacity")
    growing, ended = tenacity.wait_random_exponential(multiplier=0.5, max=8), ended or Event()

    def wait(state: Any) -> float:
        after: float | None = getattr(state.outcome.exception(), "after", None)
        return growing(state) if after is None else min(after, _LONGEST_WAIT)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(temporary),
        stop=tenacity.stop_after_attempt(max_retries + 1) | tenacity.stop_when_event_set(ended),
        sleep=tenacity.sleep_using_event(ended),
        wait=wait,
        reraise=True,
    )


def check_parameters(parameters: Mapping[str, Any], *reserved: str, cure: str) -> None:
    """Raise ValueError for parameters of a request that are `reserved` or (at any depth) secret."""
    names = {*(name for name in reserved if name in parameters), *_secrets_in(parameters)}
    if names:
        raise ValueError(f"parameters must not have {', '.join(sorted(names))} (they are shown and stored): {cure}")


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the names of fields that are or contain secrets; a mapping, as in a JSON schema, is not a secret itself."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            letters = re.sub(r"[^a-z0-9]", "", str(name).lower())
            is_secret = _SECRET.search(letters) and not isinstance(inner, Mapping)
            yield from [str(name)] if is_secret or _HOLDERS.search(letters) else _secrets_in(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _secrets_in(inner)


def key_in(variable: str, model: str) -> str:
    """Return the key in an environment variable; raise BackendError if it is not set."""
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"{model}: set the environment variable {variable} to the server's key")
    return key


def without_secrets(url: Any) -> str:
    """Return an address for messages, without the parts before an @ and after a ?, which can be secret."""
    parts = urlsplit(str(url))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def error_text(response: Any) -> str:
    """Return the server's message in an HTTP response with an error."""
    try:
        return message_in(json.loads(response.text))
    except (ValueError, RecursionError):
        return " ".join(response.text.split()) or "empty response"


def message_in(body: Any) -> str:
    """Return the message in the JSON of an error, under any of its usual names, or else the JSON."""
    while isinstance(body, Mapping):
        inner = next((body[name] for name in ("error", "message", "detail") if body.get(name)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else json.dumps(body, default=str)


def redact(message: str, *keys: Any) -> str:
    """Remove keys from a message and truncate it to 500 characters."""
    for key in keys:
        if isinstance(key, str) and key.strip():
            message = message.replace(key.strip(), "***")
    return message[:500]


def is_too_long(status: int | None, message: str) -> bool:
    """Return whether a server refused an input because it has too many tokens."""
    return status in (400, 413, 422, 500) and bool(_OVERFLOW.search(message))
