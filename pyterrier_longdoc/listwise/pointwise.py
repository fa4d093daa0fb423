"""Pointwise reranking by a language model: the probability of answering yes to a query and a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from scipy.special import softmax

from ..common.arguments import argument
from ..common.frames import strings, with_scores
from ..common.parallel import in_parallel
from ..common.progress import work_bar
from ..common.warnings import warn
from .answer_forms import check_gives_logprobs, logprob
from .backends import Reply
from .llm_reranker import LLMReranker
from .parsing import IncompleteReplyWarning, UnreadableReplyError
from .prompt_budget import PromptBudget
from .prompts import Message, check_template, clean

YES_NO = """Query: {query}

Document: {text}

Does the document answer the query? Answer with Yes or No and nothing else."""

GRADED = """Query: {query}

Document: {text}

How well does the document answer the query, from 0 (not at all) to {best} (fully)? Answer with one number and nothing \
else."""

WORDS = ("Yes", "No", "yes", "no")
"""Tokens of an answer; other letter cases count too if a server returns their log-probabilities."""


@dataclass(eq=False, repr=False)
class Pointwise(LLMReranker):
    """Scores each document separately: log p(yes) - log p(no) for the first token of a language model's answer.

    Source: Nogueira et al. 2020 (monoT5), who train a model to answer true or false, and Zhuang et al. 2023, who do not
    train it. The prompt is this package's. Query likelihood (UPR, Sachan et al. 2022) is not available, because chat
    APIs do not return log-probabilities of the prompt. With `grades`, the score is the expected grade (Zhuang et al.
    2024, "Beyond Yes and No").

    The input has `qid, query, docno` and the text column(s). Rows, columns and index stay the same, with new `score`
    and `rank`; `1 / (1 + exp(-score))` is the share of yes. The score of a document does not depend on other documents.
    Rows with the same query and text share one prompt. An outage ends the run.

    Args:
        llm: an `LLMClient` (with a cache and counts of tokens), a backend with log-probabilities (`OpenAIBackend`,
            `HuggingFaceBackend`), or a function from messages to a `Reply` with `logprobs`.
        request: the prompt; it must contain `{query}` and `{text}` and ask for yes or no, or for a grade from 0 to
            `{best}`.
        grades: the number of grades, from 0. The score is the mean grade, weighted by probability.
        top_logprobs: the number of log-probabilities to request from a server; OpenAI returns at most 20.
        preselect, windows, max_doc_len, tokenizer, concurrency, text_field, text_loader, verbose: as for `RankGPT`.
        max_prompt_tokens: as for `RankGPT`; the model's context minus one.
        on_failure: what to do if yes or no is not among the log-probabilities: `"raise"`, or `"last"` to
            score the document one below the lowest score of its query (0 if there is none).

    Attributes:
        coverage: how much of the documents was in the prompts of the last `transform`; None before.

    Example:
        `bm25 >> ld.Pointwise(ld.HuggingFaceBackend("Qwen/Qwen2.5-7B-Instruct"))`
    """

    papers: ClassVar[tuple[str, ...]] = ("nogueira-2020-document",)
    requests: ClassVar[tuple[str, str]] = (YES_NO, GRADED)
    """The default prompts: for two words, and for grades."""
    _lacking: ClassVar[str] = "no log-probability of an answer"

    _: KW_ONLY
    request: str = argument(YES_NO, role="input")
    grades: int | None = argument(None, role="head", at_least=2, at_most=10)
    top_logprobs: int = argument(20, role="head", at_least=1)
    on_failure: str = argument("raise", role="head", choices=("raise", "last"))

    def cited(self) -> list[str]:
        """Return the papers of this transformer, its grades and its passage selector."""
        return [*super().cited(), *(["zhuang-2024-beyond"] if self.grades else [])]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with new `score` and `rank`, without columns that belong to earlier scores.

        Raises:
            UnreadableReplyError: if yes or no is not among them, and `on_failure` is `"raise"`.
            BackendError: if the model gives no reply, or none with log-probabilities.
        """
        texts = self._texts(inp)
        if not texts:
            return with_scores(inp, [])
        pairs = list(zip(strings(inp["query"], "query"), texts, strict=True))
        budget = self._budget(self._prompt, pairs)
        qid_of = dict(zip(reversed(pairs), map(str, reversed(inp["qid"].tolist())), strict=True))

        distinct_pairs = list(dict.fromkeys(pairs))
        with work_bar(type(self).__name__, "prompt", len(distinct_pairs), shown=self.verbose) as bar:
            values = in_parallel(
                lambda pair, _: self._score(qid_of[pair], *pair, budget),
                distinct_pairs,
                self.concurrency,
                on_done=lambda *_: bar.update(),
            )
        score_of = dict(zip(distinct_pairs, values, strict=True))
        if failures := sum(map(math.isnan, score_of.values())):
            warn(
                f"{type(self).__name__}: {failures} of {len(score_of)} documents have {self._lacking} and are ranked "
                f"last for their queries (on_failure={self.on_failure!r}).",
                IncompleteReplyWarning,
            )
        self._note_coverage(budget, inp, texts)
        scores = pd.Series([score_of[pair] for pair in pairs])
        lowest = scores.groupby(inp["qid"].to_numpy()).transform("min")
        return with_scores(inp, scores.fillna(lowest - 1).fillna(0.0).to_numpy())

    def _prompt(self, query: str, texts: Sequence[str]) -> list[Message]:
        binary, graded = self.requests
        request = graded if self.grades and self.request == binary else self.request
        values = {"query": clean(query), "text": clean(texts[0]), "best": (self.grades or 2) - 1}
        return [{"role": "user", "content": request.format(**values)}]

    @property
    def _answers(self) -> Sequence[str]:
        """The answers that count: grades, or yes and no."""
        return [str(grade) for grade in range(self.grades)] if self.grades else ("yes", "no")

    def _score(self, qid: str, query: str, text: str, budget: PromptBudget) -> float:
        """Return log p(yes) - log p(no), or the expected grade; NaN without an answer."""
        reply = budget.ask(lambda messages: self._ask(qid, messages), query, [text])
        value = self._value(reply)
        if math.isnan(value) and self.on_failure == "raise":
            raise UnreadableReplyError(f"query {qid!r}: {self._failure(reply)}, or set on_failure='last' to continue")
        return value

    def _ask(self, qid: str, messages: list[Message]) -> Reply:
        words = self._answers if self.grades else WORDS
        return self.client.first_token(qid, messages, words, self.top_logprobs)

    def _value(self, reply: Reply) -> float:
        """Return the score in a reply; NaN if there is none."""
        found = [logprob(reply.logprobs or {}, word, fold=True) for word in self._answers]
        needed = any if self.grades else all
        return self._combined(found) if needed(map(math.isfinite, found)) else math.nan

    def _combined(self, logprobs: Sequence[float]) -> float:
        """Return the expected grade, or the difference of the log-probabilities of two words."""
        if not self.grades:
            return logprobs[0] - logprobs[1]
        shares = softmax(logprobs)
        return float(shares @ np.arange(len(shares)))

    def _failure(self, reply: Reply) -> str:
        """Return why a reply has no score, and what to do."""
        logprobs = reply.logprobs or {}
        likely = ", ".join(map(repr, sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:5]))
        return (
            f"{'no grade is' if self.grades else 'yes and no are not both'} among the {len(logprobs)} first tokens "
            f"with log-probabilities of {self.client.backend!r} (most likely: {likely}). Raise top_logprobs=, change "
            f"request="
        )

    def _check(self) -> None:
        super()._check()
        self._check_backend()
        allowed = {"query", "text", *(["best"] if self.grades else [])}
        check_template("request", self.request, allowed, required={"query", "text"})

    def _check_backend(self) -> None:
        check_gives_logprobs(self.client, type(self).__name__)
