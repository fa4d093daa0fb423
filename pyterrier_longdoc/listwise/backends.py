"""Backends for language models; their libraries are imported on the first call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..common.arguments import argument, check_type, validate
from ..common.files import folder_digest, full_name, import_extra
from ..common.servers import (
    BackendError,
    ContextOverflowError,
    check_parameters,
    error_text,
    is_too_long,
    redact,
    without_secrets,
)
from .parsing import final_answer
from .prompts import Message

# One lock for all local models, because a lock per model could not be pickled.
_GENERATING = threading.Lock()

OUT_OF_TOKENS = "it ended at the limit of tokens before an answer began: raise {} in parameters="


@dataclass(frozen=True)
class Reply:
    """The reply of a model.

    Attributes:
        text: the generated text.
        input_tokens: the number of tokens of the prompt; None if the backend does not report it.
        output_tokens: the number of generated tokens, including reasoning; None if the backend does not report it.
        problem: why there is no answer in the reply and another call would not help, and the cure; None otherwise.
    """

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    problem: str | None = None


class Backend(Protocol):
    """A connection to one model.

    Attributes:
        model: the name of the model.
        settings: everything else that a reply depends on, as JSON, without keys and addresses.
    """

    @property
    def model(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Send a conversation; raise BackendError if there is no reply. Must be thread-safe."""


_NO_KEY = "no-key"
"""What servers get that need some key, but not a real one."""


class CallableBackend:
    """A backend from any function of messages.

    Args:
        function: takes the list of `{"role", "content"}` messages and returns a string or a `Reply`. Exceptions end the
            run, except for `ContextOverflowError`, which shortens the documents.
        name: the name of the function in the replay cache; change it when the function changes. Default: the module and
            name of the function.
    """

    def __init__(self, function: Callable[[list[Message]], str | Reply], name: str | None = None) -> None:
        self.function, self.name = function, name
        function_name = getattr(function, "__qualname__", None)
        self.has_name = name is not None or (function_name is not None and "<" not in function_name)
        self.model = name or f"{getattr(function, '__module__', '')}.{function_name or type(function).__qualname__}"
        self.settings: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"CallableBackend({self.model})"

    def describe(self) -> dict[str, Any]:
        """Return the name, or the function, which counts by its own name."""
        return {"name": self.name} if self.name else {"function": self.function}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Call the function."""
        reply = self.function([dict(message) for message in messages])
        if not isinstance(reply, str | Reply):
            raise TypeError(f"{self.model} returned {type(reply).__name__}: it must return a string or a Reply")
        return Reply(reply) if isinstance(reply, str) else reply


@dataclass(eq=False, repr=False)
class OpenAIBackend:
    """A model on an OpenAI-compatible server: OpenAI, Anthropic, vLLM, SGLang, Ollama, llama.cpp or a gateway.

    The `openai` client retries after time-outs, rate limits (429) and server errors, with exponential back-off up to 8
    seconds, jitter, and the server's Retry-After (up to two minutes). A malformed reply is requested again, too. A
    wrong key or a bad request ends the run at once.

    Args:
        model: the name of the model on the server.
        base_url: the address of the server, usually ending in `/v1`, e.g. `"http://localhost:8000/v1"`, or
            `"https://api.anthropic.com/v1"` for Claude; None for OpenAI.
        key_variable: the environment variable with the key. Default: `OPENAI_API_KEY` for OpenAI's server and no key
            for others, so that keys are not sent to the wrong server.
        client: your own `openai.OpenAI` client, instead of `base_url`, `key_variable`, `timeout` and `max_retries`.
        parameters: parameters of the request, e.g. `{"temperature": 0, "max_tokens": 300}`. Default: temperature 0.
        timeout: the maximum time to wait for a reply, in seconds.
        max_retries: the maximum number of retries of a failed request.

    Raises:
        ValueError: for parameters that could contain keys.

    Example:
        `ld.OpenAIBackend("qwen3", base_url="http://localhost:8000/v1")`
    """

    model: str
    _: KW_ONLY
    base_url: str | None = None
    key_variable: str | None = None
    client: Any = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    timeout: float = argument(60.0, at_least=0)
    max_retries: int = argument(5, at_least=0)

    def __post_init__(self) -> None:
        validate(self)
        check_parameters(self.parameters, "messages", "model", "stream", cure="pass keys in client=")
        self._connection: Any = None

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.model!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters of the request."""
        return {"api": "openai", **self.parameters}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Send a conversation; raise BackendError with the server's address and message if there is no reply."""
        openai, client = import_extra("openai", "llm", "this needs openai"), self.client
        try:
            client = client or self._connect(openai)
            return self._request(client, messages)
        except openai.OpenAIError as error:
            response: Any = getattr(error, "response", None)
            message = str(error.__cause__ or error) if response is None else error_text(response)
            url = getattr(getattr(error, "request", None), "url", self.base_url or "")
            too_long = is_too_long(getattr(error, "status_code", None), f"{message} {getattr(error, 'code', '')}")
            reason = f"{self.model}: {type(error).__name__} at {without_secrets(url)}: {message}"
            key = getattr(client, "api_key", None)
            if getattr(error, "status_code", None) == 401 and key == _NO_KEY:
                reason += " (no key was sent: name its environment variable by key_variable=)"
            failure = (ContextOverflowError if too_long else BackendError)(redact(reason, key))
        # Not inside "except", because the error would contain the original one, with the request and its key.
        raise failure

    def _connect(self, openai: Any) -> Any:
        if self._connection is None:
            variable = self.key_variable or ("OPENAI_API_KEY" if self.base_url is None else None)
            # Other servers often require some key, but must not get OpenAI's.
            key = os.environ.get(variable) if variable else _NO_KEY
            if not key:
                raise BackendError(
                    f"{self.model}: set the environment variable {variable} to the server's key, or name another "
                    f"variable by key_variable="
                )
            options = {"timeout": self.timeout, "max_retries": self.max_retries}
            self._connection = openai.OpenAI(base_url=self.base_url, api_key=key, **options)
        return self._connection

    def _request(self, client: Any, messages: Sequence[Message]) -> Reply:
        completions = client.chat.completions.with_raw_response
        for attempt in range(self.max_retries + 1):
            time.sleep(attempt / 2)
            raw = completions.create(model=self.model, messages=list(messages), **self.parameters)
            try:
                return _reply_of(raw.parse())
            except (AttributeError, LookupError, TypeError, ValueError):
                message = f"invalid reply from {without_secrets(client.base_url)}: {error_text(raw.http_response)}"
        raise BackendError(redact(f"{self.model}: {message}", client.api_key))


