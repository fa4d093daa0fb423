"""What a ranking hands on to a reader: the documents' best windows, within one budget of tokens for a query."""

# Without `from __future__ import annotations`: what the fields are must be known in the modules of subclasses too.

from dataclasses import KW_ONLY, dataclass
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common import frames
from ..common.arguments import argument, validate
from ..common.files import full_name
from ..common.frames import Document, TextField, TruncationWarning
from ..common.language import Counter, is_visible, token_counter
from ..common.presentation import NotebookMixin
from ..common.warnings import warn
from ..modelling.words import Words
from .excerpts import MARK, Budget, ChosenPassages

WINDOWS = ("window_scores", "window_spans")
"""The columns with the windows of each document."""


@dataclass(eq=False, repr=False)
class Evidence(NotebookMixin, pt.Transformer):
    """Replaces texts by their best windows: a budget of tokens over all documents of a query, spent on the best scores.

    Reads results of any reranker of this package with `explain=True`. The windows of all documents of a query are taken
    from the best to the worst, equal ones in the order of ranks. One that is too large for what is left is skipped;
    smaller ones behind it may still fit. Text that windows share is handed on, and counted, once.

    Returns the same rows, order, index, scores and ranks. The text is the document's windows in its order, with `[...]`
    between them where text was left out, and empty for a document that gets nothing. New columns: `evidence_spans`
    (characters `(start, end)` of the parts in the document's text) and `evidence_tokens` (of the new text);
    `window_field` is empty, as windows are those of the old text.

    Args:
        tokens: of all texts of a query together, `[...]` and titles included. 2,000 are about three pages.
        document_weight: a window is worth its `window_scores` and this times its document's `score`: what stands in a
            good document is more likely the answer. 0 for windows alone, large values for one document after the other.
            1 was best, or nearly, on dev questions of two collections (`tests/benchmarks/bench_handed_on.py`).
        at_least: give each document, in the order of ranks, its best windows until it has so many tokens, before the
            rest is spent. A warning counts documents that have fewer.
        at_most: tokens of one document; None for no limit.
        tokenizer: counts tokens, for instance as the language model does that reads the text: a Hugging Face tokenizer
            or its name, a tiktoken encoding or a function. None for the reranker's, which the column
            `window_tokenizer` names; words for a served model without one.
        text_field: what the reranker reads. The new text is in the column that is cut into windows, or in `text` where
            several are.
        repeat: the columns that are read with each window, as for the reranker: each is a line before the evidence.

    Example:
        `bm25 >> ld.MaxP(explain=True) >> ld.Evidence(tokens=2000)`.
    """

    tokens: int = argument(2000, at_least=1)
    _: KW_ONLY
    document_weight: float = argument(1.0, at_least=0, below=inf)
    at_least: int = argument(0, at_least=0, at_most="tokens")
    at_most: int | None = argument(None, at_least=1)
    tokenizer: Any = None
    text_field: TextField = "text"
    repeat: TextField | None = None

    def __post_init__(self) -> None:
        validate(self)
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"Evidence: at_least={self.at_least} must be at most at_most={self.at_most}")
        frames.window_fields(self.text_field, self.repeat)
        self.tokenizer = full_name(self.tokenizer)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with the evidence as text.

        Raises:
            pt.validate.InputValidationError: if a column is missing; the message says where windows come from.
            ValueError: if a row has no windows, or they are those of another text, or if nothing says whose tokens to
                count.
        """
        self._check(inp)
        documents = frames.documents_of(inp, self.text_field, self.repeat, None) if len(inp) else []
        gains = np.zeros(len(inp))
        if self.document_weight:
            gains += self.document_weight * frames.numeric(inp, "score", "Evidence", "or give document_weight=0")
        placed = frames.with_windows_in(inp, [frames.as_document(document).text for document in documents])
        columns = [placed[name].tolist() for name in ("docno", *WINDOWS)]
        sources = [_Source.of(*row) for row in zip(map(frames.as_document, documents), *columns, gains, strict=True)]
        rows, count = inp.reset_index(drop=True), self._counter(inp)
        rows = rows.sort_values("rank", kind="stable", key=pd.to_numeric) if "rank" in rows else rows
        given: dict[int, tuple[list[int], int]] = {}
        for of_query in rows.groupby("qid", sort=False, dropna=False).groups.values():
            given |= self._spend({row: sources[row] for row in of_query}, count)
        texts = [source.text(given[row][0]) for row, source in enumerate(sources)]
        spans = [source.passages.pieces(given[row][0]) for row, source in enumerate(sources)]
        tokens = np.array([given[row][1] for row in range(len(sources))], dtype="int64")
        self._warn(inp["qid"], [is_visible(source.document.text) for source in sources], tokens)
        column, *others = frames.window_fields(self.text_field, self.repeat)
        out = inp.assign(**{"text" if others else column: pd.Series(texts, dtype=str).array})
        out["evidence_spans"] = pd.Series(spans, index=inp.index, dtype=object)
        return out.assign(evidence_tokens=tokens, window_field="")

    def _check(self, inp: pd.DataFrame) -> None:
        try:
            frames.validated(inp, self.text_field, None, self, extra=("score", *WINDOWS))
        except pt.validate.InputValidationError as error:
            fields = frames.field_names(self.text_field)
            absent = [name for name in ("qid", "query", "docno", "score", *WINDOWS, *fields) if name not in inp]
            advice = "put dataset.text_loader() before the reranker, in place of its text_loader="
            if absent[0] in WINDOWS:
                advice = "give the reranker explain=True; ld.MaxP(ld.PairScorer(...)) has them for any other reranker"
            if absent[0] in (*WINDOWS, *fields):
                error.args = (f"Evidence lacks the column(s) {', '.join(absent)}: {advice}",)
            raise
        frames.check_windows(inp, self.text_field, self.repeat)

    def _counter(self, inp: pd.DataFrame) -> Counter:
        if self.tokenizer is not None or not len(inp):
            return token_counter(self.tokenizer)
        names = set(inp["window_tokenizer"].dropna()) if "window_tokenizer" in inp else set()
        if len(names) != 1:
            found = f"the column window_tokenizer names {len(names)} tokenizers"
            raise ValueError(f"Evidence: {found}: give tokenizer=, the name of the reranker's backbone for instance")
        return token_counter(names.pop() or Words())

    def _spend(self, sources: dict[int, "_Source"], count: Counter) -> dict[int, tuple[list[int], int]]:
        """Return windows and tokens of each row of a query, whose rows are in the order of ranks."""
        # A counter may add special tokens to each text.
        none, mark = count(["", MARK])
        title = cache(lambda row: count([sources[row].document.repeated])[0] - none)
        part = cache(lambda row, start, end: count([sources[row].document.text[start:end]])[0] - none)

        def parts_cost(row: int, numbers: list[int]) -> int:
            parts = sources[row].passages.pieces(numbers)
            tokens = none + title(row) + (mark - none) * (len(parts) - 1)
            return tokens + sum(part(row, *span) for span in parts) if parts else 0

        def cost(row: int, numbers: list[int]) -> int:
            text = sources[row].text(numbers)
            return count([text])[0] if text else 0

        # Counting the growing text for each window takes the square of its length: only if it has more than its parts.
        for costs in ((parts_cost,), (parts_cost, cost)):
            budget = Budget(self.tokens, *costs, at_most=self.at_most)
            self._fill(budget, sources)
            given = {row: (budget.taken[row], cost(row, budget.taken[row])) for row in sources}
            spent = [tokens for _, tokens in given.values()]
            if sum(spent) <= self.tokens and max(spent) <= (self.at_most or self.tokens):
                break
        return given

    def _fill(self, budget: Budget, sources: dict[int, "_Source"]) -> None:
        for row, source in sources.items():
            for number in source.passages.best:
                if budget.spent[row] < self.at_least:
                    budget.take(row, number)
        windows = [(worth, row, i) for row, source in sources.items() for i, worth in enumerate(source.worth)]
        for _, row, number in sorted(windows, key=lambda window: -window[0]):  # among equals the order of ranks
            if budget.left > 0:
                budget.take(row, number)

    def _warn(self, qids: pd.Series, texts: list[bool], tokens: np.ndarray) -> None:
        """Warn of queries that get nothing, and of documents with less than they were promised."""
        given = pd.Series(tokens[texts]).groupby(qids.to_numpy()[texts], dropna=False).sum()
        problems = {
            "some queries get no text, as none of their windows fits": (given == 0).any(),
            f"some documents have less than at_least={self.at_least}": (tokens[texts] < self.at_least).any(),
        }
        for problem in (problem for problem, occurs in problems.items() if occurs):
            warn(f"Evidence: {problem} (tokens={self.tokens}, at_most={self.at_most}).", TruncationWarning)


@dataclass(frozen=True)
class _Source:
    """A document with its windows."""

    document: Document
    passages: ChosenPassages
    worth: list[float]

    @classmethod
    def of(cls, document: Document, docno: Any, scores: Any, spans: Any, gain: float) -> "_Source":
        # A union of results has rows without windows.
        windows = [(int(start), int(end)) for start, end in spans] if np.ndim(scores) else []
        worth = np.asarray(scores if windows else [], dtype="float64") + gain
        if not windows or max(end for _, end in windows) > len(document):
            problem, advice = "end after its text: give text_field= and repeat= as", ""
            if not windows:
                problem, advice = (
                    "are missing: all rows need",
                    ", which of a + b only the rows of a have: rerank after it",
                )
            raise ValueError(f"Evidence: windows of {docno!r} {problem} those of a reranker with explain=True{advice}")
        if len(worth) != len(windows) or not np.isfinite(worth).all():
            raise ValueError(
                f"Evidence: the {len(windows)} windows of {docno!r} need a finite score each, not {scores}"
            )
        best = np.argsort(-worth, kind="stable").tolist()
        return cls(document, ChosenPassages(document.text, windows, best, is_complete=False), worth.tolist())

    def text(self, numbers: list[int]) -> str:
        excerpt = self.passages.excerpt(numbers, ends=False)
        return frames.on_lines(self.document.repeated, excerpt) if excerpt else ""
