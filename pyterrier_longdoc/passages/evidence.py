"""What a ranking hands on to a reader: the documents' best windows, within one budget of tokens for a query."""

# Without `from __future__ import annotations`: what the fields are must be known in the modules of subclasses too.

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, validate
from ..common.frames import (
    Text,
    TextField,
    TruncationWarning,
    as_document,
    documents_of,
    on_lines,
    validated,
    window_fields,
)
from ..common.language import Counter, noted_tokenizer, token_counter
from ..common.presentation import Presented, changed_arguments
from ..common.warnings import warn
from .excerpts import Budget, ChosenPassages

WINDOWS = ("window_scores", "window_spans")
"""The columns with the windows of each document."""


@dataclass(eq=False, repr=False)
class Evidence(Presented, pt.Transformer):
    """Replaces texts by their best windows: a budget of tokens over all documents of a query, spent on the best scores.

    Reads results of a reranker with `explain=True`: a cross-encoder, a `BiEncoder`, or one of these over a served
    model. The windows of all documents of a query are taken from the highest `window_scores` to the lowest, equal ones
    in the order of ranks. One that is too large for what is left is skipped, and smaller ones behind it may still fit.
    Text that windows share is handed on, and counted, once.

    Returns the same rows, order, index, scores and ranks. The text is the document's windows in its order, with `[...]`
    where text between them was left out, and empty for a document that gets nothing. New columns: `evidence_spans`
    (characters `(start, end)` of the parts in the document's text) and `evidence_tokens` (of the new text).

    Args:
        tokens: of all texts of a query together, `[...]` and titles included. 2,000 are some 1,500 words, about three
            pages.
        at_least: give each document, in the order of ranks, its best windows until it has so many tokens, before the
            rest is spent. A warning says where the budget or the document has no more.
        at_most: tokens of one document; None for no limit.
        tokenizer: counts tokens: a Hugging Face tokenizer or its name, a tiktoken encoding or a function, such as that
            of the language model that reads the text. None for the tokenizer of the reranker, which notes its name in
            the frame's `attrs`; words for a served model without one.
        text_field: the column or columns that the reranker reads. The new text is in the one that is cut into windows,
            or in `text` where several are.
        repeat: the columns whose text is read with each window, as for the reranker: each is a line before the
            evidence of a document, unless that is empty.
        text_loader: supplies the text where the column is absent; as for the reranker.

    Example:
        `bm25 >> ld.MaxP(explain=True) >> ld.Evidence(tokens=2000)`.
    """

    tokens: int = argument(2000, at_least=1)
    _: KW_ONLY
    at_least: int = argument(0, at_least=0, at_most="tokens")
    at_most: int | None = argument(None, at_least=1)
    tokenizer: Any = None
    text_field: TextField = "text"
    repeat: TextField | None = None
    text_loader: Any = None

    def __post_init__(self) -> None:
        validate(self)
        window_fields(self.text_field, self.repeat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(changed_arguments(self, ('tokenizer', 'text_loader')))})"

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with the evidence as text.

        Raises:
            pt.validate.InputValidationError: if a column is missing; the message says where windows come from.
            ValueError: if a row has no windows, or they end after its text, or if nothing says whose tokens to count.
        """
        sources, count = self._sources(inp), self._counter(inp)
        rows = inp.reset_index(drop=True)
        rows = rows.sort_values("rank", kind="stable") if "rank" in rows else rows
        taken: dict[int, list[int]] = {}
        for of_query in rows.groupby("qid", sort=False, dropna=False).groups.values():
            taken |= self._spend({row: sources[row] for row in of_query}, count)
        texts = [source.text(taken[row]) for row, source in enumerate(sources)]
        spans = [source.passages.pieces(taken[row]) for row, source in enumerate(sources)]
        tokens = np.array(count(texts), dtype="int64")
        if len(inp):
            self._warn(inp["qid"], sources, tokens)
        column, *others = window_fields(self.text_field, self.repeat)
        out = inp.assign(**{"text" if others else column: texts})
        return out.assign(evidence_spans=pd.Series(spans, index=inp.index, dtype=object), evidence_tokens=tokens)

    def _sources(self, inp: pd.DataFrame) -> list["_Source"]:
        """Check the columns, and return the document and windows of each row."""
        try:
            validated(inp, self.text_field, self.text_loader, self, extra=WINDOWS)
        except pt.validate.InputValidationError as error:
            if {"qid", "docno"} <= set(inp.columns) and (absent := [name for name in WINDOWS if name not in inp]):
                advice = (
                    "give the reranker before it explain=True; that is any of this package, over a served model or "
                    "another reranker too: ld.MaxP(ld.ScoreServer(...)), ld.MaxP(ld.PairScorer(...))"
                )
                error.args = (f"Evidence lacks the column(s) {', '.join(absent)}: {advice}",)
            raise
        documents = documents_of(inp, self.text_field, self.repeat, self.text_loader) if len(inp) else []
        lacking = inp[inp[list(WINDOWS)].isna().any(axis=1)]
        if len(lacking):
            raise ValueError(
                f"Evidence: {len(lacking)} of {len(inp)} rows have no windows, e.g. {lacking['docno'].iloc[0]!r} of "
                f"query {lacking['qid'].iloc[0]!r}: all must come from a reranker with explain=True"
            )
        columns = (inp[name].tolist() for name in ("docno", *WINDOWS))
        return [_Source.of(*row) for row in zip(documents, *columns, strict=True)]

    def _counter(self, inp: pd.DataFrame) -> Counter:
        return token_counter(noted_tokenizer(inp) if self.tokenizer is None and len(inp) else self.tokenizer)

    def _spend(self, sources: dict[int, "_Source"], count: Counter) -> dict[int, list[int]]:
        """Return the windows of each row of a query, whose rows are in the order of ranks."""
        budget = Budget(self.tokens, lambda row, numbers: count([sources[row].text(numbers)])[0], self.at_most)
        for row, source in sources.items():
            for number in source.passages.best:
                if budget.spent[row] < self.at_least:
                    budget.take(row, number)
        windows = [(score, row, i) for row, source in sources.items() for i, score in enumerate(source.scores)]
        for _, row, number in sorted(windows, key=lambda window: -window[0]):  # among equals the order of ranks
            if budget.left > 0:
                budget.take(row, number)
        return {row: budget.taken[row] for row in sources}

    def _warn(self, qids: pd.Series, sources: list["_Source"], tokens: np.ndarray) -> None:
        """Warn of queries that get nothing, and of documents with less than they were promised."""
        texts = np.array([bool(source.passages.text.strip()) for source in sources])
        by_query = pd.DataFrame({"text": texts, "given": tokens > 0}).groupby(qids.to_numpy(), dropna=False).any()
        if empty := int((by_query["text"] & ~by_query["given"]).sum()):
            limits = ", ".join(change for change in changed_arguments(self, ()) if "at_most" in change)
            limits = ", ".join(filter(None, [f"tokens={self.tokens}", limits]))
            message = f"{empty} of {len(by_query)} queries get no text: none of their windows fits ({limits})"
            warn(f"Evidence: {message}.", TruncationWarning)
        if short := int((texts & (tokens < self.at_least)).sum()):
            message = f"{short} of {len(sources)} documents have fewer than at_least={self.at_least} tokens"
            warn(f"Evidence: {message}: raise tokens={self.tokens}, or hand on fewer documents.", TruncationWarning)


@dataclass(frozen=True)
class _Source:
    """A document with its windows."""

    title: str
    passages: ChosenPassages
    scores: Sequence[float]

    @classmethod
    def of(cls, text: Text, docno: Any, scores: Sequence[float], spans: Sequence[Sequence[int]]) -> "_Source":
        document, windows = as_document(text), [(int(start), int(end)) for start, end in spans]
        if max((end for _, end in windows), default=0) > len(document):
            raise ValueError(
                f"Evidence: windows of {docno!r} end after its text of {len(document)} characters: give the reranker's "
                f"text_field=, repeat= and text_loader="
            )
        best = np.argsort(-np.asarray(scores, dtype="float64"), kind="stable").tolist()
        return cls(document.repeated, ChosenPassages(document.text, windows, best, is_complete=False), scores)

    def text(self, numbers: list[int]) -> str:
        excerpt = self.passages.excerpt(numbers, ends=False)
        return on_lines(self.title, excerpt) if excerpt else ""
