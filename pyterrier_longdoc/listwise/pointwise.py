"""Pointwise reranking by a language model: how likely it says yes to a query and a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice, check_given, check_positive
from ..common.citations import papers_of
from ..common.coverage import Coverage
from ..common.documents import is_blank
from ..common.frames import TextField, field_names, strings, texts_of, validated, with_scores
from ..common.notices import Told, warn, warn_of_cuts, warn_of_empty
from ..common.parallel import in_parallel
from ..common.presentation import Presented, changed_arguments
from ..common.progress import counting
from ..modelling.preselection import WindowSelector
from ..modelling.windows import SentenceWindows, Windows
from .answers import check_gives_logprobs, logprob
from .calls import Estimate
from .client import AsksLLM, description
from .evidence import check_selector
from .fitting import Fitting, reader_for
from .messages import IncompleteReplyWarning, Message, UnreadableReplyError, check_fields, clean

YES_NO = """Query: {query}

Document: {text}

Does the document answer the query? Answer with Yes or No and nothing else."""

WORDS = ("Yes", "No", "yes", "no")
"""Tokens that are an answer; another case of them counts too, where a server tells of it."""


@dataclass(eq=False, repr=False)
class Pointwise(AsksLLM, Presented, pt.Transformer):
    """Scores each document by itself: log p(yes) - log p(no) as the first token of a language model's answer.

    Source: Nogueira et al. 2020 (monoT5), who train a model to say true or false; without training as the pointwise
    methods of Zhuang et al. 2023. The wording is this package's own. The likelihood of the query (UPR, Sachan et al.
    2022) cannot be had over chat APIs, which tell nothing of the tokens of a prompt.

    Reads a frame with `qid, query, docno` and the text column(s), and returns the same rows, columns and index with new
    `score` and `rank`; `1 / (1 + exp(-score))` is the share of yes. A document's score depends on no other one. Rows
    with the same query and text are asked about once. An outage ends the run.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend that gives log-probabilities (`OpenAIBackend`,
            `HuggingFaceBackend`), or a function from messages to a `Reply` with `logprobs`.
        request: the wording; must use `{query}` and `{text}` and ask for yes or no.
        top_logprobs: log-probabilities to ask a server for; OpenAI gives at most 20.
        preselect: chooses the passages of a document that are shown, as in `RankGPT`; None shows its beginning.
        windows: the passages that `preselect` chooses from, as in `RankGPT`.
        max_doc_len: show at most so many tokens of a document; None for all.
        max_prompt_tokens: most tokens in a prompt, to which a document is shortened: the model's context less one. None
            leaves it to the server: what it finds too long is shortened by quarters.
        tokenizer: counts tokens: a Hugging Face tokenizer or its name, a tiktoken encoding or a function; None counts
            four characters as one.
        on_failure: if yes or no is not among the log-probabilities: `"raise"`, or `"nan-free-bottom"`: the document
            goes to the bottom of its query, one below the lowest score, or 0 if there is none.
        concurrency: prompts in flight at the same time.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the documents the last `transform` showed; None before.

    Raises:
        ValueError: for a backend that gives no log-probabilities (`AnthropicBackend`), or other arguments that cannot
            work.
    """

    papers: ClassVar[tuple[str, ...]] = ("nogueira-2020-document",)

    llm: Any
    _: KW_ONLY
    request: str = YES_NO
    top_logprobs: int = 20
    preselect: WindowSelector | None = None
    windows: Windows = SentenceWindows(max_tokens=63)  # noqa: RUF009 - frozen
    max_doc_len: int | None = None
    max_prompt_tokens: int | None = None
    tokenizer: Any = None
    on_failure: str = "raise"
    concurrency: int = 1
    text_field: TextField = "text"
    text_loader: Any = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self.warned: Told = set()
        self._check()

    def __repr__(self) -> str:
        hidden = ("llm", "request", "tokenizer", "text_loader", "verbose", "concurrency")
        shown = [repr(self.client.backend), *changed_arguments(self, hidden)]
        shown += ["request=own"] if self.request != YES_NO else []
        return f"{type(self).__name__}({', '.join(shown)})"

    def cited(self) -> list[str]:
        """The papers behind it as it is set up, with those of what chooses the passages that are shown."""
        return [*super().cited(), *papers_of(self.preselect)]

    def describe(self) -> dict[str, Any]:
        """Who this transformer is, JSON-able: the language model by its name and settings, and what it is asked.

        Raises:
            ValueError: if the model is a function, of which it cannot be told whether it stays the same.
        """
        return description(self)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Scores every row.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            NoLogprobsError: if the model answers without log-probabilities.
            UnreadableReplyError: if yes or no is not among them, and `on_failure` is `"raise"`.
            BackendError: if the model cannot be asked. Replies so far are in the cache.
            SpendCapError: if the next call might pass the cap. Replies so far are in the cache.
        """
        pairs = self._pairs(inp)
        if not len(inp):
            return with_scores(inp, [])
        reader = reader_for(self, pairs)
        fitting = Fitting(self._first_token, reader, self._prompt, self.max_prompt_tokens)
        qid_of = dict(zip(reversed(pairs), map(str, reversed(inp["qid"].tolist())), strict=True))

        def score(pair: tuple[str, str], step: Callable[[], None]) -> float:
            step()
            return self._score(qid_of[pair], *pair, fitting)

        with counting(type(self).__name__, "prompt", len(qid_of), shown=self.verbose) as done:
            asked = list(dict.fromkeys(pairs))
            found = dict(zip(asked, in_parallel(score, asked, self.concurrency, on_step=done), strict=True))
        self.coverage = reader.coverage(len({query for query, _ in pairs}))
        self._warn(sum(map(math.isnan, found.values())), len(found))
        warn_of_empty(self, self.coverage, inp, (is_blank(text) for _, text in pairs))
        return with_scores(inp, _failed_at_the_bottom(np.array([found[pair] for pair in pairs]), inp["qid"]))

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """What `transform` of the same frame would take: makes all prompts and asks nothing.

        Args:
            inp: as for `transform`.

        Returns:
            Calls, tokens and cost at the prices of `llm` (None if it has none), with one token for each answer; replies
            in the cache are not deducted. With `preselect` passages are chosen as in a run.
        """
        pairs = self._pairs(inp)
        reader = reader_for(self, pairs)
        fitting = Fitting(lambda qid, messages: messages, reader, self._prompt, self.max_prompt_tokens)
        prompts = [fitting.ask("", query, [text])[1] for query, text in dict.fromkeys(pairs)]
        tokens_in = sum(reader.count_messages(messages) for messages in prompts)
        return self.ledger.estimate(len(prompts), tokens_in, len(prompts))

    def _pairs(self, inp: pd.DataFrame) -> list[tuple[str, str]]:
        """The query and text of each row."""
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        if not len(inp):
            return []
        return list(zip(strings(inp["query"], "query"), texts_of(inp, text_columns, self.text_loader), strict=True))

    def _prompt(self, query: str, texts: Sequence[str]) -> list[Message]:
        return [{"role": "user", "content": self.request.format(query=clean(query), text=clean(texts[0]))}]

    def _first_token(self, qid: str, messages: list[Message]) -> Mapping[str, float]:
        return self.client.first_token(qid, messages, WORDS, self.top_logprobs)

    def _score(self, qid: str, query: str, text: str, fitting: Fitting[Mapping[str, float]]) -> float:
        """Log p(yes) - log p(no); NaN where the model tells nothing of one of them."""
        _, logprobs = fitting.ask(qid, query, [text])
        yes, no = (logprob(logprobs, word, fold=True) for word in ("yes", "no"))
        if math.isfinite(yes) and math.isfinite(no):
            return yes - no
        if self.on_failure == "raise":
            likely = ", ".join(map(repr, sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:5]))
            raise UnreadableReplyError(
                f"query {qid!r}: yes and no are not both among the {len(logprobs)} first tokens of which "
                f"{self.client.backend!r} gives log-probabilities (the likeliest: {likely}). Raise top_logprobs=, "
                f"change request=, or let the run go on with on_failure='nan-free-bottom'"
            )
        return math.nan

    def _warn(self, failed: int, asked: int) -> None:
        if failed:
            warn(
                f"{type(self).__name__}: {failed} of {asked} documents had no log-probability of yes or of no; they "
                f"are at the bottom of their queries (on_failure={self.on_failure!r}).",
                IncompleteReplyWarning,
            )
        if self.coverage is not None and self.coverage.tokens_lost:
            asked_for = [f"{name}={getattr(self, name)}" for name in ("max_doc_len", "max_prompt_tokens")]
            cause = " and ".join(each for each in asked_for if not each.endswith("None")) or "the server"
            warn_of_cuts(self, self.warned, [cause], f" did not read {self.coverage.losses(cause)}")

    def _check(self) -> None:
        """Raises ValueError for arguments that can never work, without asking anything."""
        check_gives_logprobs(self.client, type(self).__name__)
        field_names(self.text_field)
        check_choice("on_failure", self.on_failure, ("raise", "nan-free-bottom"))
        check_selector(self.preselect, self.windows)
        check_given(top_logprobs=self.top_logprobs, concurrency=self.concurrency)
        check_positive(max_doc_len=self.max_doc_len, max_prompt_tokens=self.max_prompt_tokens)
        check_fields("request", self.request, {"query", "text"}, required={"query", "text"})


def _failed_at_the_bottom(scores: np.ndarray, qids: pd.Series) -> np.ndarray:
    """Scores with a number, one below the lowest of its query, for each that is missing."""
    found = pd.Series(scores)
    lowest = found.groupby(qids.to_numpy()).transform("min")
    return found.fillna(lowest - 1).fillna(0.0).to_numpy()
