"""RankGPT: a language model puts lists of documents in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import arguments_of, check_choice, check_given, check_positive
from ..common.coverage import Coverage
from ..common.frames import TextField, field_names, strings, texts_of, validated, with_scores
from ..common.notices import Told, warn, warn_of_cuts
from ..common.parallel import in_parallel
from ..common.presentation import Presented, changed_arguments, described
from ..common.progress import counting
from .backends import CallableBackend
from .calls import Estimate
from .client import AsksLLM
from .messages import DocumentReader, IncompleteReplyWarning, ListwisePrompt, Message, Prompt
from .schedules import COUNTS, ON_FAILURE, Ask, BackToFront, ListRanker

REPORT_COLUMNS = tuple(f"llm_{name}" for name in COUNTS)


@dataclass(frozen=True, eq=False)
class Candidates:
    """The documents of one query, best first: the texts of the `top_k` to be ranked, and the rows of each of all."""

    qid: Any
    query: str
    texts: list[str]
    rows: list[list[int]]


@dataclass(eq=False, repr=False)
class RankGPT(AsksLLM, Presented, pt.Transformer):
    """Zero-shot listwise reranking by a language model, in lists from the back of the ranking to its front.

    Source: Sun et al. 2023, who call the lists windows; lists that do not divide the ranking evenly also reach its top.
    A FirstP variant reads `max_doc_len=512` of each document, a LongP variant (`None`) all of it, as in Boytsov et al.
    2025. Prompt wording and parser are this package's own.

    Reads a frame with `qid, query, docno` and the text column(s); within a query documents are taken by falling
    `score`, then rising `rank`, then in the order of the rows. Returns the same rows, columns and index with new
    `score` (n for the best of n documents, n - 1 for the next, ...) and `rank`. Rows with the same docno and text are
    one document. A reply that holds no ranking is a failure, never an order of documents; an outage ends the run.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend (`OpenAIBackend`, `AnthropicBackend`,
            `HuggingFaceBackend`) or a function from a list of `{"role", "content"}` messages to a string.
        list_size: most documents in a prompt; 20 in Sun et al. 2023.
        step: documents from one list to the next; 10 in Sun et al. 2023. The best `list_size - step` of all end on
            top, if the model orders each list rightly.
        top_k: rerank the best so many documents of a query; the others keep their order below. None for all.
        max_doc_len: show at most so many tokens of a document; None for all.
        max_prompt_tokens: most tokens in a prompt: the model's context less its longest answer. The longest documents
            of a prompt are shortened to it. None leaves it to the server: what it finds too long is shortened by
            quarters.
        tokenizer: counts tokens: a Hugging Face tokenizer or its name, a tiktoken encoding or a function; None counts
            four characters as one.
        prompt: a `ListwisePrompt`, or a function from a query and texts to messages.
        on_failure: if a list has no readable reply after all retries: `"raise"`; `"keep"` its order; or
            `"nan-free-bottom"`: its documents go to the bottom of the query, all with score 0.
        retries: further calls after an unreadable reply, each with a reminder of what was asked.
        shuffles: ask about each list so many times in random orders and average the ranks (permutation
            self-consistency, Tang et al. 2024); 0 asks once, in the given order.
        seed: of the shuffles.
        concurrency: queries in flight at the same time.
        report: add columns with what happened to the row's query: `llm_prompts` asked for an order, `llm_missing`
            documents were not named in replies and kept their order behind the others, `llm_duplicates` were named
            again, `llm_unknown` ids were no document's, `llm_refusals` were replies without a readable ranking,
            `llm_retries` calls because of those, and `llm_failed` prompts had no readable reply in the end.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the shown documents the last `transform` showed; None before.
        counts: one row per query of the last `transform`: `qid` and the columns of `report`; None before.
    """

    papers: ClassVar[tuple[str, ...]] = ("sun-2023-is",)

    llm: Any
    _: KW_ONLY
    list_size: int = 20
    step: int = 10
    top_k: int | None = 100
    max_doc_len: int | None = None
    max_prompt_tokens: int | None = None
    tokenizer: Any = None
    prompt: Prompt = ListwisePrompt()  # noqa: RUF009 - frozen
    on_failure: str = "raise"
    retries: int = 2
    shuffles: int = 0
    seed: int = 42
    concurrency: int = 1
    report: bool = False
    text_field: TextField = "text"
    text_loader: Any = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self.counts: pd.DataFrame | None = None
        self.warned: Told = set()
        self._check()

    def __repr__(self) -> str:
        shown = [repr(self.client.backend)]
        shown += changed_arguments(self, ("llm", "prompt", "tokenizer", "text_loader", "verbose", "concurrency"))
        if self.prompt != ListwisePrompt():
            shown.append("prompt=" + (self.prompt.form if isinstance(self.prompt, ListwisePrompt) else "own"))
        return f"{type(self).__name__}({', '.join(shown)})"

    def describe(self) -> dict[str, Any]:
        """Who this transformer is, JSON-able: the language model by its name and settings, and what it is asked.

        Raises:
            ValueError: if the model or the prompt is a function, of which it cannot be told whether it stays the same.
        """
        backend = self.client.backend
        if isinstance(backend, CallableBackend) or not isinstance(self.prompt, ListwisePrompt):
            raise ValueError(f"{self!r} asks a function, of which it cannot be told whether it stays the same")
        not_asked = ("llm", "concurrency", "report", "text_loader", "verbose")
        asked = {name: described(value) for name, value in arguments_of(self).items() if name not in not_asked}
        return {"model": backend.model, "settings": dict(backend.settings), "arguments": asked}

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Ranks the documents of every query.

        Args:
            inp: `qid, query, docno` and the text column(s); any other columns are kept.

        Returns:
            A new frame: same rows, order, index and columns, with `score` and `rank`.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for arguments that cannot work, or a qid with several queries.
            UnreadableReplyError: for a reply without a ranking, if `on_failure` is `"raise"`.
            BackendError: if the model cannot be asked. Replies so far are in the cache.
            SpendCapError: if the next call might pass the cap. Replies so far are in the cache.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        report = REPORT_COLUMNS if self.report else ()
        if not len(inp):
            return with_scores(inp, [], **{name: np.empty(0, "int64") for name in report})
        self._check()
        candidates = self._candidates(inp, text_columns)
        reader = DocumentReader(self.tokenizer, self.max_doc_len)
        rankings = self._rank_all(candidates, reader, self.client.ask, verbose=self.verbose)
        scores = np.zeros(len(inp))
        rows = []
        for one, (order, counts) in zip(candidates, rankings, strict=True):
            rows.append([one.qid, *(counts[name] for name in COUNTS)])
            for rank, document in enumerate([*order, *range(len(one.texts), len(one.rows))]):
                scores[one.rows[document]] = len(one.rows) - rank
        self.counts = pd.DataFrame(rows, columns=["qid", *REPORT_COLUMNS])
        self.coverage = reader.coverage(len({one.query for one in candidates}))
        self._warn(self.counts, self.coverage)
        counts_of = self.counts.set_index("qid")
        return with_scores(
            inp, scores, **{name: counts_of.loc[inp["qid"].tolist(), name].to_numpy() for name in report}
        )

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """What `transform` of the same frame would take: makes all prompts and asks nothing.

        Args:
            inp: as for `transform`.

        Returns:
            Calls, tokens and cost at the prices of `llm`. Every answer is reckoned as that of a full list; replies in
            the cache are not deducted.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        reader = DocumentReader(self.tokenizer, self.max_doc_len)
        prompts: list[int] = []
        answer = " > ".join(f"[{number}]" for number in range(1, self.list_size + 1))

        def ask(qid: str, messages: list[Message]) -> str:
            prompts.append(reader.count_messages(messages))
            return answer

        self._rank_all(self._candidates(inp, text_columns), reader, ask, verbose=False)
        tokens_in, tokens_out = sum(prompts), len(prompts) * reader.count(answer)
        return Estimate(len(prompts), tokens_in, tokens_out, self.ledger.prices.cost(tokens_in, tokens_out))

    def _rank_all(
        self, candidates: list[Candidates], reader: DocumentReader, ask: Ask, *, verbose: bool
    ) -> list[tuple[list[int], Counter[str]]]:
        schedule = BackToFront(self.list_size, self.step)
        names = ("prompt", "max_prompt_tokens", "retries", "on_failure", "shuffles", "seed")
        ranker = ListRanker(ask, reader, schedule, **{name: getattr(self, name) for name in names})

        def rank(one: Candidates, step: Callable[[], None]) -> tuple[list[int], Counter[str]]:
            return ranker.rank(str(one.qid), one.query, one.texts, step)

        lists = sum(len(schedule.places(len(one.texts))) for one in candidates)
        total = lists * max(self.shuffles, 1)
        with counting(type(self).__name__, "prompt", total, shown=verbose) as done:
            return in_parallel(rank, candidates, self.concurrency, on_step=done)

    def _candidates(self, inp: pd.DataFrame, text_columns: list[str]) -> list[Candidates]:
        queries, texts = strings(inp["query"], "query"), texts_of(inp, text_columns, self.text_loader)
        qids, docnos = inp["qid"].tolist(), inp["docno"].tolist()
        rows_of: dict[Any, list[int]] = {qid: [] for qid in qids}
        for row in _first_stage_order(inp):
            rows_of[qids[row]].append(row)
        candidates = []
        for qid, rows in rows_of.items():
            if len({queries[row] for row in rows}) > 1:
                raise ValueError(f"qid {qid!r} has several texts in column 'query'; a list is ranked for one")
            documents: dict[tuple[Any, str], list[int]] = {}
            for row in rows:
                documents.setdefault((docnos[row], texts[row]), []).append(row)
            shown = [text for _, text in documents][: self.top_k]
            candidates.append(Candidates(qid, queries[rows[0]], shown, list(documents.values())))
        return candidates

    def _check(self) -> None:
        """Raises ValueError for arguments that can never work, without asking anything."""
        _ = self.client  # refuses an `llm` that is none
        field_names(self.text_field)
        check_choice("on_failure", self.on_failure, ON_FAILURE)
        if not callable(self.prompt):
            raise ValueError(
                f"prompt={self.prompt!r} must be a ListwisePrompt or a function (query, texts) -> messages"
            )
        check_given(list_size=self.list_size, step=self.step, concurrency=self.concurrency)
        check_positive(top_k=self.top_k, max_doc_len=self.max_doc_len, max_prompt_tokens=self.max_prompt_tokens)
        for name in ("retries", "shuffles"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.step >= self.list_size:
            raise ValueError(
                f"step={self.step} must be smaller than list_size={self.list_size}: documents move up only where "
                f"lists overlap"
            )

    def _warn(self, counts: pd.DataFrame, coverage: Coverage) -> None:
        name = type(self).__name__
        if (incomplete := (counts["llm_failed"] + counts["llm_missing"] > 0)).any():
            total = counts.drop(columns="qid").sum()
            warn(
                f"{name}: in {incomplete.sum()} of {len(counts)} queries, {total['llm_failed']} of "
                f"{total['llm_prompts']} prompts had no readable reply (on_failure={self.on_failure!r}) and replies "
                f"left out {total['llm_missing']} documents, which kept their order behind the others (see .counts).",
                IncompleteReplyWarning,
            )
        if coverage.is_cut:
            asked = [f"{name}={getattr(self, name)}" for name in ("max_doc_len", "max_prompt_tokens")]
            cause = " and ".join(each for each in asked if not each.endswith("None")) or "the server"
            warn_of_cuts(self, self.warned, [cause], f" did not read {coverage.losses(cause)}")


def _first_stage_order(inp: pd.DataFrame) -> list[int]:
    """The rows by falling score, then rising rank; those without one come last."""
    keys = [name for name in ("score", "rank") if name in inp.columns]
    if not keys:
        return list(range(len(inp)))
    numbers = inp[keys].apply(pd.to_numeric).reset_index(drop=True)
    return numbers.sort_values(keys, ascending=[key == "rank" for key in keys], kind="stable").index.tolist()
