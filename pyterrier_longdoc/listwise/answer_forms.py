"""Answer forms of a model: a written order of all documents, or the log-probabilities of its first token."""

from __future__ import annotations

import math
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..common.arguments import argument, validate
from ..common.citations import Cited
from ..common.presentation import ReprMixin
from .backends import Reply
from .client import LOGPROBS_FROM, LLMClient
from .parsing import ParsedReply, parse_ranking
from .prompts import ListwisePrompt, Message, Prompt

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with the numbers of all {n} documents, the most relevant first, and "
    "nothing else, written like this: [2] > [1]"
)


class AnswerForm(Cited, ABC):
    """Asks a model for an order of documents and reads its answer."""

    prompt: ListwisePrompt  # the default prompt of `RankGPT`

    @abstractmethod
    def check(self, client: LLMClient, prompt: Prompt) -> None:
        """Raise ValueError if the model or prompt does not allow this form; the model is not called."""

    @abstractmethod
    def max_documents(self, prompt: Prompt) -> int | None:
        """Return the maximum number of documents in a prompt; None for no limit."""

    @abstractmethod
    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        """Send a prompt to the model."""

    @abstractmethod
    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        """Return the order of `n` documents in a reply; None if there is none."""


@dataclass(frozen=True, repr=False)
class Permutation(ReprMixin, AnswerForm):
    """Any model writes the numbers of all documents, best first: `[2] > [1]` (Sun et al. 2023)."""

    prompt = ListwisePrompt()

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        if names(prompt) == string.ascii_uppercase:
            raise ValueError("prompt= must have identifiers='numbers'; 'letters' are for answer=FirstToken()")

    def max_documents(self, prompt: Prompt) -> int | None:
        return None

    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        return client.ask(qid, messages)

    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        return parse_ranking(reply.text, n)


@dataclass(frozen=True, repr=False)
class FirstToken(ReprMixin, AnswerForm):
    """Orders documents by the log-probabilities of their identifiers as the first token of the answer.

    Source: FIRST (Reddy et al. 2024, arXiv 2406.15657), with letters as identifiers. The model generates one token per
    prompt instead of a ranking. The models of FIRST were trained for it; the prompt is this package's. The probability
    of an identifier is the sum over all tokens that only differ from it in white space. A prompt has at most 26
    documents with letters, or 9 with numbers, because 12 can begin with the token 1.

    A server returns at most `top_logprobs` log-probabilities, including those of other tokens. Documents without one
    are ranked below the others in their previous order and count as `llm_missing`, like documents left out of a written
    ranking. A reply without any identifier is a failure (`on_failure`), without retries.

    Args:
        top_logprobs: the number of log-probabilities to request, at least the number of documents in a prompt. OpenAI
            returns at most 20, vLLM at most its `--max-logprobs`. `HuggingFaceBackend` returns all identifiers.
    """

    papers: ClassVar[tuple[str, ...]] = ("reddy-2024-first",)

    top_logprobs: int = argument(20, at_least=1)

    prompt = ListwisePrompt(
        identifiers="letters",
        closing=(
            "Query: {query}\n\nThose were all {n} documents. Which one is the most relevant to the query? Answer with "
            "its letter and nothing else."
        ),
    )

    def __post_init__(self) -> None:
        validate(self)

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        check_gives_logprobs(client, f"answer={self!r}")

    def max_documents(self, prompt: Prompt) -> int | None:
        return min(len(names(prompt)), self.top_logprobs)

    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        reply = client.first_token(qid, messages, names(prompt), self.top_logprobs)
        return replace(reply, problem=f"its first token {reply.text!r} is no document and none has a log-probability")

    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        """Return the order by descending log-probability; documents without one come last in their order."""
        values = [logprob(reply.logprobs or {}, name) for name in names(prompt)[:n]]
        scored = [document for document, value in enumerate(values) if value > -math.inf]
        if not scored:
            return None
        others = [document for document, value in enumerate(values) if value == -math.inf]
        return ParsedReply([*sorted(scored, key=values.__getitem__, reverse=True), *others], len(others), 0, 0)


def names(prompt: Prompt) -> str:
    """Return the one-token identifiers of a prompt's documents: letters, or 1 to 9 (also for prompt functions)."""
    return string.ascii_uppercase if getattr(prompt, "identifiers", "") == "letters" else string.digits[1:]


def logprob(logprobs: Mapping[str, float], word: str, *, fold: bool = False) -> float:
    """Return the log-probability of a word with any surrounding white space (with `fold` in any case), or -inf.

    Example:
        >>> round(logprob({"A": -1.5, " A": -3.0, "B": -0.5}, "A"), 4)
        -1.2986
    """
    target = word.casefold() if fold else word
    stripped = [(token.strip(), value) for token, value in logprobs.items() if value > -math.inf]
    matches = [value for token, value in stripped if (token.casefold() if fold else token) == target]
    highest = max(matches, default=-math.inf)
    # Relative to the highest, because exp(-746) is 0.
    return highest + math.log(math.fsum(math.exp(value - highest) for value in matches)) if matches else highest


def check_gives_logprobs(client: LLMClient, user: str) -> None:
    """Raise ValueError for a backend that cannot return log-probabilities."""
    if not hasattr(client.backend, "first_token"):
        raise ValueError(f"{user} needs log-probabilities, which {client.backend!r} does not return: {LOGPROBS_FROM}")