def _reply_of(answer: Any) -> Reply:
    """Return the reply in a response of OpenAI's API."""
    choice, usage = answer.choices[0], answer.usage
    text = choice.message.content or getattr(choice.message, "refusal", None) or ""
    check_type(str, "a text", content=text)
    problem = None
    if not final_answer(text).strip():
        if choice.finish_reason == "length":
            problem = OUT_OF_TOKENS.format("max_tokens")
        elif any(getattr(choice.message, name, None) for name in ("tool_calls", "function_call")):
            problem = "it only calls tools or functions: remove them from parameters="
        elif choice.finish_reason == "content_filter":
            problem = "the server's content filter removed it: change the filter or the model"
        elif any(getattr(choice.message, name, None) for name in ("reasoning_content", "reasoning")):
            problem = "it only has reasoning and no content: change the server's reasoning parser"
    requested, answered = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    return Reply(text, requested, answered, problem)


@dataclass(eq=False, repr=False)
class HuggingFaceBackend:
    """A causal language model from the Hugging Face hub, run locally with one prompt at a time.

    Prompts use the chat template of the tokenizer. If the template has no system message, use a prompt without one:
    `ListwisePrompt(system="")`. For many prompts, a server such as vLLM with `OpenAIBackend` is faster.

    Args:
        model: a model on the hub, or a folder, which is identified by the contents of its files when it is first
            used; it must not change afterwards.
        parameters: the parameters of `generate`. Default: greedy decoding, at most 256 new tokens.
        device: `"cuda"`, `"cpu"`, ...; None uses a GPU if there is one.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None uses that of the checkpoint.
        trust_remote_code: run modelling code of the checkpoint.
    """

    model: str
    _: KW_ONLY
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_new_tokens": 256, "do_sample": False})
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.model = str(full_name(self.model))
        self._loaded: tuple[Any, Any] | None = None
        self._files: str | None = None  # digest of a folder on first use

    def __repr__(self) -> str:
        return f"HuggingFaceBackend({Path(self.model).name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters of `generate`, the precision, and a digest of the files of a folder."""
        self._files = self._files or folder_digest(self.model)
        return {"api": "transformers", "files": self._files, "dtype": self.dtype, **self.parameters}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Generate a reply; raise ContextOverflowError if it exceeds the positions of the model."""
        import torch

        with _GENERATING, torch.inference_mode():
            model, tokenizer = self._load()
            inputs = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(model.device)
            length, limit = inputs["input_ids"].shape[1], self.parameters.get("max_new_tokens")
            positions = getattr(model.config, "max_position_embeddings", None)
            if positions is not None and length + (limit or 1) > positions:
                raise ContextOverflowError(
                    f"{self!r}: prompt and answer have {length + (limit or 1)} tokens, but the model allows {positions}"
                )
            defaults = {"pad_token_id": tokenizer.eos_token_id, "tokenizer": tokenizer}  # the latter for `stop_strings`
            answer = model.generate(**inputs, **{**defaults, **self.parameters})[0, length:]
            text = tokenizer.decode(answer, skip_special_tokens=True)
            is_cut = len(answer) == limit and not final_answer(text).strip()
            problem = OUT_OF_TOKENS.format("max_new_tokens") if is_cut else None
            return Reply(text, length, len(answer), problem)

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForCausalLM

            from ..common.hub import reachable
            from ..common.language import load_tokenizer
            from ..modelling.backbones.load import check_embeddings
            from ..modelling.devices import in_own_memory

            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
            place = reachable(self.model)
            tokenizer = load_tokenizer(place, **options)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=self.dtype or "auto", **options)
            check_embeddings(model, tokenizer)
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            in_own_memory(model)
            self._loaded = model.eval().to(device), tokenizer
        return self._loaded
