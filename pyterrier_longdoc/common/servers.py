"""Models behind servers: how one is asked until it answers, and what may be shown of an address, a key and an error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from .files import import_extra

_LONGEST_WAIT = 120.0
"""Seconds; a server that asks for a longer pause is asked again after these."""

_OVERFLOW = re.compile(
    r"context[ _](?:length|window|size|limit)|maximum(?![^.]{0,30}output)[^.]{0,30}(?:context|tokens|length)|"
    r"prompt is too long|too many tokens|must have less than \d+ tokens",
    re.IGNORECASE,
)
"""What servers say of an input that is too long, and not of a `max_tokens` or a batch that is too large."""


class BackendError(RuntimeError):
    """A model could not be asked: bad key, bad request, outage, time-out; never turned into a ranking."""


class OutageError(BackendError):
    """A server was busy, failed or did not answer, which may pass.

    Attributes:
        after: seconds that the server asks to wait; None if it does not say.
    """

    after: float | None = None


class MalformedReplyError(BackendError):
    """The server answered, but not in the form of its API."""


class ContextOverflowError(BackendError):
    """The prompt, or a query with its window, has more tokens than the model takes."""


def retrying(max_retries: int, *passing: type[BackendError], ended: Event | None = None) -> Any:
    """Return what calls a function again as long as it raises one of the passing errors, with growing pauses.

    After `max_retries` further calls the last error is raised; once `ended` is set, nothing is called or waited for.
    """
    tenacity = llm_library("tenacity")
    growing, ended = tenacity.wait_random_exponential(multiplier=0.5, max=8), ended or Event()

    def wait(state: Any) -> float:
        after: float | None = getattr(state.outcome.exception(), "after", None)
        return growing(state) if after is None else min(after, _LONGEST_WAIT)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(passing),
        stop=tenacity.stop_after_attempt(max_retries + 1) | tenacity.stop_when_event_set(ended),
        sleep=tenacity.sleep_using_event(ended),
        wait=wait,
        reraise=True,
    )


def llm_library(name: str) -> Any:
    """Import a library of the extra `llm`."""
    return import_extra(name, "llm", f"this needs {name}")


def check_address(name: str, address: Any) -> None:
    """Raise ValueError, naming the argument, for what is no address of a server."""
    if urlsplit(str(address)).scheme not in ("http", "https"):
        raise ValueError(f"{name}={address!r} must begin with http:// or https://")


def key_in(variable: str, who: str) -> str:
    """Return the key in an environment variable; raise BackendError if there is none."""
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"{who}: set the environment variable {variable} to the server's key")
    return key


def without_secrets(url: Any) -> str:
    """Return an address for messages: what stands before an @ or after a ? may be secret."""
    parts = urlsplit(str(url))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def words_of(response: Any) -> str:
    """Return what a server says in an HTTP response that reports an error."""
    try:
        return message_in(json.loads(response.text))
    except ValueError:
        return " ".join(response.text.split()) or "without a word"


def message_in(body: Any) -> str:
    """Return the message in an error's JSON, which has different names; all of it if there is none."""
    while isinstance(body, Mapping):
        inner = next((body[name] for name in ("error", "message", "detail") if body.get(name)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else json.dumps(body, default=str)


def public(message: str, *keys: Any) -> str:
    """Return the beginning of a message, without these keys."""
    for key in keys:
        if isinstance(key, str) and key.strip():
            message = message.replace(key.strip(), "***")
    return message[:500]


def is_too_long(status: int | None, said: str) -> bool:
    """Return whether a server refuses an input because it has too many tokens."""
    return status in (400, 413, 422) and bool(_OVERFLOW.search(said))
