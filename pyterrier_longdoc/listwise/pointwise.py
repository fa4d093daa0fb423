"""Pointwise reranking by a language model: how likely it says yes to a query and a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from ..common.arguments import argument
from ..common.frames import strings, with_scores
from ..common.parallel import RunAll, in_parallel
from ..common.progress import work_bar
from ..common.warnings import warn
from .answer_forms import check_gives_logprobs, logprob
from .backends import Reply
from .costs import Estimate
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
"""Tokens of an answer; other cases of them count too, where a server gives their log-probabilities."""


@dataclass(eq=False, repr=False)
class Pointwise(LLMReranker):
    """Scores each document by itself: log p(yes) - log p(no) as the first token of a language model's answer.

    Source: Nogueira et al. 2020 (monoT5), who train a model to say true or false; Zhuang et al. 2023 do it without
    training. The wording is this package's own. The likelihood of the query (UPR, Sachan et al. 2022) needs
    log-probabilities of the prompt, which chat APIs do not give. With `grades` the score is the expected grade (Zhuang
    et al. 2024, "Beyond Yes and No").

    Reads a frame with `qid, query, docno` and the text column(s), and returns the same rows, columns and index with new
    `score` and `rank`; `1 / (1 + exp(-score))` is the share of yes. A document's score depends on no other document.
    Rows with the same query and text share one prompt. An outage ends the run.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend that gives log-probabilities (`OpenAIBackend`,
            `HuggingFaceBackend`), or a function from messages to a `Reply` with `logprobs`.
        request: the wording; must use `{query}` and `{text}` and ask for yes or no, or for a grade from 0 to `{best}`.
        grades: how many grades to ask for, from 0: the score is their mean, weighted by their probabilities.
        top_logprobs: log-probabilities to ask a server for; OpenAI gives at most 20.
        preselect, windows, max_doc_len, tokenizer, concurrency, text_field, text_loader, verbose: as for `RankGPT`.
        max_prompt_tokens: most tokens in a prompt, to which a document is shortened: the model's context less one. None
            sets no limit: documents of a prompt that the server refuses as too long are shortened by quarters.
        on_failure: if yes or no is not among the log-probabilities: `"raise"`, or `"nan-free-bottom"`: the document
            goes to the bottom of its query, one below the lowest score, or 0 if there is none.

    Attributes:
        coverage: how much of the documents the last `transform` put into prompts; None before.

    Example:
        `bm25 >> ld.Pointwise(ld.HuggingFaceBackend("Qwen/Qwen2.5-7B-Instruct"))`
    """

    papers: ClassVar[tuple[str, ...]] = ("nogueira-2020-document",)

    _: KW_ONLY
    request: str = argument(YES_NO, role="input")
    grades: int | None = argument(None, role="head", at_least=2, at_most=10)
    top_logprobs: int = argument(20, role="head", at_least=1)
    on_failure: str = argument("raise", role="head", choices=("raise", "nan-free-bottom"))

    def cited(self) -> list[str]:
        """Return the papers behind this transformer, its grades and its selector of passages."""
        return [*super().cited(), *(["zhuang-2024-beyond"] if self.grades else [])]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with the same rows, order, index and columns, and `score` and `rank`.

        Columns that explain an earlier model's scores are left out.

        Raises:
            NoLogprobsError: if the model answers without log-probabilities.
            UnreadableReplyError: if yes or no is not among them, and `on_failure` is `"raise"`; else as `RankGPT`.
        """
        pairs = self._pairs(inp)
        if not pairs:
            return with_scores(inp, [])
        budget = self._budget(self._prompt, pairs)
        qid_of = dict(zip(reversed(pairs), map(str, reversed(inp["qid"].tolist())), strict=True))

        def score(pair: tuple[str, str], run_all: RunAll) -> float:
            (value,) = run_all([partial(self._score, qid_of[pair], *pair, budget)])
            return float(value)

        with work_bar(type(self).__name__, "prompt", len(qid_of), shown=self.verbose) as bar:
            distinct_pairs = list(dict.fromkeys(pairs))
            values = in_parallel(score, distinct_pairs, self.concurrency, on_task=bar.update)
        score_of = dict(zip(distinct_pairs, values, strict=True))
        if failures := sum(map(math.isnan, score_of.values())):
            warn(
                f"{type(self).__name__}: {failures} of {len(score_of)} documents had no log-probability of an answer "
                f"and are at the bottom of their queries (on_failure={self.on_failure!r}).",
                IncompleteReplyWarning,
            )
        self._note_coverage(budget, inp, [text for _, text in pairs])
        return with_scores(inp, _failures_at_the_bottom(np.array([score_of[pair] for pair in pairs]), inp["qid"]))

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """Return an estimate of `transform`, as `RankGPT.estimate` does, with one token for each answer."""
        pairs = self._pairs(inp)
        budget = self._budget(self._prompt, pairs)
        no_reply = Reply("")
        prompts = [budget.ask(lambda messages: no_reply, query, [text])[0] for query, text in dict.fromkeys(pairs)]
        return self.ledger.estimate(len(prompts), sum(map(budget.count_messages, prompts)), len(prompts))

    def _pairs(self, inp: pd.DataFrame) -> list[tuple[str, str]]:
        """Return the query and text of each row."""
        texts = self._texts(inp)
        return list(zip(strings(inp["query"], "query"), texts, strict=True))

    def _prompt(self, query: str, texts: Sequence[str]) -> list[Message]:
        request = GRADED if self.grades and self.request == YES_NO else self.request
        values = {"query": clean(query), "text": clean(texts[0]), "best": (self.grades or 2) - 1}
        return [{"role": "user", "content": request.format(**values)}]

    def _score(self, qid: str, query: str, text: str, budget: PromptBudget) -> float:
        """Return log p(yes) - log p(no), or the expected grade; NaN if the model does not give what that needs."""
        digits = [str(grade) for grade in range(self.grades or 0)]

        def send(messages: list[Message]) -> Reply:
            return self.client.first_token(qid, messages, digits or WORDS, self.top_logprobs)

        logprobs = budget.ask(send, query, [text])[1].logprobs or {}
        found = np.array([logprob(logprobs, word, fold=True) for word in digits or ("yes", "no")])
        if digits and np.isfinite(found).any():
            shares = np.exp(found - found.max())
            return float(shares @ np.arange(len(digits)) / shares.sum())
        if np.isfinite(found).all():
            return float(found[0] - found[1])
        if self.on_failure == "raise":
            likely = ", ".join(map(repr, sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:5]))
            raise UnreadableReplyError(
                f"query {qid!r}: {'no grade is' if digits else 'yes and no are not both'} among the {len(logprobs)} "
                f"first tokens of which {self.client.backend!r} gives log-probabilities (the likeliest: {likely}). "
                f"Raise top_logprobs=, change request=, or let the run go on with on_failure='nan-free-bottom'"
            )
        return math.nan

    def _check(self) -> None:
        super()._check()
        check_gives_logprobs(self.client, type(self).__name__)
        allowed = {"query", "text", *(["best"] if self.grades else [])}
        check_template("request", self.request, allowed, required={"query", "text"})


def _failures_at_the_bottom(scores: np.ndarray, qids: pd.Series) -> np.ndarray:
    """Return the scores, and for NaN a score one below the lowest of its query."""
    values = pd.Series(scores)
    lowest = values.groupby(qids.to_numpy()).transform("min")
    return values.fillna(lowest - 1).fillna(0.0).to_numpy()
