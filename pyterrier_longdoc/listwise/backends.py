"""Ways to ask a language model; the libraries behind them are imported when the first question is asked."""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable
from urllib.parse import urlsplit

from ..common.files import folder_digest
from ..common.servers import (
    BackendError,
    ContextOverflowError,
    MalformedReplyError,
    check_address,
    is_too_long,
    key_in,
    llm_library,
    message_in,
    public,
    retrying,
    without_secrets,
    words_of,
)
from .messages import Message

# Of all backends while they connect, and while a local model generates: a lock of each could not be pickled.
_CONNECTING, _GENERATING = threading.Lock(), threading.Lock()


@dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
        text: what it wrote.
        input_tokens: tokens of the prompt; None if the backend does not know.
        output_tokens: tokens of the answer, reasoning included; None if the backend does not know.
        logprobs: natural log-probabilities of the likeliest first tokens, by their text, where `first_token` asked for
            them and the backend has them; None otherwise.
    """

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: Mapping[str, float] | None = None


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


@runtime_checkable
class FirstTokenBackend(Protocol):
    """A backend that also tells how likely first tokens are."""

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Asks for one token.

        Args:
            messages: the conversation.
            words: what the answer may be; backends that know all log-probabilities give at least theirs.
            top_logprobs: how many of the likeliest tokens are asked for, where a server decides about it.

        Returns:
            A reply with `logprobs`, None if there are none.

        Raises:
            BackendError: if there is no reply.
        """


class CallableBackend:
    """Any function from messages to text, as a backend.

    Args:
        function: gets the list of `{"role", "content"}` messages, returns a string or a `Reply`, with `logprobs`
            where first tokens are asked for. Its own exceptions
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

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Calls the function, which returns a `Reply` with `logprobs`."""
        return self(messages)


@dataclass(eq=False, repr=False)
class ServerBackend(ABC):
    """A model behind a server, asked through its vendor's client, which is made at the first question and not pickled.

    The client retries what servers and networks do; tenacity asks again where an answer is not in the form of the API.
    """

    model: str
    _: KW_ONLY
    client: Any = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    max_retries: int = 5

    _vendor: ClassVar[str]
    """As its client's class is called, after which its library and its errors are named."""

    def __post_init__(self) -> None:
        # Parameters are shown, stored and compared.
        with_keys = {"extra_headers", "extra_query", "api_key", "messages", "model", "stream"} & set(self.parameters)
        if with_keys:
            raise ValueError(
                f"parameters must not have {', '.join(sorted(with_keys))}: headers and keys belong into client=, model "
                f"into model="
            )
        self._connection: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The request's parameters."""
        return {"api": self._vendor.lower(), **self.parameters}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Sends a conversation.

        Raises:
            BackendError: if there is no reply, with the server's address and words; ContextOverflowError for too long a
                prompt.
            ImportError: without the vendor's package.
        """
        return self._ask(messages, self.parameters)

    def _ask(self, messages: Sequence[Message], parameters: Mapping[str, Any]) -> Reply:
        library, asking = llm_library(self._vendor.lower()), retrying(self.max_retries, MalformedReplyError)
        client = self.client
        try:
            client = client or self._connect(library)
            reply: Reply = asking(self._request, client, messages, parameters)
            return reply
        except getattr(library, f"{self._vendor}Error") as error:
            response, url = getattr(error, "response", None), getattr(getattr(error, "request", None), "url", None)
            said = (
                f"{error.__cause__ or error}" if response is None else f"{response.status_code}, {words_of(response)}"
            )
            where = "" if url is None else f" at {without_secrets(url)}"
            hint = self._address_hint(url) if getattr(response, "status_code", None) in (404, 405) else ""
            reason = public(f"{type(error).__name__}{where}: {said}", *_keys_of(client)) + hint
            told = " context length" if getattr(error, "code", None) == "context_length_exceeded" else ""
            too_long = is_too_long(getattr(response, "status_code", None), said + told)
            failure = (ContextOverflowError if too_long else BackendError)(f"{self.model}: {reason}")
        # Not within "except": the original would hang on it, with the request, which has the key.
        raise failure

    def _connect(self, library: Any) -> Any:
        with _CONNECTING:
            if self._connection is None:
                options = {"timeout": self.timeout, "max_retries": self.max_retries, **self._address()}
                self._connection = getattr(library, self._vendor)(**options)
            return self._connection

    def _request(self, client: Any, messages: Sequence[Message], parameters: Mapping[str, Any]) -> Reply:
        try:
            answer = self._send(client, messages, parameters)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._malformed(client, getattr(error, "doc", error)) from None
        try:
            return self._read(answer)
        except (AttributeError, IndexError, TypeError):
            raise self._malformed(client, answer.to_dict() if hasattr(answer, "to_dict") else answer) from None

    def _malformed(self, client: Any, answer: Any) -> MalformedReplyError:
        has_reason = isinstance(answer, Mapping) and answer.get("error")
        hint = self._address_hint(client.base_url) or ("" if has_reason else "; is its address right?")
        said = public(f"at {without_secrets(client.base_url)}: {message_in(answer)}", *_keys_of(client))
        return MalformedReplyError(f"{self.model}: no answer of {self._vendor}'s API {said}{hint}")

    def _address_hint(self, url: Any) -> str:
        """What may be wrong with the address of a server that does not know what it was asked for."""
        return ""

    def _address(self) -> dict[str, Any]:
        """Arguments of the client that say which server to ask, with which key."""
        return {}

    @abstractmethod
    def _send(self, client: Any, messages: Sequence[Message], parameters: Mapping[str, Any]) -> Any:
        """The vendor's answer."""

    @abstractmethod
    def _read(self, answer: Any) -> Reply:
        """What is in it."""


