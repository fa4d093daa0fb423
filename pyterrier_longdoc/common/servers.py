"""Models on servers: addresses, keys and errors without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

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
    """A model gave no usable reply: wrong key, bad request, outage or time-out."""


class ContextOverflowError(BackendError):
    """The prompt, or a query with its window, has more tokens than the model allows."""


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
