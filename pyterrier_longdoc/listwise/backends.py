"""Backends for language models; their libraries are imported on the first call."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
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
from .parsing import ends_reasoning, final_answer, find_verdict
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
        logprobs: natural log-probabilities of the most likely first tokens, by text; None unless `first_token` was
            called and the backend returns them.
        problem: why there is no answer in the reply and another call would not help, and the cure; None otherwise.
    """

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: Mapping[str, float] | None = None
    problem: str | None = None


class Backend(Protocol):
    """A connection to one model.

    A backend with log-probabilities also has `first_token(messages, words, top_logprobs) -> Reply`, which returns
    `logprobs` for each of `words`, or for the `top_logprobs` most likely tokens of the server; and, for models that
    reason first, `verdict` with the same arguments, for the token of the verdict after the reasoning.

    Attributes:
        model: the name of the model.
        settings: everything else that a reply depends on, as JSON, without keys and addresses.
    """

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def settings(self) -> Mapping[str, Any]: ...  # noqa: D102

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Send a conversation; raise BackendError if there is no reply. Must be thread-safe."""


class CallableBackend:
    """A backend from any function of messages.

    Args:
        function: takes the list of `{"role", "content"}` messages and returns a string, or a `Reply` with `logprobs`
            for `first_token`. Exceptions end the run, except for `ContextOverflowError`, which shortens the documents.
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

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Call the function, which must return a `Reply` with `logprobs`."""
        return self(messages)

    def verdict(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Call the function; `logprobs` of its reply are those of the verdict."""
        return self(messages)


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
        return self._ask(messages, self.parameters)

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Request one token with the log-probabilities of the most likely ones; the server limits their number."""
        # OpenAI's newer models only accept one name, most other servers the other.
        newer = "max_completion_tokens"
        bound = newer if newer in self.parameters else "max_tokens"
        return self._ask(messages, {**self.parameters, bound: 1, "logprobs": True, "top_logprobs": top_logprobs})

    def verdict(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Request a whole reply, with the log-probabilities at the token of its verdict, one of `words`."""
        return self._ask(messages, {**self.parameters, "logprobs": True, "top_logprobs": top_logprobs}, words)

    def _ask(
        self, messages: Sequence[Message], parameters: Mapping[str, Any], verdicts: Sequence[str] | None = None
    ) -> Reply:
        openai, client = import_extra("openai", "llm", "this needs openai"), self.client
        try:
            client = client or self._connect(openai)
            return self._request(client, messages, parameters, verdicts)
        except openai.OpenAIError as error:
            response: Any = getattr(error, "response", None)
            message = str(error.__cause__ or error) if response is None else error_text(response)
            url = getattr(getattr(error, "request", None), "url", self.base_url or "")
            too_long = is_too_long(getattr(error, "status_code", None), f"{message} {getattr(error, 'code', '')}")
            reason = f"{self.model}: {type(error).__name__} at {without_secrets(url)}: {message}"
            key = getattr(client, "api_key", None)
            failure = (ContextOverflowError if too_long else BackendError)(redact(reason, key))
        # Not inside "except", because the error would contain the original one, with the request and its key.
        raise failure

    def _connect(self, openai: Any) -> Any:
        if self._connection is None:
            variable = self.key_variable or ("OPENAI_API_KEY" if self.base_url is None else None)
            # Other servers often require some key, but must not get OpenAI's.
            key = os.environ.get(variable) if variable else "no-key"
            if not key:
                raise BackendError(
                    f"{self.model}: set the environment variable {variable} to the server's key, or name another "
                    f"variable by key_variable="
                )
            options = {"timeout": self.timeout, "max_retries": self.max_retries}
            self._connection = openai.OpenAI(base_url=self.base_url, api_key=key, **options)
        return self._connection

    def _request(
        self,
        client: Any,
        messages: Sequence[Message],
        parameters: Mapping[str, Any],
        verdicts: Sequence[str] | None,
    ) -> Reply:
        completions = client.chat.completions.with_raw_response
        for attempt in range(self.max_retries + 1):
            time.sleep(attempt / 2)
            raw = completions.create(model=self.model, messages=list(messages), **parameters)
            try:
                return _reply_of(raw.parse(), verdicts)
            except (AttributeError, LookupError, TypeError, ValueError):
                message = f"invalid reply from {without_secrets(client.base_url)}: {error_text(raw.http_response)}"
        raise BackendError(redact(f"{self.model}: {message}", client.api_key))


