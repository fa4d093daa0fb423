"""RankGPT: a language model puts groups of documents in order, and a schedule makes a ranking of that."""

from __future__ import annotations

from collections import Counter
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
from ..common.parallel import in_rounds
from ..common.presentation import Presented, changed_arguments
from ..common.progress import counting
from ..modelling.preselection import WindowSelector
from ..modelling.windows import SentenceWindows, Windows
from .answers import AnswerForm, Ask, Permutation
from .calls import Estimate
from .client import AsksLLM, description
from .evidence import check_selector
from .fitting import Fitting, reader_for
from .messages import DocumentReader, IncompleteReplyWarning, ListwisePrompt, Message, Prompt
from .ranker import COUNTS, ON_FAILURE, ListRanker, Ranked
from .schedules import BackToFront, Schedule

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
    """Zero-shot listwise reranking by a language model, which orders groups of documents that a schedule chooses.

    Source: Sun et al. 2023, whose windows are the schedule `BackToFront`; the other schedules are those of its
    successors, see `pyterrier_longdoc.listwise.schedules`. A FirstP variant reads `max_doc_len=512` of each document, a
    LongP variant (`None`) all of it, as in Boytsov et al. 2025. Prompt wording and parser are this package's own.

    With `preselect` a document is shown by its best passages for the query instead of its beginning: in document order,
    with `[...]` wherever text was left out, and as many of them as fit into `max_doc_len` and `max_prompt_tokens`.

    Reads a frame with `qid, query, docno` and the text column(s); within a query documents are taken by falling
    `score`, then rising `rank`, then in the order of the rows. Returns the same rows, columns and index with new
    `score` (n for the best of n documents, n - 1 for the next, ...) and `rank`. Rows with the same docno and text are
    one document. A reply that holds no ranking is a failure, never an order of documents; an outage ends the run.

    Args:
        llm: an `LLMClient` (cache, prices, spend cap), a backend (`OpenAIBackend`, `AnthropicBackend`,
            `HuggingFaceBackend`) or a function from a list of `{"role", "content"}` messages to a string.
        schedule: which documents meet in which prompt: `BackToFront(window=20, stride=10)` as in Sun et al. 2023,
            `TopDown`, `ParallelBlocks`, `Tournament`, `SetwiseHeapsort`, `SetwiseInsertion`, `PairwiseAll`,
            `PairwiseBubble`, or one of your own.
        top_k: rerank the best so many documents of a query; the others keep their order below. None for all.
        preselect: chooses the passages of a document that are shown, for each query: `FirstK`, `BM25Windows`,
            `EmbeddingWindows` or `CrossEncoderWindows`, at most `k` of them. None shows documents from their beginning.
        windows: the passages that `preselect` chooses from, their tokens being words and punctuation marks. Default:
            as many whole sentences as fit into 63 tokens, the size of a block in Li et al. 2023.
        max_doc_len: show at most so many tokens of a document; None for all.
        max_prompt_tokens: most tokens in a prompt, reminders included: the model's context less its longest answer. The
            longest documents of a prompt are shortened to it, so that short ones leave their share to long ones. None
            leaves it to the server: what it finds too long is shortened by quarters.
        tokenizer: counts tokens: a Hugging Face tokenizer or its name, a tiktoken encoding or a function; None counts
            four characters as one.
        answer: `Permutation()`: the model writes an order; or `FirstToken()`: the order is that of the probabilities of
            the documents' letters as first token, for models that give log-probabilities.
        prompt: a `ListwisePrompt`, or a function from a query and texts to messages; None for that of `answer`.
        on_failure: if a prompt has no readable reply after all retries: `"raise"`; `"keep"`: nothing is made of it,
            and each schedule says what that leaves; or `"nan-free-bottom"`: its documents go to the bottom of the
            query, all with score 0, and are not shown again.
        retries: further calls after an unreadable reply, each with a reminder of what was asked.
        shuffles: ask about each group so many times in random orders and average the ranks (permutation
            self-consistency, Tang et al. 2024); 0 asks once, in the given order.
        seed: of the shuffles.
        concurrency: prompts in flight at the same time, of one query (where its schedule has several in a round) or of
            several.
        report: add columns with what happened to the row's query: `llm_prompts` asked for an order, in `llm_rounds`
            that had to wait for each other, `llm_missing`
            documents were not named in replies and kept their order behind the others, `llm_duplicates` were named
            again, `llm_unknown` ids were no document's, `llm_refusals` were replies without a readable ranking,
            `llm_retries` calls because of those, and `llm_failed` prompts had no readable reply in the end.
        text_field: the column with the text, or a tuple of columns that are joined by a space.
        text_loader: supplies the text where the column is absent.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the shown documents the last `transform` showed; None before.
        counts: one row per query of the last `transform`: `qid` and the columns of `report`; None before.
        rounds: for each query of the last `transform`, the number of documents in each prompt of each round; None
            before. Prompts of one round do not wait for each other.
    """

    papers: ClassVar[tuple[str, ...]] = ("sun-2023-is",)

    llm: Any
    _: KW_ONLY
    schedule: Schedule = BackToFront()  # noqa: RUF009 - frozen
    top_k: int | None = 100
    preselect: WindowSelector | None = None
    windows: Windows = SentenceWindows(max_tokens=63)  # noqa: RUF009 - frozen
    max_doc_len: int | None = None
    max_prompt_tokens: int | None = None
    tokenizer: Any = None
    answer: AnswerForm = Permutation()  # noqa: RUF009 - frozen
    prompt: Prompt | None = None
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
        self.rounds: dict[Any, list[list[int]]] | None = None
        self.warned: Told = set()
        self._check()

    def __repr__(self) -> str:
        shown = [repr(self.client.backend)]
        shown += changed_arguments(self, ("llm", "prompt", "tokenizer", "text_loader", "verbose", "concurrency"))
        if self.prompt is not None:
            shown.append("prompt=" + (self.prompt.form if isinstance(self.prompt, ListwisePrompt) else "own"))
        return f"{type(self).__name__}({', '.join(shown)})"

    def cited(self) -> list[str]:
        """The papers behind it as it is set up: schedule, form of the answers, passages that are shown, shuffles."""
        parts = papers_of(self.schedule, self.answer, self.preselect)
        return [*super().cited(), *parts, *(["tang-2024-found"] if self.shuffles else [])]

    def describe(self) -> dict[str, Any]:
        """Who this transformer is, JSON-able: the language model by its name and settings, and what it is asked.

        Raises:
            ValueError: if the model or the prompt is a function, of which it cannot be told whether it stays the same.
        """
        return description(self, "report", own_prompt=not isinstance(self._prompt, ListwisePrompt))

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
        texts = texts_of(inp, text_columns, self.text_loader)
        candidates = self._candidates(inp, texts)
        reader = reader_for(self, [(one.query, text) for one in candidates for text in one.texts])
        ask = self.answer.ask(self.client, self._prompt)
        rankings = self._rank_all(candidates, reader, ask, verbose=self.verbose)
        scores = np.zeros(len(inp))
        rows = []
        for one, ranked in zip(candidates, rankings, strict=True):
            rows.append([one.qid, *(ranked.counts[name] for name in COUNTS)])
            for rank, document in enumerate([*ranked.order, *range(len(one.texts), len(one.rows))]):
                scores[one.rows[document]] = len(one.rows) - rank
        self.rounds = {one.qid: ranked.rounds for one, ranked in zip(candidates, rankings, strict=True)}
        self.counts = pd.DataFrame(rows, columns=["qid", *REPORT_COLUMNS])
        self.coverage = reader.coverage(len({one.query for one in candidates}))
        self._warn(self.counts, self.coverage)
        warn_of_empty(self, self.coverage, inp, map(is_blank, texts))
        counts_of = self.counts.set_index("qid")
        return with_scores(
            inp, scores, **{name: counts_of.loc[inp["qid"].tolist(), name].to_numpy() for name in report}
        )

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """What `transform` of the same frame would take: makes prompts and asks nothing.

        Args:
            inp: as for `transform`.

        Returns:
            Calls, tokens and cost at the prices of `llm` (None if it has none). Every answer is reckoned as that of a
            full list; replies in the cache are not deducted. With `preselect` passages are chosen as in a run. Where
            answers decide how many prompts there are, the most that there can be, each as long as those of a model that
            changes no order.
        """
        text_columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        texts = texts_of(inp, text_columns, self.text_loader)
        candidates = self._candidates(inp, texts)
        reader = reader_for(self, [(one.query, text) for one in candidates for text in one.texts])
        tokens_in: Counter[str] = Counter()
        most = max((len(one.texts) for one in candidates), default=0)
        answers = [self.answer.unchanged(n, self._prompt) for n in range(most + 1)]

        def ask(qid: str, messages: list[Message]) -> str:
            tokens_in[qid] += reader.count_messages(messages)
            return answers[-1]

        total = np.zeros(3)
        for one, ranked in zip(candidates, self._rank_all(candidates, reader, ask, verbose=False), strict=True):
            sizes = [size for of_round in ranked.rounds for size in of_round]
            tokens_out = sum(self.answer.written(answers[size], reader.count) for size in sizes)
            # Where answers decide about further prompts, these have not come about.
            more = self._most_prompts(one) / max(len(sizes), 1)
            total += [self._most_prompts(one), tokens_in[str(one.qid)] * more, tokens_out * more]
        calls, read, written = np.ceil(total).astype(int).tolist()
        return self.ledger.estimate(calls, read, written)

    @property
    def _prompt(self) -> Prompt:
        return self.answer.prompt if self.prompt is None else self.prompt

    def _most_prompts(self, one: Candidates) -> int:
        return self.schedule.estimate(len(one.texts)) * max(self.shuffles, 1)

    def _rank_all(
        self, candidates: list[Candidates], reader: DocumentReader, ask: Ask, *, verbose: bool
    ) -> list[Ranked]:
        fitting = Fitting(ask, reader, self._prompt, self.max_prompt_tokens)
        names = ("schedule", "answer", "retries", "on_failure", "shuffles", "seed")
        ranker = ListRanker(fitting, **{name: getattr(self, name) for name in names})
        left = {number: self._most_prompts(one) for number, one in enumerate(candidates)}
        with counting(type(self).__name__, "prompt", sum(left.values()), shown=verbose) as done:

            def on_task(query: int) -> None:
                left[query] -= 1
                done()

            jobs = [ranker.rank(str(one.qid), one.query, one.texts) for one in candidates]
            # Prompts that a query turns out not to need are done with it.
            return in_rounds(jobs, self.concurrency, on_task=on_task, on_done=lambda query: done(left[query]))

    def _candidates(self, inp: pd.DataFrame, texts: list[str]) -> list[Candidates]:
        queries = strings(inp["query"], "query")
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
        if not isinstance(self.answer, AnswerForm):
            raise ValueError(f"answer={self.answer!r} must be Permutation() or FirstToken()")
        if not callable(self._prompt):
            raise ValueError(
                f"prompt={self.prompt!r} must be a ListwisePrompt or a function (query, texts) -> messages"
            )
        self.answer.check(self.client, self._prompt)
        if not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule={self.schedule!r} must be a schedule, e.g. BackToFront(window=20, stride=10)")
        check_selector(self.preselect, self.windows)
        check_given(concurrency=self.concurrency)
        check_positive(top_k=self.top_k, max_doc_len=self.max_doc_len, max_prompt_tokens=self.max_prompt_tokens)
        for name in ("retries", "shuffles"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

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
        if coverage.tokens_lost:
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
