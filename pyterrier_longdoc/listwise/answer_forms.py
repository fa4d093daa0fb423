"""How a model answers which of some documents are best: by naming all in order, or by its first token alone."""

from __future__ import annotations

import math
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.arguments import argument, validate
from ..common.citations import Cited
from ..common.presentation import ShowsChanges
from .backends import Reply
from .client import LOGPROBS_FROM, LLMClient
from .parsing import ParsedReply, parse_ranking
from .prompts import ListwisePrompt, Message, Prompt

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with the numbers of all {n} documents, the most relevant first, and "
    "nothing else, written like this: [2] > [1]"
)

FIRST_TOKEN_PROMPT = ListwisePrompt(
    identifiers="letters",
    closing=(
        "Query: {query}\n\nThose were all {n} documents. Which one is the most relevant to the query? Answer with its "
        "letter and nothing else."
    ),
)


class AnswerForm(Cited, ABC):
    """How a model is asked for an order of documents, and how its order is read."""

    prompt: ListwisePrompt  # what is asked where `RankGPT` is given no prompt
    asks_again: bool  # another call may help where a reply cannot be read

    @abstractmethod
    def check(self, client: LLMClient, prompt: Prompt) -> None:
        """Raise ValueError for a model or a prompt that this form cannot be had from, without asking anything."""

    @abstractmethod
    def most(self, prompt: Prompt) -> int | None:
        """Return the most documents in a prompt; None for no limit."""

    @abstractmethod
    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        """Ask the model."""

    @abstractmethod
    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        """Return the order of `n` documents; None for a reply that holds none."""

    @abstractmethod
    def unchanged(self, n: int, prompt: Prompt) -> Reply:
        """Return a reply that leaves `n` documents in their order."""


@dataclass(frozen=True, repr=False)
class Permutation(ShowsChanges, AnswerForm):
    """The model writes the numbers of all documents, best first: `[2] > [1]`; any model can. Sun et al. 2023."""

    prompt = ListwisePrompt()
    asks_again = True

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        if names(prompt) == string.ascii_uppercase:
            raise ValueError("prompt= has identifiers='letters', for answer=FirstToken(); orders are read from numbers")

    def most(self, prompt: Prompt) -> int | None:
        return None

    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        return client.ask(qid, messages)

    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        return parse_ranking(reply.text, n)

    def unchanged(self, n: int, prompt: Prompt) -> Reply:
        return Reply(" > ".join(f"[{number}]" for number in range(1, n + 1)))


@dataclass(frozen=True, repr=False)
class FirstToken(ShowsChanges, AnswerForm):
    """The order is that of the log-probabilities of the documents' identifiers as first token of the answer.

    Source: FIRST (Reddy et al. 2024, arXiv 2406.15657), whose identifiers are letters; one token is written for a
    prompt instead of a ranking. Their models were trained for it; others are asked in this package's own words. The
    probability of an identifier is that of all tokens that are it but for white space. Letters make at most 26
    documents in a prompt, numbers 9, as the first token of 12 may be 1.

    A server gives no more than `top_logprobs` log-probabilities, and other tokens may be among them. Documents of
    whose identifiers it gives none are less likely than those of which it does, and nothing tells their order: they are
    counted as left out (`llm_missing`) with a warning, as those that a written ranking does not name. A reply without
    any identifier is a failure (`on_failure`); it would be the same again, so that `retries` are of no use.

    Args:
        top_logprobs: log-probabilities to ask for, at least as many as there are documents in a prompt. OpenAI gives at
            most 20; vLLM as many as its `--max-logprobs`. `HuggingFaceBackend` knows those of all identifiers.
    """

    papers: ClassVar[tuple[str, ...]] = ("reddy-2024-first",)

    top_logprobs: int = argument(20, at_least=1)

    prompt = FIRST_TOKEN_PROMPT
    asks_again = False

    def __post_init__(self) -> None:
        validate(self)

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        check_gives_logprobs(client, f"answer={self!r}")

    def most(self, prompt: Prompt) -> int | None:
        return min(len(names(prompt)), self.top_logprobs)

    def ask(self, client: LLMClient, qid: str, messages: list[Message], prompt: Prompt) -> Reply:
        return client.first_token(qid, messages, names(prompt), self.top_logprobs)

    def parse(self, reply: Reply, n: int, prompt: Prompt) -> ParsedReply | None:
        """Return the order by falling log-probability; documents without one stay behind in their order."""
        values = [logprob(reply.logprobs or {}, name) for name in names(prompt)[:n]]
        known = [document for document, value in enumerate(values) if value > -math.inf]
        if not known:
            return None
        rest = [document for document, value in enumerate(values) if value == -math.inf]
        return ParsedReply([*sorted(known, key=values.__getitem__, reverse=True), *rest], len(rest), 0, 0)

    def unchanged(self, n: int, prompt: Prompt) -> Reply:
        logprobs = {name: -float(rank) for rank, name in enumerate(names(prompt)[:n], 1)}
        return Reply("", output_tokens=1, logprobs=logprobs)


def names(prompt: Prompt) -> str:
    """Return the identifiers of documents that a token can hold; functions are to number them."""
    return string.ascii_uppercase if getattr(prompt, "identifiers", "") == "letters" else string.digits[1:]


def logprob(logprobs: Mapping[str, float], word: str, *, fold: bool = False) -> float:
    """Return the log-probability that a token is a word but for white space, and for case with `fold`; -inf for none.

    Example:
        >>> round(logprob({"A": -1.5, " A": -3.0, "B": -0.5}, "A"), 4)
        -1.2986
    """
    wanted = word.casefold() if fold else word
    stripped = [(token.strip(), value) for token, value in logprobs.items() if value > -math.inf]
    told = [value for token, value in stripped if (token.casefold() if fold else token) == wanted]
    most = max(told, default=-math.inf)
    # Relative to the likeliest: exp(-746) is 0.
    return most + math.log(math.fsum(math.exp(value - most) for value in told)) if told else most


def check_gives_logprobs(client: LLMClient, asked_by: str) -> None:
    """Raise ValueError for a backend that never gives log-probabilities."""
    if not hasattr(client.backend, "first_token"):
        raise ValueError(f"{client.backend!r} gives no log-probabilities, which {asked_by} needs; {LOGPROBS_FROM}")