def _reply_of(answer: Any, verdicts: Sequence[str] | None) -> Reply:
    """Return the reply in a response of OpenAI's API, with log-probabilities at its first token, or at a verdict."""
    choice, usage = answer.choices[0], answer.usage
    text = choice.message.content or getattr(choice.message, "refusal", None) or ""
    check_type(str, "a text", content=text)
    positions = getattr(getattr(choice, "logprobs", None), "content", None) or []
    tokens, place, logprobs = [each.token for each in positions], 0, None
    verdict = None if verdicts is None else find_verdict("".join(tokens), verdicts)
    if verdict is not None:
        place = bisect_right(list(accumulate(map(len, tokens))), verdict[1])
    if positions and (verdicts is None or verdict is not None):
        # Of several tokens with the same text, the first and most likely one counts.
        logprobs = {each.token: float(each.logprob) for each in reversed(positions[place].top_logprobs)}
    requested, answered = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    is_one_token = logprobs is not None and verdicts is None
    has_answer = final_answer(text).strip() if verdicts is None else ends_reasoning(text)
    problem = None
    if choice.finish_reason == "length" and not has_answer and not is_one_token:
        problem = OUT_OF_TOKENS.format("max_tokens")
    elif not final_answer(text).strip() and not is_one_token:
        if any(getattr(choice.message, name, None) for name in ("tool_calls", "function_call")):
            problem = "it only calls tools or functions: remove them from parameters="
        elif choice.finish_reason == "content_filter":
            problem = "the server's content filter removed it: change the filter or the model"
        elif any(getattr(choice.message, name, None) for name in ("reasoning_content", "reasoning")):
            problem = "it only has reasoning and no content: change the server's reasoning parser"
    return Reply(text, requested, answered, logprobs, problem)


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
        self._ids: dict[str, list[int]] = {}  # ids of all tokens, by text without surrounding white space

    def __repr__(self) -> str:
        return f"HuggingFaceBackend({Path(self.model).name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_ids": {}}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters of `generate`, the precision, and a digest of the files of a folder."""
        self._files = self._files or folder_digest(self.model)
        return {"api": "transformers", "files": self._files, "dtype": self.dtype, **self.parameters}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Generate a reply; raise ContextOverflowError if it exceeds the positions of the model."""
        return self._generate(messages)[0]

    def verdict(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Generate a reply, with the exact log-probabilities of these words at the token of its verdict."""
        import torch

        reply, prompt, answer = self._generate(messages, words)
        with _GENERATING, torch.inference_mode():
            model, tokenizer = self._load()
            verdict = find_verdict(reply.text, words)
            if reply.problem or verdict is None:
                return reply
            ends = range(1, len(answer) + 1)
            place = bisect_right(
                ends, verdict[1], key=lambda end: len(tokenizer.decode(answer[:end], skip_special_tokens=True))
            )
            read = {"input_ids": torch.cat([prompt, answer[:place]])[None]}
            values = self._logprobs(model, tokenizer, read, words)[1]
            return replace(reply, logprobs=values if len(values) == len(words) else None)

    def _generate(self, messages: Sequence[Message], verdicts: Sequence[str] | None = None) -> tuple[Reply, Any, Any]:
        """Return a reply, and the ids of the prompt and of the reply."""
        import torch

        with _GENERATING, torch.inference_mode():
            limit = self.parameters.get("max_new_tokens")
            model, tokenizer, inputs, length = self._prepare(messages, limit or 1)
            defaults = {"pad_token_id": tokenizer.eos_token_id, "tokenizer": tokenizer}  # the latter for `stop_strings`
            prompt, answer = model.generate(**inputs, **{**defaults, **self.parameters})[0].tensor_split([length])
            text = tokenizer.decode(answer, skip_special_tokens=True)
            has_answer = final_answer(text).strip() if verdicts is None else ends_reasoning(text)
            problem = OUT_OF_TOKENS.format("max_new_tokens") if len(answer) == limit and not has_answer else None
            return Reply(text, length, len(answer), problem=problem), prompt, answer

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Return the exact log-probabilities of the words, in one forward pass.

        The probability of a word is the sum over all tokens that only differ from it in white space, such as `Yes` and
        SentencePiece's `▁Yes`. A word of several tokens has none.
        """
        import torch

        with _GENERATING, torch.inference_mode():
            model, tokenizer, inputs, length = self._prepare(messages, 1)
            likeliest, values = self._logprobs(model, tokenizer, inputs, words)
            return Reply(tokenizer.decode(likeliest), length, 1, logprobs=values)

    def _logprobs(self, model: Any, tokenizer: Any, inputs: Any, words: Sequence[str]) -> tuple[Any, dict[str, float]]:
        """Return the likeliest next token, and the log-probabilities of words of one token."""
        logprobs = model(**inputs, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
        if not self._ids:
            for i in range(min(len(tokenizer), len(logprobs))):
                self._ids.setdefault(tokenizer.decode([i]).strip(), []).append(i)
        found = {word: logprobs[self._ids[word]].logsumexp(0).item() for word in words if word in self._ids}
        return logprobs.argmax(), found

    def _prepare(self, messages: Sequence[Message], answer: int) -> tuple[Any, Any, Any, int]:
        """Return model and tokenizer, and a conversation as input with its number of tokens."""
        model, tokenizer = self._load()
        inputs = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        length = inputs["input_ids"].shape[1]
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and length + answer > positions:
            raise ContextOverflowError(
                f"{self!r}: prompt and answer have {length + answer} tokens, but the model allows {positions}"
            )
        return model, tokenizer, inputs, length

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
