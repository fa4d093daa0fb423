"""Select the best windows of the ranked documents, within a token budget per query."""

# No `from __future__ import annotations`: annotations must also be evaluable in the modules of subclasses.

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
from ..modelling.excerpts import MARK, Budget, ChosenPassages
from ..modelling.words import Words

WINDOWS = ("window_scores", "window_spans")
"""The columns that describe the windows of each document."""


@dataclass(eq=False, repr=False)
class Evidence(NotebookMixin, pt.Transformer):
    """Replaces each text by its best windows, within a token budget shared by all documents of a query.

    The input is the output of a reranker of this package with `explain=True`. All windows of a query's documents are
    ranked by score (ties by document rank) and added while they fit. A window that exceeds the remaining budget is
    skipped; smaller ones after it can still be added. Text shared by overlapping windows is included and counted once.

    Rows, order, index, scores and ranks stay the same. The new text holds the document's selected windows in document
    order, with `[...]` where text between them was left out; it is empty if no window was selected. New columns:
    `evidence_spans` (characters `(start, end)` of the parts in the document's text) and `evidence_tokens` (the length
    of the new text). `window_field` becomes empty, because the windows refer to the old text.

    Args:
        tokens: the token budget for all texts of a query, including `[...]` and titles. 2,000 are about three pages.
        document_weight: windows are ranked by their `window_scores` plus this weight times the `score` of their
            document. 0 ignores document scores; a large value uses up one document after another.
        at_least: before anything else is added, give each document (by rank) its best windows until it has this many
            tokens. A warning is issued if documents have fewer.
        at_most: the maximum number of tokens of a document; None for no limit.
        tokenizer: counts the tokens, ideally as the language model that reads the text does: a Hugging Face tokenizer
            or its name, or a function of a text. None uses the reranker's tokenizer, named in the column
            `window_tokenizer`, or counts words for a function without one.
        text_field: the `text_field` of the reranker. The new text replaces the column that was cut into windows, or
            goes into `text` if there were several.
        repeat: the `repeat` of the reranker: each of these columns becomes a line before the evidence.

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
            pt.validate.InputValidationError: if a column is missing.
            ValueError: if a row has no windows or those of another text, or if the tokenizer is unknown.
        """
        try:
            frames.validated(inp, self.text_field, None, self, extra=("score", *WINDOWS))
        except pt.validate.InputValidationError as error:
            if not set(WINDOWS) <= set(inp.columns):
                advice = "set explain=True in the reranker before it, or wrap one without in ld.MaxP(ld.PairScorer())"
                error.args = (f"Evidence lacks {' and '.join(WINDOWS)}: {advice}",)
            raise
        frames.check_windows(inp, self.text_field, self.repeat)
        documents = frames.documents_of(inp, self.text_field, self.repeat, None) if len(inp) else []
        gains = np.zeros(len(inp))
        if self.document_weight:
            gains += self.document_weight * frames.numeric(inp, "score", "Evidence", "or give document_weight=0")
        placed = frames.with_windows_in(inp, [document.text for document in documents])
        columns = [placed[name].tolist() for name in ("docno", *WINDOWS)]
        sources = [_Source.of(*row) for row in zip(documents, *columns, gains, strict=True)]
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

    def _counter(self, inp: pd.DataFrame) -> Counter:
        if self.tokenizer is not None or not len(inp):
            return token_counter(self.tokenizer)
        names = set(inp["window_tokenizer"].dropna()) if "window_tokenizer" in inp else set()
        if len(names) != 1:
            raise ValueError(f"Evidence: window_tokenizer names {len(names)} tokenizers instead of 1: set tokenizer=")
        return token_counter(names.pop() or Words())

    def _spend(self, sources: dict[int, "_Source"], count: Counter) -> dict[int, tuple[list[int], int]]:
        """Return the windows and tokens selected for each row of a query; rows are ordered by rank."""
        # The counter may add special tokens to each text.
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

        windows = [(worth, row, i) for row, source in sources.items() for i, worth in enumerate(source.worth)]
        # Counting the whole text again for each window takes quadratic time, so it is done only if the sum of the parts
        # underestimates its tokens.
        for estimate in (parts_cost, cost):
            budget = Budget(self.tokens, estimate, at_most=self.at_most)
            for row, source in sources.items():
                for number in source.passages.best:
                    if budget.spent[row] < self.at_least:
                        budget.take(row, number)
            for _, row, number in sorted(windows, key=lambda window: -window[0]):  # ties: by rank
                if budget.left > 0:
                    budget.take(row, number)
            given = {row: (budget.taken[row], cost(row, budget.taken[row])) for row in sources}
            spent = [tokens for _, tokens in given.values()]
            if sum(spent) <= self.tokens and max(spent) <= (self.at_most or self.tokens):
                break
        return given

    def _warn(self, qids: pd.Series, texts: list[bool], tokens: np.ndarray) -> None:
        """Warn about queries without any evidence and documents with fewer than `at_least` tokens."""
        given = pd.Series(tokens[texts]).groupby(qids.to_numpy()[texts], dropna=False).sum()
        problems = {
            "some queries get no text, because none of their windows fits": (given == 0).any(),
            f"some documents have fewer tokens than at_least={self.at_least}": (tokens[texts] < self.at_least).any(),
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
        # The union of two results has rows without windows.
        windows = [(int(start), int(end)) for start, end in spans] if np.ndim(scores) else []
        worth = np.asarray(scores if windows else [], dtype="float64") + gain
        problem = None
        if not windows:
            problem = "are missing: rerank all rows with explain=True (in a + b, only the rows of a have windows)"
        elif max(end for _, end in windows) > len(document):
            problem = "end after its text: use the reranker's text_field= and repeat="
        elif len(worth) != len(windows) or not np.isfinite(worth).all():
            problem = f"must have one finite score each, not {scores}"
        if problem is not None:
            raise ValueError(f"Evidence: windows of {docno!r} {problem}")
        best = np.argsort(-worth, kind="stable").tolist()
        return cls(document, ChosenPassages(document.text, windows, best, is_complete=False), worth.tolist())

    def text(self, numbers: list[int]) -> str:
        excerpt = self.passages.excerpt(numbers, ends=False)
        return frames.join_lines(self.document.repeated, excerpt) if excerpt else ""
