"""What a backend is, and any callable as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...common.files import import_extra
from ..errors import MalformedReplyError
from ..prompts import Message

Value = TypeVar("Value")

_OVERFLOW = re.compile(
    r"context[ _](?:length|window|size)|maximum[^.]{0,30}(?:context|tokens|length)|prompt is too long|too many tokens",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
        text: what it wrote.
        input_tokens: tokens of the prompt; None if the backend does not know.
        output_tokens: tokens of the answer, reasoning included; None if the backend does not know.
    """

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None


class Backend(Protocol):
    """Asks one model.

    Its `settings` are JSON-able values and are stored with the replies, so they hold no keys and no addresses.
    """

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What else a reply depends on."""

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Sends a conversation; may be called by several threads at the same time.

        Raises:
            BackendError: if there is no reply; never a text that says so.
        """


class CallableBackend:
    """Any function from messages to text, as a backend.

    Args:
        function: gets the list of `{"role", "content"}` messages, returns a string or a `Reply`. Its own exceptions
            end the run; `ContextOverflowError` asks for shorter documents.
        name: stands for the function in the replay cache: change it when the function changes its answers. Default:
            the module and name of a plain function.
    """

    def __init__(self, function: Callable[[list[Message]], str | Reply], name: str | None = None) -> None:
        self.function = function
        plain = getattr(function, "__qualname__", None)
        self.named = name is not None or (plain is not None and "<" not in plain)
        self.model = name or f"{getattr(function, '__module__', '')}.{plain or type(function).__qualname__}"
        self.settings: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"CallableBackend({self.model})"

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Calls the function.

        Raises:
            TypeError: if it returns something else than a string or a `Reply`.
        """
        reply = self.function([dict(message) for message in messages])
        if isinstance(reply, str):
            return Reply(reply)
        if isinstance(reply, Reply):
            return reply
        raise TypeError(f"{self.model} returned {type(reply).__name__}; it must return a string or a Reply")


def as_backend(llm: Any) -> Backend:
    """A backend as it is, any other callable as a `CallableBackend`.

    Raises:
        ValueError: if `llm` cannot be called.
    """
    if not callable(llm):
        raise ValueError(f"llm={llm!r} must be a backend, an LLMClient, or a function from messages to text")
    if hasattr(llm, "model") and hasattr(llm, "settings"):
        return llm
    return CallableBackend(llm)


def required(module: str) -> Any:
    """Imports a library of the extra `llm`.

    Raises:
        ImportError: with the command that installs it.
    """
    return import_extra(module, "llm", f"this needs {module}")


def says_overflow(message: str) -> bool:
    """Whether a server's refusal says that the prompt is too long."""
    return _OVERFLOW.search(message) is not None


def without_secrets(message: str, secrets: Sequence[str | None]) -> str:
    """A message in which keys, should a server repeat them, are masked; at most 500 characters."""
    for secret in filter(None, secrets):
        message = message.replace(secret, "***")
    return message[:500]


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuses request parameters in which keys travel: parameters are shown, stored and compared.

    Raises:
        ValueError: naming them.
    """
    forbidden = sorted({"extra_headers", "extra_query", "api_key", "messages", "model", "stream"} & set(parameters))
    if forbidden:
        raise ValueError(
            f"parameters must not have {', '.join(forbidden)}: headers and keys belong into client=, model into model="
        )


def retry_malformed(call: Callable[[], Value], retries: int) -> Value:
    """Repeats a call whose answer is not in the form of the API, which the vendors' clients do not retry.

    Raises:
        MalformedReplyError: after `retries` further calls.
    """
    tenacity = required("tenacity")
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(MalformedReplyError),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=8),
        reraise=True,
    )
    result: Value = retrying(call)
    return result