@dataclass(eq=False, repr=False)
class OpenAIBackend(ServerBackend):
    """A model behind an OpenAI-compatible server: OpenAI's, vLLM, SGLang, Ollama, llama.cpp, gateways.

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
        ValueError: for parameters that could hold keys, or an address that is none.
    """

    _: KW_ONLY
    base_url: str | None = None
    key_variable: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    _vendor = "OpenAI"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_url is not None:
            check_address("base_url", self.base_url)

    def _address(self) -> dict[str, Any]:
        # None lets the client read OPENAI_API_KEY; other servers often want some key, but not that one.
        key = None if self.base_url is None else "no-key"
        if self.key_variable is not None:
            key = key_in(self.key_variable, self.model)
        return {"base_url": self.base_url, "api_key": key}

    def _address_hint(self, url: Any) -> str:
        if _VERSION.search(urlsplit(str(url)).path):
            return ""
        return "; base_url probably lacks /v1, which addresses of OpenAI-compatible servers mostly end in"

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """Asks for one token and the log-probabilities of the likeliest; the server says how many it gives at most.

        Raises:
            BackendError: as for a conversation.
        """
        # Newer models of OpenAI's know the one name alone, most other servers the other.
        newer = "max_completion_tokens"
        bound = newer if newer in self.parameters else "max_tokens"
        others = {name: value for name, value in self.parameters.items() if name != bound}
        return self._ask(messages, {**others, bound: 1, "logprobs": True, "top_logprobs": top_logprobs})

    def _send(self, client: Any, messages: Sequence[Message], parameters: Mapping[str, Any]) -> Any:
        return client.chat.completions.create(model=self.model, messages=list(messages), **parameters)

    def _read(self, answer: Any) -> Reply:
        choice, usage = answer.choices[0], answer.usage
        text = choice.message.content or getattr(choice.message, "refusal", None) or ""
        told = getattr(getattr(choice, "logprobs", None), "content", None)
        # Several tokens may have one text, of which the first is the likeliest.
        logprobs = {each.token: each.logprob for each in reversed(told[0].top_logprobs)} if told else None
        tokens = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        return Reply(text, *tokens, logprobs=logprobs)


@dataclass(eq=False, repr=False)
class AnthropicBackend(ServerBackend):
    """A Claude model, through Anthropic's own API.

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

    _vendor = "Anthropic"

    def _send(self, client: Any, messages: Sequence[Message], parameters: Mapping[str, Any]) -> Any:
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        turns = [message for message in messages if message["role"] != "system"]
        options = {**({"system": system} if system else {}), **parameters}
        try:
            return client.messages.create(model=self.model, messages=turns, **options)
        except TypeError as error:
            if "authentication" not in str(error):
                raise
            raise BackendError(f"{self.model}: set the environment variable ANTHROPIC_API_KEY") from None

    def _read(self, answer: Any) -> Reply:
        text = "".join(block.text for block in answer.content if block.type == "text")
        usage = answer.usage
        cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        return Reply(text, usage.input_tokens + cached, usage.output_tokens)


_VERSION = re.compile(r"/v\d")
"""In the path of a server's address."""


