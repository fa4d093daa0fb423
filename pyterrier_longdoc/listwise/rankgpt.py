"""RankGPT: a language model orders windows of documents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice
from ..common.coverage import Coverage
from ..common.frames import TextField, TruncationWarning, field_names, strings, texts_of, validated, with_scores
from ..common.presentation import Presented, changed_arguments
from .budget import DocumentReader, Tokens
from .client import LLMClient, wrapped
from .errors import IncompleteReplyWarning
from .ledger import Call, Estimate, Ledger
from .parallel import Lock, in_parallel
from .prompts import ListwisePrompt, Message, Prompt
from .sliding import ON_FAILURE, Ask, Counts, Ranking, WindowRanker

REPORT_COLUMNS = tuple(f"llm_{f.name}" for f in fields(Counts))


@dataclass(frozen=True, eq=False)
class Candidates:
    """The documents of one query, best first.

    Attributes:
        qid: as in the frame.
        query: its text.
        texts: one per document.
        rows: for each document, the rows of the frame with that document and text.
    """

    qid: Any
    query: str
    texts: list[str]
    rows: list[list[int]]


@dataclass(eq=False, repr=False)
class RankGPT(Presented, pt.Transformer):
    """Zero-shot listwise reranking by a language model, in windows from the back of the list to its front.

    Source: Sun et al. 2023; windows that do not divide the list evenly also reach its top. A FirstP variant reads
    `max_doc_tokens=512` of each document, a LongP variant (`None`) all of it, as in Boytsov et al. 2025. Prompt wording
    and parser are this package's own.

    Reads a frame with `qid, query, docno` and the text column(s); within a query documents are taken by falling
    `score`, then rising `rank`, then in the order of the rows. Returns the same rows, columns and index with new
    `score` (n for the best of n documents, n - 1 for the next, ...) and `rank`. Rows with the same docno and text are
    one document. A reply that holds no ranking is a failure, never an order of documents; an outage ends the run.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend (`OpenAIBackend`, `AnthropicBackend`,
            `HuggingFaceBackend`) or a function from a list of `{"role", "content"}` messages to a string.
        window_size: most documents in a prompt; 20 in Sun et al. 2023.
        stride: documents from one window to the next; 10 in Sun et al. 2023. The best `window_size - stride` of all
            end on top, if the model orders each window rightly.
        top_k: rerank the best so many documents of a query; the others keep their order below. None for all.
        max_doc_tokens: show at most so many tokens of a document; None for all.
        max_prompt_tokens: most tokens in a prompt: the model's context less its longest answer. The longest documents
            of a prompt are shortened to it. None leaves it to the server: what it finds too long is shortened by
            quarters.
        tokenizer: counts tokens: a Hugging Face tokenizer, a tiktoken encoding or a function; None counts four
            characters as one.
        prompt: a `ListwisePrompt`, or a function from a query and texts to messages.
        on_failure: if a window has no readable reply after all retries: `"raise"`; `"keep"` its order; or
            `"nan-free-bottom"`: its documents go to the bottom of the query, all with score 0.
        retries: further calls after an unreadable reply, each with a reminder of what was asked.
        shuffles: ask about each window so many times in random orders and average the ranks (permutation
            self-consistency, Tang et al. 2024); 0 asks once, in the given order.
        seed: of the shuffles.
        concurrency: queries in flight at the same time.
        report: add columns with what happened to the row's query: `llm_windows`, `llm_missing`, `llm_duplicates`,
            `llm_unknown`, `llm_refusals`, `llm_retries` and `llm_failed` (see `Counts`).
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the shown documents the last `transform` showed; None before.
        counts: one row per query of the last `transform`: `qid` and the columns of `report`; None before.
    """

    llm: Any
    _: KW_ONLY
    window_size: int = 20
    stride: int = 10
    top_k: int | None = 100
    max_doc_tokens: int | None = None
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
        self._wrapped: tuple[Any, LLMClient] | None = None
        self._warned_cut = False
        self._check()

    def __repr__(self) -> str:
        shown = [repr(self._client().backend)]
        shown += changed_arguments(self, ("llm", "prompt", "tokenizer", "text_loader", "verbose", "concurrency"))
        if self.prompt != ListwisePrompt():
            shown.append("prompt=" + (self.prompt.form if isinstance(self.prompt, ListwisePrompt) else "own"))
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def ledger(self) -> Ledger:
        """The calls of this object, and of all others that share its `LLMClient`."""
        return self._client().ledger

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
        if not len(inp):
            return with_scores(inp, [], **({name: [] for name in REPORT_COLUMNS} if self.report else {}))
        self._check()
        candidates = self._candidates(inp, text_columns)
        rankings, reader = self._rank_all(candidates, self._client().ask, verbose=self.verbose)
        counts = pd.DataFrame([asdict(ranking.counts) for ranking in rankings]).add_prefix("llm_")
        self.counts = counts.assign(qid=[one.qid for one in candidates])[["qid", *REPORT_COLUMNS]]
        self.coverage = reader.coverage(len(candidates))
        self._warn()
        scores, query_of_row = np.zeros(len(inp)), np.zeros(len(inp), dtype=np.int64)
        for i, (one, ranking) in enumerate(zip(candidates, rankings, strict=True)):
            for rank, document in enumerate(ranking.order):
                scores[one.rows[document]] = len(one.rows) - rank
            query_of_row[[row for rows in one.rows for row in rows]] = i
        report = REPORT_COLUMNS if self.report else ()
        return with_scores(inp, scores, **{name: counts[name].iloc[query_of_row].tolist() for name in report})

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """What `transform` of the same frame would take: makes all prompts and asks nothing.

        Args:
            inp: as for `transform`.

        Returns:
            Calls, tokens and cost at the prices of `llm`. Every answer is reckoned as that of a full window; replies in
            the cache are not deducted.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        tokens, ledger = Tokens(self.tokenizer), Ledger(self.ledger.prices)
        answer = " > ".join(f"[{number}]" for number in range(1, self.window_size + 1))

        def ask(qid: str, messages: list[Message]) -> str:
            ledger.add(Call(qid, False, tokens.of_messages(messages), tokens.count(answer), True))
            return answer

        self._rank_all(self._candidates(inp, text_columns), ask, verbose=False)
        return Estimate.of(ledger)

    def _rank_all(
        self, candidates: list[Candidates], ask: Ask, *, verbose: bool
    ) -> tuple[list[Ranking], DocumentReader]:
        reader = DocumentReader(Tokens(self.tokenizer), self.max_doc_tokens)
        shared = ("window_size", "stride", "max_prompt_tokens", "retries", "on_failure", "shuffles", "seed")
        ranker = WindowRanker(ask, self.prompt, reader, **{name: getattr(self, name) for name in shared})
        total = sum(ranker.prompts(len(self._head(one))) for one in candidates)
        done, lock = 0, Lock()
        with pt.tqdm(total=total, desc=type(self).__name__, unit="window", disable=not verbose) as bar:

            def rank(one: Candidates, check: Callable[[], None]) -> Ranking:
                nonlocal done

                def on_prompt() -> None:
                    check()
                    with lock:
                        bar.update()

                head = self._head(one)
                ranking = ranker.rank(str(one.qid), one.query, head, on_prompt)
                ranking.order += range(len(head), len(one.texts))
                with lock:
                    done += 1
                    bar.set_postfix_str(f"{done}/{len(candidates)} queries")
                return ranking

            return in_parallel(rank, candidates, self.concurrency), reader

    def _head(self, one: Candidates) -> list[str]:
        return one.texts[: self.top_k]

    def _candidates(self, inp: pd.DataFrame, text_columns: list[str]) -> list[Candidates]:
        queries, texts = strings(inp["query"], "query"), texts_of(inp, text_columns, self.text_loader)
        qids, docnos, keys = inp["qid"].tolist(), inp["docno"].tolist(), _first_stage_keys(inp)
        rows_of: dict[Any, list[int]] = {}
        for row, qid in enumerate(qids):
            rows_of.setdefault(qid, []).append(row)
        candidates = []
        for qid, rows in rows_of.items():
            if len({queries[row] for row in rows}) > 1:
                raise ValueError(f"qid {qid!r} has several texts in column 'query'; a list is ranked for one")
            documents: dict[tuple[Any, str], list[int]] = {}
            for row in sorted(rows, key=keys.__getitem__):
                documents.setdefault((docnos[row], texts[row]), []).append(row)
            shown = [text for _, text in documents]
            candidates.append(Candidates(qid, queries[rows[0]], shown, list(documents.values())))
        return candidates

    def _client(self) -> LLMClient:
        self._wrapped = wrapped(self.llm, self._wrapped)
        return self._wrapped[1]

    def _check(self) -> None:
        """Raises ValueError for arguments that can never work, without asking anything."""
        self._client()
        field_names(self.text_field)
        check_choice("on_failure", self.on_failure, ON_FAILURE)
        Tokens(self.tokenizer)
        if not callable(self.prompt):
            raise ValueError(
                f"prompt={self.prompt!r} must be a ListwisePrompt or a function (query, texts) -> messages"
            )
        for name, least in (("window_size", 2), ("stride", 1), ("retries", 0), ("shuffles", 0), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("top_k", "max_doc_tokens", "max_prompt_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1, or None")
        if self.stride >= self.window_size:
            raise ValueError(
                f"stride={self.stride} must be smaller than window_size={self.window_size}: documents move up only "
                f"where windows overlap"
            )

    def _warn(self) -> None:
        counts, coverage = self.counts, self.coverage
        name = type(self).__name__
        if counts is not None and (incomplete := (counts["llm_failed"] + counts["llm_missing"] > 0)).any():
            total = counts.drop(columns="qid").sum()
            warnings.warn(
                f"{name}: in {incomplete.sum()} of {len(counts)} queries, {total['llm_failed']} of "
                f"{total['llm_windows']} prompts had no readable reply (on_failure={self.on_failure!r}) and replies "
                f"left out {total['llm_missing']} documents, which kept their order behind the others (see .counts).",
                IncompleteReplyWarning,
                stacklevel=3,
            )
        if coverage is not None and coverage.is_cut and not self._warned_cut:
            self._warned_cut = True
            warnings.warn(
                f"{name} did not read all of the text: {coverage} (see .coverage).", TruncationWarning, stacklevel=3
            )


def _first_stage_keys(inp: pd.DataFrame) -> list[tuple[float, float]]:
    """What the rows of a query are sorted by: falling score, then rising rank; rows without one come last."""

    def column(name: str, sign: float) -> list[float]:
        if name not in inp.columns:
            return [0.0] * len(inp)
        values = pd.to_numeric(inp[name]).astype("float64").tolist()
        return [math.inf if math.isnan(value) else sign * value for value in values]

    return list(zip(column("score", -1.0), column("rank", 1.0), strict=True))
