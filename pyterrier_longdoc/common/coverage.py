"""How much text was read, of one pair and of a run; scores of a run and their explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from .frames import is_blank, strings
from .presentation import percent

CHOICES = ("max_windows=", "preselect=")
"""Prefixes of arguments that choose windows: what they leave out was asked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How much is read of a pair of a query and a text: a row of the table that a `Coverage` sums up.

    Attributes:
        query: the query.
        tokens: tokens of the text.
        tokens_read: tokens of the text in at least one window.
        windows: windows of the text.
        query_tokens: tokens of the query.
        query_tokens_read: tokens of the query that are read.
        query_cut_by: the argument that cuts the query, with its value.
        cut: tokens that are not read, of the text and of what is read with each window, by the argument that cuts them.
    """

    query: str
    tokens: int
    tokens_read: int
    windows: int
    query_tokens: int = 0
    query_tokens_read: int = 0
    query_cut_by: str = ""
    cut: Mapping[str, int] = field(default_factory=dict)


def tokens_in(windows: Sequence[tuple[int, int]]) -> int:
    """Return how many tokens are in at least one window; windows are in order."""
    read = end = 0
    for a, b in windows:
        read += max(0, b - max(a, end))
        end = max(end, b)
    return read


@dataclass
class Coverage:
    """How much was read of the texts of a run, and how many tokens the backbone computed: a sum of `Reading` rows.

    Two coverages are equal if the same text was read; how it was computed may differ.

    Tokens are those of the backbone; words for a served model or a function without a tokenizer.

    A text counts once for each of its queries, as `preselect` may read another part for each. So the figures of parts
    of a run, of workers for instance, add up to those of the whole.

    Attributes:
        documents: distinct pairs of a query and a text.
        documents_cut: texts of which at least one token was not read.
        tokens: tokens of all texts.
        tokens_read: tokens that were in at least one window.
        windows: windows of all texts.
        queries: distinct queries.
        queries_cut: queries of which at least one token was not read, for any text.
        query_tokens: tokens of all queries.
        query_tokens_read: tokens of queries that were read with every text.
        cut: tokens of texts, queries and titles that were not read, by the argument that cut them, with its value:
            `{"max_doc_len=1431": 5200, "max_query_len=32": 3}`. All code that cuts text adds it here.
        windows_cut: windows, each with a query, that a server says it has cut; scores from a cache do not count.
        tokens_encoded: tokens that went through the backbone, with queries and special tokens. Remembered windows do
            not count; tokens in several windows, or of a text with several queries, count each time.
        tokens_computed: `tokens_encoded` and the padding of batches and layouts.
        dtype: precision of the backbone, `"float32"` and so on; None where there is no backbone.
        runtime: the library that computed the backbone, `"torch"` or `"openvino"`; None where there is no backbone.
        rows: rows of the frame; in `fit` the rows that were drawn.
        rows_without_text: rows without text: None, NaN or no visible character in all text columns.
        rows_without_query: rows without a query.
        queries_empty: qids of rows without a query.
    """

    documents: int = 0
    documents_cut: int = 0
    tokens: int = 0
    tokens_read: int = 0
    windows: int = 0
    queries: int = 0
    queries_cut: int = 0
    query_tokens: int = 0
    query_tokens_read: int = 0
    cut: dict[str, int] = field(default_factory=dict)
    windows_cut: int = field(default=0, compare=False)
    tokens_encoded: int = field(default=0, compare=False)
    tokens_computed: int = field(default=0, compare=False)
    dtype: str | None = field(default=None, compare=False)
    runtime: str | None = field(default=None, compare=False)
    rows: int = field(default=0, compare=False)
    rows_without_text: int = field(default=0, compare=False)
    rows_without_query: int = field(default=0, compare=False)
    queries_empty: int = field(default=0, compare=False)

    @classmethod
    def total(cls, parts: Iterable[Coverage]) -> Coverage:
        """Add the counts of several runs; a query of several runs counts in each."""
        sums = cls()
        for part in parts:
            for name in (f.name for f in fields(cls) if f.name not in ("dtype", "runtime", "cut")):
                setattr(sums, name, getattr(sums, name) + getattr(part, name))
            for argument, tokens in part.cut.items():
                sums.add_cut(argument, tokens)
            sums.dtype, sums.runtime = sums.dtype or part.dtype, sums.runtime or part.runtime
        return sums

    @property
    def share_read(self) -> float:
        """Tokens read / tokens of all texts, each for each of its queries; 1.0 where there are no tokens."""
        return self.tokens_read / self.tokens if self.tokens else 1.0

    @property
    def windows_per_document(self) -> float:
        """Mean number of windows of a text; 0.0 without texts."""
        return self.windows / self.documents if self.documents else 0.0

    @property
    def padding(self) -> float:
        """Share of padding in the computed tokens; 0.0 without any."""
        return 1.0 - self.tokens_encoded / self.tokens_computed if self.tokens_computed else 0.0

    @property
    def lost(self) -> dict[str, int]:
        """`cut` without `max_windows` and `preselect`, which leave text out on purpose."""
        return {argument: tokens for argument, tokens in self.cut.items() if not argument.startswith(CHOICES)}

    def add(self, rows: Iterable[Reading]) -> None:
        """Add up the rows of distinct pairs, all at once: a query counts as far as it was read with every text."""
        queries: dict[str, Reading] = {}
        for row in rows:
            self.documents += 1
            self.documents_cut += row.tokens_read < row.tokens
            self.tokens += row.tokens
            self.tokens_read += row.tokens_read
            self.windows += row.windows
            for argument, tokens in row.cut.items():
                self.add_cut(argument, tokens)
            queries[row.query] = min(row, queries.get(row.query, row), key=lambda each: each.query_tokens_read)
        for row in queries.values():
            self.queries += 1
            self.queries_cut += row.query_tokens_read < row.query_tokens
            self.query_tokens += row.query_tokens
            self.query_tokens_read += row.query_tokens_read
            self.add_cut(row.query_cut_by, row.query_tokens - row.query_tokens_read)

    def add_cut(self, argument: str, tokens: int) -> None:
        """Count tokens that an argument cut, named with its value."""
        if tokens:
            self.cut[argument] = self.cut.get(argument, 0) + tokens

    def add_rows(self, frame: pd.DataFrame, no_text: Iterable[bool]) -> None:
        """Count the rows of a frame, those without text, and those without a query."""
        no_query = np.array(list(map(is_blank, strings(frame["query"], "query"))), dtype=bool)
        self.rows += len(frame)
        self.rows_without_text += sum(map(int, no_text))
        self.rows_without_query += int(no_query.sum())
        self.queries_empty += frame["qid"][no_query].nunique()

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, precision and runtime, and the three ratios, by name: one row of a table."""
        ratios = ("share_read", "windows_per_document", "padding")
        return asdict(self) | {name: getattr(self, name) for name in ratios}

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self.as_dict().items() if name != "cut" and value not in (0, None)}
        shown |= {f"tokens cut by {argument}": tokens for argument, tokens in self.cut.items()}
        return pd.DataFrame({"coverage": pd.Series(shown, dtype=object)}).to_html(float_format="{:.3f}".format)

    def __str__(self) -> str:
        parts = [
            f"{self.documents} documents, {self.documents_cut} of them cut: {self.tokens_read} of {self.tokens} tokens "
            f"read ({percent(self.share_read)}), {self.windows_per_document:.1f} windows per document",
            f"{self.queries} queries, {self.queries_cut} of them cut",
        ]
        if self.cut:
            cuts = (f"{tokens} tokens cut by {argument}" for argument, tokens in self.cut.items())
            parts.append(f"not read: {', '.join(cuts)}")
        if self.windows_cut:
            parts.append(f"{self.windows_cut} windows cut by the server")
        if self.rows_without_text + self.rows_without_query:
            parts.append(
                f"of {self.rows} rows {self.rows_without_text} have no text, {self.rows_without_query} no query"
            )
        if self.tokens_computed:
            padding = f"{percent(self.padding)} of them padding"
            by = f"{self.dtype} by {self.runtime}" if self.runtime not in (None, "torch") else self.dtype
            parts.append(f"{self.tokens_computed} tokens computed in {by}, {padding}")
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class Explanation:
    """How the windows of one document were scored.

    Attributes:
        spans: characters `(start, end)` of each window in the text, or of each block in the windows of `KeyBlocks`.
        scores: score that the document would have if it were that window, or the window of that block, alone.
        weights: attention of the document's score over that window; None for a head without attention.
        term_scores: each query token and its part in the score; None for a head that cannot tell.
        extra: what some encoders alone explain, by column.
    """

    spans: list[tuple[int, int]]
    scores: list[float]
    weights: list[float] | None
    term_scores: list[tuple[str, float]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Index of the window with the highest score, the first of several."""
        return int(np.argmax(self.scores))


def columns_of(explanations: Sequence[Explanation], extra: Sequence[str] = ()) -> dict[str, list[Any] | np.ndarray]:
    """Return explanations as columns of a frame, those of an encoder's own (`extra`) included."""
    best = np.array([explanation.spans[explanation.best] for explanation in explanations], "int64").reshape(-1, 2)
    return {
        "window_scores": [explanation.scores for explanation in explanations],
        "window_weights": [explanation.weights for explanation in explanations],
        "window_spans": [explanation.spans for explanation in explanations],
        "best_start": best[:, 0],
        "best_end": best[:, 1],
        "term_scores": [explanation.term_scores for explanation in explanations],
        **{name: [explanation.extra[name] for explanation in explanations] for name in extra},
    }


class Scored:
    """The results of R pairs of query and text: `(R,)` scores and, with `explain`, R explanations."""

    def __init__(self, rows: int, coverage: Coverage) -> None:
        self.scores = np.full(rows, np.nan)
        self.explanations: list[Any] = []
        self.coverage = coverage

    def add(
        self, rows: Iterable[list[int]], values: np.ndarray, explanations: Sequence[Explanation] | None = None
    ) -> None:
        """Add the `(P,)` scores of P pairs; `rows` has the rows of each pair."""
        if explanations is not None and not self.explanations:
            self.explanations = [None] * len(self.scores)
        for number, (places, value) in enumerate(zip(rows, values, strict=True)):
            for row in places:
                self.scores[row] = value
                if explanations is not None:
                    self.explanations[row] = explanations[number]

    def checked(self) -> Scored:
        """Return this; raise FloatingPointError that names the first bad row if a score is not finite."""
        bad = np.flatnonzero(~np.isfinite(self.scores))
        if len(bad):
            raise FloatingPointError(
                f"{len(bad)} of {len(self.scores)} scores are not finite, the first in row {bad[0]}; "
                f"with dtype='float16' use bfloat16 or float32; otherwise a weight of the model is not finite"
            )
        return self
