"""OpenAI and everything that speaks its chat API: vLLM, SGLang, Ollama, llama.cpp, gateways."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..errors import BackendError, ContextOverflowError, MalformedReplyError
from ..prompts import Message
from .base import Reply, required, retry_malformed, says_overflow, without_secrets
from .server import ServerBackend


@dataclass(eq=False, repr=False)
class OpenAIBackend(ServerBackend):
    """A model behind an OpenAI-compatible server.

    Time-outs, rate limits (429) and server errors are retried by the `openai` client, with exponential back-off up to
    8 seconds, jitter, and the server's Retry-After (up to two minutes); a bad key or a bad request ends the run at
    once.

    Args:
        model: its name on the server.
        base_url: the server, e.g. `"http://localhost:8000/v1"`; None for OpenAI's.
        key_variable: the environment variable with the key. Default: `OPENAI_API_KEY` for OpenAI's server and no key
            for any other, so that a key never goes to a server it was not made for.
        client: an `openai.OpenAI` client of your own, instead of the two above, `timeout` and `max_retries`.
        parameters: of the request, e.g. `{"temperature": 0, "max_tokens": 300}`, the default being a temperature of 0.
        timeout: seconds to wait for a reply.
        max_retries: most further requests after failed ones.

    Raises:
        ValueError: for parameters that could hold keys.
    """

    _: KW_ONLY
    base_url: str | None = None
    key_variable: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    _api = "openai"

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Sends a conversation.

        Raises:
            BackendError: if there is no reply, with the server's reason.
            ContextOverflowError: if the server finds the prompt too long.
            ImportError: without the `openai` package.
        """
        openai, client = required("openai"), self._connect()
        try:
            return retry_malformed(lambda: self._request(client, messages), self.max_retries)
        except openai.APIError as error:
            reason = without_secrets(f"{type(error).__name__}: {error}", [getattr(client, "api_key", None)])
            overflow = isinstance(error, openai.BadRequestError) and (
                error.code == "context_length_exceeded" or says_overflow(str(error))
            )
            failure = (ContextOverflowError if overflow else BackendError)(f"{self.model}: {reason}")
        # Not within "except": the original would hang on it, with the request, which has the key.
        raise failure

    def _request(self, client: Any, messages: Sequence[Message]) -> Reply:
        try:
            completion = client.chat.completions.create(model=self.model, messages=list(messages), **self.parameters)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._malformed(error) from None
        try:
            message, usage = completion.choices[0].message, completion.usage
            text = message.content or getattr(message, "refusal", None) or ""
        except (AttributeError, IndexError, TypeError) as error:
            raise self._malformed(error) from None
        return Reply(text, getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None))

    def _malformed(self, error: Exception) -> MalformedReplyError:
        kind = type(error).__name__
        return MalformedReplyError(
            f"{self.model}: the server's answer is no chat completion ({kind}); is base_url right?"
        )

    def _make_client(self) -> Any:
        openai = required("openai")
        try:
            return openai.OpenAI(
                base_url=self.base_url, api_key=self._key(), timeout=self.timeout, max_retries=self.max_retries
            )
        except openai.OpenAIError as error:
            raise BackendError(f"{self.model}: {error}") from None

    def _key(self) -> str | None:
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise BackendError(
                    f"{self.model}: set the environment variable {self.key_variable} to the server's key"
                )
            return key
        # None lets the client read OPENAI_API_KEY; other servers often want some key, but not that one.
        return None if self.base_url is None else "no-key"
