"""Pointwise reranking by a language model that reasons before its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..common.arguments import argument
from .answer_forms import logprob
from .backends import Reply
from .parsing import find_verdict
from .pointwise import Pointwise
from .prompts import Message

TRUE_FALSE = """Query: {query}

Passage: {text}

Is the passage relevant to the query? Think about it first. Then answer with true or false and nothing else."""

REASONED_GRADE = """Query: {query}

Passage: {text}

How relevant is the passage to the query, from 0 (not at all) to {best} (fully)? Think about it first. Then answer \
with one number and nothing else."""


@dataclass(eq=False, repr=False)
class ReasonedPointwise(Pointwise):
    """Scores each document separately by the verdict that a language model writes after its reasoning.

    Source: Rank1 (Weller et al. 2025, arXiv 2502.18418). The model writes `<think>...</think>` and then true or false,
    or a grade; the prompt is this package's. The verdict is what follows the last closing tag, or is inside the last
    `<answer>`. The score is log p(true) - log p(false) at the token of the verdict, or the expected grade. It is 1 for
    true and -1 for false, or the grade itself, if the backend returns no log-probabilities or the verdict is no single
    token of the model.

    Reasoning takes hundreds of tokens for each document: raise the backend's limit, e.g.
    `parameters={"max_tokens": 4096}` (`max_new_tokens` for `HuggingFaceBackend`), and keep the replies in the cache of
    an `LLMClient`. Stop strings belong there, too: `stop`, or `stop_strings` for `HuggingFaceBackend`. They must not
    contain the verdict, because servers remove them from the reply.

    Args:
        llm: an `LLMClient`, a backend, or a function from messages to a text, or to a `Reply` whose `logprobs` are
            those of the verdict.
        request: the prompt; it must contain `{query}` and `{text}` and ask for true or false, or for a grade from 0
            to `{best}`.
        words: the verdicts for a relevant document and for another one.
        top_logprobs: as for `Pointwise`; a verdict that is not among them counts as the least likely of them.
        on_failure: what to do with a reply without a verdict, such as one that ended at the limit of tokens: `"raise"`,
            or `"last"` to score the document one below the lowest score of its query.
        grades, preselect, windows, max_doc_len, tokenizer, concurrency, text_field, text_loader, verbose: as for
            `Pointwise`.
        max_prompt_tokens: as for `RankGPT`; the model's context minus its longest reasoning.

    Attributes:
        coverage: how much of the documents was in the prompts of the last `transform`; None before.

    Example:
        `bm25 >> ld.ReasonedPointwise(ld.OpenAIBackend("qwen3", base_url=..., parameters={"max_tokens": 4096}))`
    """

    papers: ClassVar[tuple[str, ...]] = ("weller-2025-rank",)
    requests: ClassVar[tuple[str, str]] = (TRUE_FALSE, REASONED_GRADE)
    _lacking: ClassVar[str] = "no verdict"

    _: KW_ONLY
    request: str = argument(TRUE_FALSE, role="input")
    words: tuple[str, str] = argument(("true", "false"), role="head", needs={"grades": None})

    @property
    def _answers(self) -> Sequence[str]:
        return super()._answers if self.grades else self.words

    def _ask(self, qid: str, messages: list[Message]) -> Reply:
        return self.client.verdict(qid, messages, self._answers, self.top_logprobs)

    def _value(self, reply: Reply) -> float:
        answers = self._answers
        verdict = None if reply.problem else find_verdict(reply.text, answers)
        if verdict is None:
            return math.nan
        logprobs = {token: value for token, value in (reply.logprobs or {}).items() if math.isfinite(value)}
        number, found = answers.index(verdict[0]), [logprob(logprobs, word, fold=True) for word in answers]
        if math.isfinite(found[number]):
            least = min(logprobs.values())
            return self._combined([max(value, least) for value in found])
        return float(number) if self.grades else 1.0 - 2.0 * number

    def _failure(self, reply: Reply) -> str:
        problem = reply.problem or repr(reply.text[-200:])
        return f"no verdict in the reply: {problem}. Change request=, raise the backend's limit of tokens"

    def _check(self) -> None:
        super()._check()
        words = self.words
        is_pair = isinstance(words, tuple | list) and len(words) == 2
        is_pair = is_pair and all(isinstance(word, str) and word.isalnum() for word in words)
        if not is_pair or words[0].casefold() == words[1].casefold():
            raise ValueError(f"words={words!r} must be two words, such as ('true', 'false')")

    def _check_backend(self) -> None:
        """Allow any backend: without log-probabilities, the verdict itself is the score."""