def _keys_of(client: Any) -> list[Any]:
    return [getattr(client, name, None) for name in ("api_key", "auth_token")]


@dataclass(eq=False, repr=False)
class HuggingFaceBackend:
    """A causal language model of the Hugging Face hub, in this process; one prompt at a time.

    Prompts are made by the tokenizer's chat template. For a model whose template knows no system message, use a prompt
    without one: `ListwisePrompt(system="")`. For many prompts, a server such as vLLM behind `OpenAIBackend` is faster.

    Args:
        model: a model on the hub or a folder, which is told by the contents of its files as they are at the first look.
        parameters: of `generate`. Default: greedy, at most 256 new tokens.
        device: `"cuda"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None for that of the checkpoint.
        trust_remote_code: run modelling code that the checkpoint brings along.
    """

    model: str
    _: KW_ONLY
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_new_tokens": 256, "do_sample": False})
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.model = str(self.model)
        self._loaded: tuple[Any, Any] | None = None
        self._files: str | None = None  # of a folder, once it was looked at
        self._ids: dict[str, list[int]] = {}  # of all tokens, by their text without white space around it

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
        """Generates an answer.

        Raises:
            ContextOverflowError: if prompt and answer have more tokens than the model has positions.
            ValueError: for a tokenizer without a chat template.
        """
        import torch

        with _GENERATING, torch.inference_mode():
            model, tokenizer = self._load()
            inputs, length = self._inputs(messages, self.parameters.get("max_new_tokens", 1))
            generated = model.generate(**inputs, **{"pad_token_id": tokenizer.eos_token_id, **self.parameters})
            new = generated[0, length:]
            return Reply(tokenizer.decode(new, skip_special_tokens=True), length, len(new))

    def first_token(self, messages: Sequence[Message], words: Sequence[str], top_logprobs: int) -> Reply:
        """The log-probabilities of the words, from one pass; exact ones.

        A word's is that of all tokens that are it but for white space, `Yes` and the `▁Yes` of SentencePiece; a word of
        several tokens has none.

        Raises:
            ContextOverflowError: if prompt and answer have more tokens than the model has positions.
            ValueError: for a tokenizer without a chat template.
        """
        import torch

        with _GENERATING, torch.inference_mode():
            model, tokenizer = self._load()
            inputs, length = self._inputs(messages, 1)
            logits = model(**inputs, logits_to_keep=1).logits[0, -1].float()
            logprobs = torch.log_softmax(logits, -1)
            if not self._ids:
                for i in range(min(len(tokenizer), len(logprobs))):
                    self._ids.setdefault(tokenizer.decode([i]).strip(), []).append(i)
            found = {word: logprobs[self._ids[word]].logsumexp(0).item() for word in words if word in self._ids}
            return Reply(tokenizer.decode(logits.argmax()), length, 1, logprobs=found)

    def _inputs(self, messages: Sequence[Message], answer: int) -> tuple[Any, int]:
        """A conversation in the model's form, and its tokens."""
        model, tokenizer = self._load()
        inputs = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        length = inputs["input_ids"].shape[1]
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and length + answer > positions:
            raise ContextOverflowError(
                f"{self!r}: the prompt has {length} tokens, which with the answer makes {length + answer}; the model "
                f"takes {positions}"
            )
        return inputs, length

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            from ..common.hub import reachable
            from ..modelling.devices import in_own_memory

            if folder_digest(self.model) != self.settings["files"]:
                raise ValueError(f"{self!r}: the folder has changed since this backend looked at it: make a new one")
            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
            place = reachable(self.model)
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            if tokenizer.chat_template is None:
                raise ValueError(f"{self!r} has no chat template: use a chat (instruct) model")
            model = AutoModelForCausalLM.from_pretrained(place, dtype=self.dtype or "auto", **options)
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            in_own_memory(model)
            self._loaded = model.eval().to(device), tokenizer
        return self._loaded
