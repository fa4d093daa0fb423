"""How a model answers which of some documents are best: by naming all in order, or by its first token alone."""

from __future__ import annotations

import json
import math
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.arguments import check_given, plain_fields
from ..common.citations import Cited
from ..common.presentation import ShowsChanges
from .backends import FirstTokenBackend
from .client import LOGPROBS_FROM, LLMClient
from .messages import ListwisePrompt, Message, ParsedReply, Prompt, parse_ranking

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

Ask = Callable[[str, list[Message]], str]
"""`(qid, messages) -> text of the reply`."""


class AnswerForm(Cited, ABC):
    """How a model is asked for an order of documents, and how its order is read.

    Attributes:
        prompt: what is asked where `RankGPT` is given no prompt.
        asks_again: whether another call may help where a reply cannot be read.
    """

    prompt: ListwisePrompt
    asks_again: bool

    @abstractmethod
    def check(self, client: LLMClient, prompt: Prompt) -> None:
        """Raises ValueError for a model or a prompt that this form cannot be had from, without asking anything."""

    @abstractmethod
    def most(self, prompt: Prompt) -> int | None:
        """Most documents in a prompt; None for no limit."""

    @abstractmethod
    def ask(self, client: LLMClient, prompt: Prompt) -> Ask:
        """What asks the model, and gives its reply as a text that `parse` reads."""

    @abstractmethod
    def parse(self, reply: str, n: int, prompt: Prompt) -> ParsedReply | None:
        """The order of `n` documents; None for a reply that holds none."""

    @abstractmethod
    def unchanged(self, n: int, prompt: Prompt) -> str:
        """A reply that leaves `n` documents in their order."""

    @abstractmethod
    def written(self, reply: str, count: Callable[[str], int]) -> int:
        """Tokens that the model writes for such a reply."""


@dataclass(frozen=True, repr=False)
class Permutation(ShowsChanges, AnswerForm):
    """The model writes the numbers of all documents, best first: `[2] > [1]`; any model can. Sun et al. 2023."""

    prompt = ListwisePrompt()
    asks_again = True

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        """Refuses a prompt that names documents by letters."""
        if identifiers(prompt) == "letters":
            raise ValueError(
                "a prompt with identifiers='letters' is for answer=FirstToken(); orders are read from numbers"
            )

    def most(self, prompt: Prompt) -> int | None:
        """No limit."""
        return None

    def ask(self, client: LLMClient, prompt: Prompt) -> Ask:
        """Asks for a text."""
        return client.ask

    def parse(self, reply: str, n: int, prompt: Prompt) -> ParsedReply | None:
        """As `parse_ranking`."""
        return parse_ranking(reply, n)

    def unchanged(self, n: int, prompt: Prompt) -> str:
        """All numbers in their order."""
        return " > ".join(f"[{number}]" for number in range(1, n + 1))

    def written(self, reply: str, count: Callable[[str], int]) -> int:
        """All tokens of the text."""
        return count(reply)


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

    Raises:
        ValueError: for less than one.
    """

    papers: ClassVar[tuple[str, ...]] = ("reddy-2024-first",)

    top_logprobs: int = 20

    prompt = FIRST_TOKEN_PROMPT
    asks_again = False

    def __post_init__(self) -> None:
        plain_fields(self)
        check_given(top_logprobs=self.top_logprobs)

    def check(self, client: LLMClient, prompt: Prompt) -> None:
        """Refuses a model that gives no log-probabilities."""
        check_gives_logprobs(client, f"answer={self!r}")

    def most(self, prompt: Prompt) -> int | None:
        """As many as there are identifiers of one token, and log-probabilities."""
        return min(len(names(prompt)), self.top_logprobs)

    def ask(self, client: LLMClient, prompt: Prompt) -> Ask:
        """Asks for the log-probabilities of first tokens, as JSON."""

        def ask(qid: str, messages: list[Message]) -> str:
            return json.dumps(dict(client.first_token(qid, messages, names(prompt), self.top_logprobs)))

        return ask

    def parse(self, reply: str, n: int, prompt: Prompt) -> ParsedReply | None:
        """By falling log-probability; those without one in their order behind."""
        told = [logprob(json.loads(reply), name) for name in names(prompt)[:n]]
        known = [document for document, value in enumerate(told) if value > -math.inf]
        if not known:
            return None
        rest = [document for document, value in enumerate(told) if value == -math.inf]
        return ParsedReply([*sorted(known, key=told.__getitem__, reverse=True), *rest], len(rest), 0, 0)

    def unchanged(self, n: int, prompt: Prompt) -> str:
        """Log-probabilities that fall."""
        return json.dumps({name: -float(rank) for rank, name in enumerate(names(prompt)[:n], 1)})

    def written(self, reply: str, count: Callable[[str], int]) -> int:
        """One."""
        return 1


def identifiers(prompt: Prompt) -> str:
    """What documents are called in a prompt, `"letters"` or `"numbers"`; functions are to number them."""
    return getattr(prompt, "identifiers", "numbers")


def names(prompt: Prompt) -> str:
    """Identifiers of documents that a token can hold."""
    return string.ascii_uppercase if identifiers(prompt) == "letters" else string.digits[1:]


def logprob(logprobs: Mapping[str, float], word: str, *, fold: bool = False) -> float:
    """The log-probability that a token is a word but for white space, and for case with `fold`; -inf if none is.

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
    """Raises ValueError for a backend that never gives log-probabilities."""
    if not isinstance(client.backend, FirstTokenBackend):
        raise ValueError(f"{client.backend!r} gives no log-probabilities, which {asked_by} needs; {LOGPROBS_FROM}")
