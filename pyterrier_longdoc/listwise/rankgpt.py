"""RankGPT: a language model puts groups of documents in order, and a schedule makes a ranking of that."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from ..common.arguments import argument
from ..common.citations import papers_of
from ..common.frames import strings, with_scores
from ..common.parallel import in_parallel
from ..common.progress import counting
from ..common.warnings import warn
from .answer_forms import AnswerForm, Permutation
from .backends import Reply
from .costs import Estimate
from .llm_reranker import LLMReranker
from .parsing import IncompleteReplyWarning
from .prompt_budget import PromptBudget
from .prompts import Message, Prompt
from .ranker import COUNTS, Ask, ListRanker, QueryDocuments, Ranked
from .schedules import BackToFront, Schedule

REPORT_COLUMNS = tuple(f"llm_{name}" for name in COUNTS)


@dataclass(eq=False, repr=False)
class RankGPT(LLMReranker):
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
        llm: an `LLMClient` (cache, prices, spend cap), a backend (`OpenAIBackend`, `HuggingFaceBackend`)
            or a function from a list of `{"role", "content"}` messages to a string.
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

    _: KW_ONLY
    schedule: Schedule = argument(BackToFront(), role="head")
    top_k: int | None = argument(100, role="head", at_least=1)
    answer: AnswerForm = argument(Permutation(), role="head")
    prompt: Prompt | None = argument(None, role="input")
    on_failure: str = argument("raise", role="head", choices=("raise", "keep", "nan-free-bottom"))
    retries: int = argument(2, role="head", at_least=0)
    shuffles: int = argument(0, role="head", at_least=0)
    seed: int = argument(42, role="head")
    report: bool = argument(False, role="call")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts: pd.DataFrame | None = None
        self.rounds: dict[Any, list[list[int]]] | None = None

    def cited(self) -> list[str]:
        """Return the papers behind it as it is set up: of schedule, answers, choice of passages, and shuffles."""
        shuffled = ["tang-2024-found"] if self.shuffles else []
        return [*super().cited(), *papers_of(self.schedule, self.answer), *shuffled]

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with the same rows, order, index and columns, and `score` and `rank`.

        Raises:
            ValueError: for arguments that cannot work, or a qid with several queries.
            UnreadableReplyError: for a reply without a ranking, if `on_failure` is `"raise"`.
            BackendError: if the model cannot be asked. Replies so far are in the cache.
            SpendCapError: if the cap is spent. Replies so far are in the cache.
        """
        texts = self._texts(inp)
        report = REPORT_COLUMNS if self.report else ()
        if not texts:
            return with_scores(inp, [], **{name: np.empty(0, "int64") for name in report})
        candidates = self._candidates(inp, texts)
        budget = self._budget(self._prompt, ((one.query, text) for one in candidates for text in one.texts))
        rankings = self._rank_all(candidates, budget, self._ask, verbose=self.verbose)
        scores = np.zeros(len(inp))
        rows = []
        for one, ranked in zip(candidates, rankings, strict=True):
            rows.append([one.qid, *(ranked.counts[name] for name in COUNTS)])
            for rank, document in enumerate([*ranked.order, *range(len(one.texts), len(one.rows))]):
                scores[one.rows[document]] = len(one.rows) - rank
        self.rounds = {one.qid: ranked.rounds for one, ranked in zip(candidates, rankings, strict=True)}
        self.counts = pd.DataFrame(rows, columns=["qid", *REPORT_COLUMNS])
        self._tell_of_failures(self.counts)
        self._note_coverage(budget, inp, texts)
        counts_of = self.counts.set_index("qid")
        return with_scores(
            inp, scores, **{name: counts_of.loc[inp["qid"].tolist(), name].to_numpy() for name in report}
        )

    def estimate(self, inp: pd.DataFrame) -> Estimate:
        """Return what `transform` of the same frame would take: make prompts and ask nothing.

        Returns:
            Calls, tokens and cost at the prices of `llm` (None if it has none). Every answer is reckoned as that of a
            full list; replies in the cache are not deducted. With `preselect` passages are chosen as in a run. Where
            answers decide how many prompts there are, the most that there can be, each as long as those of a model that
            changes no order.
        """
        candidates = self._candidates(inp, self._texts(inp))
        budget = self._budget(self._prompt, ((one.query, text) for one in candidates for text in one.texts))
        tokens_in: Counter[str] = Counter()
        most = max((len(one.texts) for one in candidates), default=0)
        answers = [self.answer.unchanged(n, self._prompt) for n in range(most + 1)]

        def ask(qid: str, messages: list[Message]) -> Reply:
            tokens_in[qid] += budget.count_messages(messages)
            return answers[-1]

        written = [budget.count(each.text) if each.output_tokens is None else each.output_tokens for each in answers]
        total = np.zeros(3)
        for one, ranked in zip(candidates, self._rank_all(candidates, budget, ask, verbose=False), strict=True):
            sizes = [size for of_round in ranked.rounds for size in of_round]
            # Where answers decide about further prompts, these have not come about.
            prompts = self._most_prompts(one)
            more = prompts / max(len(sizes), 1)
            total += [prompts, tokens_in[str(one.qid)] * more, sum(written[size] for size in sizes) * more]
        return self.ledger.estimate(*np.ceil(total).astype(int).tolist())

    @property
    def _prompt(self) -> Prompt:
        return self.answer.prompt if self.prompt is None else self.prompt

    def _ask(self, qid: str, messages: list[Message]) -> Reply:
        return self.answer.ask(self.client, qid, messages, self._prompt)

    def _most_prompts(self, one: QueryDocuments) -> int:
        return self.schedule.estimate(len(one.texts)) * max(self.shuffles, 1)

    def _rank_all(
        self, candidates: list[QueryDocuments], budget: PromptBudget, ask: Ask, *, verbose: bool
    ) -> list[Ranked]:
        ranker = ListRanker(ask, budget, self)
        total = sum(map(self._most_prompts, candidates))
        with counting(type(self).__name__, "prompt", total, shown=verbose) as done:
            return in_parallel(
                ranker.rank,
                candidates,
                self.concurrency,
                on_task=done,
                # Prompts that a query turns out not to need are done with it.
                on_done=lambda one, ranked: done(self._most_prompts(one) - ranked.counts["prompts"]),
            )

    def _candidates(self, inp: pd.DataFrame, texts: list[str]) -> list[QueryDocuments]:
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
            candidates.append(QueryDocuments(qid, queries[rows[0]], shown, list(documents.values())))
        return candidates

    def _check(self) -> None:
        super()._check()
        self.answer.check(self.client, self._prompt)

    def _tell_of_failures(self, counts: pd.DataFrame) -> None:
        if (incomplete := (counts["llm_failed"] + counts["llm_missing"] > 0)).any():
            total = counts.drop(columns="qid").sum()
            warn(
                f"{type(self).__name__}: in {incomplete.sum()} of {len(counts)} queries, {total['llm_failed']} of "
                f"{total['llm_prompts']} prompts had no readable reply (on_failure={self.on_failure!r}) and replies "
                f"left out {total['llm_missing']} documents, which kept their order behind the others (see .counts).",
                IncompleteReplyWarning,
            )


def _first_stage_order(inp: pd.DataFrame) -> list[int]:
    """Return the rows by falling score, then rising rank; those without one come last."""
    keys = [name for name in ("score", "rank") if name in inp.columns]
    if not keys:
        return list(range(len(inp)))
    numbers = inp[keys].apply(pd.to_numeric).reset_index(drop=True)
    return numbers.sort_values(keys, ascending=[key == "rank" for key in keys], kind="stable").index.tolist()
