"""RankGPT: a language model orders groups of documents, which a schedule combines to a ranking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, arguments_of, check_type, validate
from ..common.citations import papers_of
from ..common.coverage import Coverage
from ..common.files import full_name
from ..common.frames import (
    TextField,
    documents,
    field_names,
    first_stage_order,
    strings,
    texts_of,
    validated,
    with_scores,
)
from ..common.key import description
from ..common.language import is_visible
from ..common.parallel import in_parallel
from ..common.presentation import NotebookMixin, changes
from ..common.progress import work_bar
from ..common.warnings import warn, warn_of_coverage, warn_of_queries, warn_of_texts
from ..modelling.excerpts import best_passages
from ..modelling.preselection import WindowSelector, check_preselection
from ..modelling.windows import SentenceWindows, Windows
from .client import AsksLLM
from .parsing import IncompleteReplyWarning
from .prompt_budget import PromptBudget
from .prompts import ListwisePrompt, Prompt
from .ranker import COUNTS, QueryRanking
from .schedules import BackToFront, Schedule


@dataclass(eq=False, repr=False)
class RankGPT(AsksLLM, NotebookMixin, pt.Transformer):
    """Zero-shot listwise reranking by a language model, which orders groups of documents selected by a schedule.

    Source: Sun et al. 2023, whose windows are the schedule `BackToFront`. It reads 512 tokens of each document, the
    FirstP variant of Boytsov et al. 2025; with `max_doc_len=None` all of it, their LongP variant. Prompt and parser are
    this package's.

    The input has `qid, query, docno` and the text column(s). The initial order of a query is by descending `score`,
    ascending `rank`, and order of the rows. Rows, columns and index stay the same, with new `score` (n for the best of
    n documents, n - 1 for the next, ...) and `rank`. Rows with the same docno and text are one document. A reply in
    which the parser finds no ranking is a failure; an outage ends the run.

    Args:
        llm: an `LLMClient` (with a cache and counts of tokens), a backend (`OpenAIBackend`, `HuggingFaceBackend`) or a
            function from a list of `{"role", "content"}` messages to a string.
        schedule: selects the documents of each prompt: `BackToFront(window=20, stride=10)` as in Sun et al. 2023,
            `TopDown()` as in Parry et al. 2024, or your own `Schedule`; all in `pyterrier_longdoc.listwise`.
        top_k: the number of documents to rerank per query; the others keep their order below. None for all.
        preselect: selects at most `k` passages of a document for each query instead of its beginning: `FirstK`,
            `BM25Windows`, `EmbeddingWindows` or `CrossEncoderWindows`. They are in document order, with `[...]` for
            omitted text.
        windows: the passages from which `preselect` selects, in tokens that are words and punctuation marks. Default:
            as many whole sentences as fit into 63 tokens, the size of a block in Li et al. 2023.
        max_doc_len: the maximum number of tokens of a document in a prompt; None for all, at higher cost.
        max_prompt_tokens: the maximum number of tokens in a prompt, including reminders: the model's context minus its
            longest answer. The longest documents of a prompt are truncated to fit; short ones stay whole. None sets no
            limit; if the server refuses a prompt as too long, its documents are shortened by a quarter at a time.
        tokenizer: counts tokens: a Hugging Face tokenizer or its name, or a function of a text; None counts four
            characters as one token.
        prompt: a `ListwisePrompt`, or a function from a query and texts to messages.
        on_failure: what to do if a prompt has no readable reply after all retries: `"raise"`; `"keep"` to ignore the
            prompt (each schedule documents the resulting order); or `"last"` to rank its documents last with score 0
            and leave them out of other prompts.
        retries: the maximum number of further calls after an unreadable reply, each with a reminder of the request.
            There are none after a reply that ended at the limit of tokens before its answer, or that only has
            reasoning or tool calls.
        shuffles: the number of random orders in which each group is presented; the ranks are averaged (permutation
            self-consistency, Tang et al. 2024). 0 presents each group once, in the given order.
        seed: the random seed of the shuffles.
        concurrency: the number of prompts sent at the same time, for several queries or one round of a schedule.
        text_field: the column with the text, or a tuple of columns, joined by a space.
        text_loader: loads the text if the column is missing.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the documents was in the prompts of the last `transform`; None before.
        counts: one row per query of the last `transform`, with `qid`; `llm_prompts`; `llm_rounds`, which depend on each
            other; `llm_missing` documents left out of replies, which keep their order below the others;
            `llm_duplicates`, repeated documents; `llm_unknown` ids; `llm_refusals`, replies without a readable ranking;
            `llm_retries`, calls after those; and `llm_failed` prompts without a readable reply. None before.

    Example:
        `bm25 >> ld.RankGPT(ld.LLMClient(ld.OpenAIBackend("gpt-4.1-mini"), cache="replies.db"))`
    """

    papers: ClassVar[tuple[str, ...]] = ("sun-2023-is",)

    llm: Any = argument(role="checkpoint")
    _: KW_ONLY
    schedule: Schedule = argument(BackToFront(), role="head")
    top_k: int | None = argument(100, role="head", at_least=1)
    preselect: WindowSelector | None = argument(None, role="windows")
    windows: Windows = argument(SentenceWindows(max_tokens=63), role="windows")
    max_doc_len: int | None = argument(512, role="windows", at_least=1)
    max_prompt_tokens: int | None = argument(None, role="windows", at_least=1)
    tokenizer: Any = argument(None, role="input")
    prompt: Prompt = argument(ListwisePrompt(), role="input")
    on_failure: str = argument("raise", role="head", choices=("raise", "keep", "last"))
    retries: int = argument(2, role="head", at_least=0)
    shuffles: int = argument(0, role="head", at_least=0)
    seed: int = argument(42, role="head")
    concurrency: int = argument(1, role="computing", at_least=1)
    text_field: TextField = argument("text", role="input")
    text_loader: Any = argument(None, role="call")
    verbose: bool = argument(False, role="call")

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self.counts: pd.DataFrame | None = None
        self.warned: set[str] = set()
        self._check()

    def __repr__(self) -> str:
        parts = [repr(self.client.backend)]
        parts += changes(self, hidden=("llm", "tokenizer", "text_loader", "verbose", "concurrency"))
        return f"{type(self).__name__}({', '.join(parts)})"

    def cited(self) -> list[str]:
        """Return the papers of the passage selector, the schedule and the shuffles."""
        shuffled = ["tang-2024-found"] if self.shuffles else []
        return [*super().cited(), *papers_of(self.preselect, self.schedule), *shuffled]

    def describe(self) -> dict[str, Any]:
        """Return a JSON description that identifies this transformer: name and settings of the model, arguments."""
        backend, values = self.client.backend, arguments_of(self, "head", "windows", "input")
        return {
            "model": backend.model,
            "settings": dict(backend.settings),
            "backend": description(backend if hasattr(backend, "describe") else type(backend)),
            "arguments": {name: description(value) for name, value in values.items()},
        }

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with new `score` and `rank`, without columns that belong to earlier scores.

        Raises:
            ValueError: for invalid arguments, or a qid with several queries.
            UnreadableReplyError: for a reply without a ranking, if `on_failure` is `"raise"`.
            BackendError: if the model gives no reply. Replies so far stay in the cache.
        """
        columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        if not len(inp):
            return with_scores(inp, [])
        queries, texts = strings(inp["query"], "query"), texts_of(inp, columns, self.text_loader)
        warn_of_queries(self, queries)
        warn_of_texts(self, inp, documents(texts))
        rankings = self._rankings(inp, texts)
        most = {ranking.qid: self.schedule.estimate(len(ranking.texts)) * max(self.shuffles, 1) for ranking in rankings}
        budget = self._budget(rankings)
        with work_bar(type(self).__name__, "prompt", sum(most.values()), shown=self.verbose) as bar:
            in_parallel(
                lambda ranking, run_all: ranking.rank(budget, run_all),
                rankings,
                self.concurrency,
                on_task=bar.update,
                # Advance by the maximum number of prompts, even if a query needs fewer.
                on_done=lambda ranking, _: bar.update(most[ranking.qid] - ranking.counts["prompts"]),
            )
        scores = np.zeros(len(inp))
        for ranking in rankings:
            for rank, document in enumerate([*ranking.order, *range(len(ranking.texts), len(ranking.rows))]):
                scores[ranking.rows[document]] = len(ranking.rows) - rank
        rows = [[ranking.qid, *(ranking.counts[name] for name in COUNTS)] for ranking in rankings]
        self.counts = pd.DataFrame(rows, columns=["qid", *(f"llm_{name}" for name in COUNTS)])
        self._warn_of_failures(self.counts, next((each.failure for each in rankings if each.failure), ""))
        self.coverage = coverage = budget.coverage(inp["query"].nunique(dropna=False))
        coverage.add_rows(inp["qid"], *([not is_visible(text) for text in column] for column in (queries, texts)))
        warn_of_coverage(self, coverage)
        return with_scores(inp, scores)

    def _budget(self, rankings: list[QueryRanking]) -> PromptBudget:
        """Return the budget that builds the prompts of a run; passages are selected before threads start."""
        passages = None
        if self.preselect is not None:
            pairs = list(dict.fromkeys((ranking.query, text) for ranking in rankings for text in ranking.texts))
            with work_bar(type(self).__name__, "document", len(pairs), shown=self.verbose) as bar:
                passages = best_passages(self.preselect, self.windows, pairs, on_pairs=bar.update)
        return PromptBudget(self, passages)

    def _rankings(self, inp: pd.DataFrame, texts: list[str]) -> list[QueryRanking]:
        """Return the documents to rank for each query, in the order of the first stage: score, rank, row."""
        queries = strings(inp["query"], "query")
        qids, docnos = inp["qid"].tolist(), inp["docno"].tolist()
        rows_of: dict[Any, list[int]] = {qid: [] for qid in qids}
        for row in first_stage_order(inp).tolist():
            rows_of[qids[row]].append(row)
        rankings = []
        for qid, rows in rows_of.items():
            if len({queries[row] for row in rows}) > 1:
                raise ValueError(f"qid {qid!r} must have the same text in column 'query' in all rows")
            documents: dict[tuple[Any, str], list[int]] = {}
            for row in rows:
                documents.setdefault((docnos[row], texts[row]), []).append(row)
            top_texts = [text for _, text in documents][: self.top_k]
            rankings.append(QueryRanking(self, qid, queries[rows[0]], top_texts, list(documents.values())))
        return rankings

    def _check(self) -> None:
        """Raise ValueError for invalid arguments; the model is not called."""
        _ = self.client  # checks `llm`
        validate(self)
        self.tokenizer = full_name(self.tokenizer)
        field_names(self.text_field)
        check_type(Windows, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        check_preselection(self.preselect, self.windows)
        check_type(Schedule, "a schedule, e.g. BackToFront(20, 10)", schedule=self.schedule)
        check_type(Callable, "a ListwisePrompt, or a function of a query and texts", prompt=self.prompt)

    def _warn_of_failures(self, counts: pd.DataFrame, failure: str) -> None:
        total, problems = counts.drop(columns="qid").sum(), []
        if total["llm_failed"]:
            problems.append(
                f"{total['llm_failed']} of {total['llm_prompts']} prompts had no readable reply "
                f"(on_failure={self.on_failure!r}; {failure})"
            )
        if total["llm_missing"]:
            problems.append(
                f"replies left out {total['llm_missing']} documents, which keep their order below the others"
            )
        if problems:
            incomplete = (counts["llm_failed"] + counts["llm_missing"] > 0).sum()
            warn(
                f"{type(self).__name__}: in {incomplete} of {len(counts)} queries, {', and '.join(problems)} "
                f"(see .counts).",
                IncompleteReplyWarning,
            )
