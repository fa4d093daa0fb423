"""Claude models through Anthropic's own API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..errors import BackendError, ContextOverflowError, MalformedReplyError
from ..prompts import Message
from .base import Reply, required, retry_malformed, says_overflow, without_secrets
from .server import ServerBackend


@dataclass(eq=False, repr=False)
class AnthropicBackend(ServerBackend):
    """A Claude model.

    Time-outs, rate limits (429) and server errors are retried by the `anthropic` client, with exponential back-off up
    to 8 seconds, jitter, and the server's Retry-After; a bad key or a bad request ends the run at once. The key is
    read from `ANTHROPIC_API_KEY`.

    Args:
        model: its name.
        client: an `anthropic.Anthropic` client of your own (another server, another key), instead of `timeout` and
            `max_retries`.
        parameters: of the request. Default: answers of at most 1024 tokens, which a ranking of 100 documents does not
            reach. There is no temperature: this API has dropped it, so that only the replay cache repeats a run.
        timeout: seconds to wait for a reply.
        max_retries: most further requests after failed ones.

    Raises:
        ValueError: for parameters that could hold keys.
    """

    _: KW_ONLY
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 1024})

    _api = "anthropic"

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Sends a conversation.

        Raises:
            BackendError: if there is no reply, with the server's reason.
            ContextOverflowError: if the server finds the prompt too long.
            ImportError: without the `anthropic` package.
        """
        anthropic, client = required("anthropic"), self._connect()
        try:
            return retry_malformed(lambda: self._request(client, messages), self.max_retries)
        except TypeError as error:
            if "authentication" not in str(error):
                raise
            raise BackendError(f"{self.model}: set the environment variable ANTHROPIC_API_KEY") from None
        except anthropic.AnthropicError as error:
            secrets = [getattr(client, name, None) for name in ("api_key", "auth_token")]
            reason = without_secrets(f"{type(error).__name__}: {error}", secrets)
            overflow = isinstance(error, anthropic.BadRequestError) and says_overflow(str(error))
            failure = (ContextOverflowError if overflow else BackendError)(f"{self.model}: {reason}")
        # Not within "except": the original would hang on it, with the request, which has the key.
        raise failure

    def _request(self, client: Any, messages: Sequence[Message]) -> Reply:
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        turns = [message for message in messages if message["role"] != "system"]
        parameters = {**({"system": system} if system else {}), **self.parameters}
        try:
            reply = client.messages.create(model=self.model, messages=turns, **parameters)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._malformed(error) from None
        try:
            text = "".join(block.text for block in reply.content if block.type == "text")
            usage = reply.usage
            cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
            return Reply(text, usage.input_tokens + cached, usage.output_tokens)
        except (AttributeError, TypeError) as error:
            raise self._malformed(error) from None

    def _malformed(self, error: Exception) -> MalformedReplyError:
        kind = type(error).__name__
        return MalformedReplyError(f"{self.model}: the server's answer is no message ({kind}); is it Anthropic's API?")

    def _make_client(self) -> Any:
        return required("anthropic").Anthropic(timeout=self.timeout, max_retries=self.max_retries)
