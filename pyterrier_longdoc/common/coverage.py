"""Coverage (how much text was read), scores and explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from .presentation import percent

CHOICES = ("max_windows=", "preselect=")
"""Prefixes of arguments that select windows, and so leave out text on purpose."""


@dataclass(frozen=True, slots=True)
class PairCoverage:
    """How much of a query-text pair is read; `Coverage` is a sum over such rows.

    Attributes:
        query: the query.
        tokens: the number of tokens of the text.
        tokens_read: the number of tokens of the text in at least one window.
        windows: the number of windows of the text.
        query_tokens: the number of tokens of the query.
        query_tokens_read: the number of tokens of the query after truncation.
        query_truncated_by: the argument that truncates the query, with its value.
        truncated: unread tokens (of the text and of repeated columns) by the argument that truncates them.
    """

    query: str
    tokens: int
    tokens_read: int
    windows: int
    query_tokens: int = 0
    query_tokens_read: int = 0
    query_truncated_by: str = ""
    truncated: Mapping[str, int] = field(default_factory=dict)


def tokens_in(windows: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens in at least one window; the windows must be in order."""
    read = end = 0
    for a, b in windows:
        read += max(0, b - max(a, end))
        end = max(end, b)
    return read


@dataclass
class Coverage:
    """How much of the texts of a run was read, and how many tokens the backbone processed.

    Two coverages are equal if the same text was read, however it was computed.

    Tokens are those of the backbone, or words for a function without a tokenizer.

    Each query-text pair counts once, because `preselect` may read different parts for different queries. The figures of
    parts of a run, e.g. of several workers, therefore add up to those of the run.

    Attributes:
        pairs: distinct pairs of a query and a text.
        pairs_truncated: pairs with at least one unread token of the text.
        tokens: tokens of the texts.
        tokens_read: tokens in at least one window.
        windows: windows of the texts.
        queries: distinct queries.
        queries_truncated: queries with at least one unread token, for any text.
        query_tokens: tokens of the queries.
        query_tokens_read: tokens of the queries that were read with every text.
        truncated: unread tokens of texts, queries and titles by the argument that truncated them, with its value:
            `{"max_doc_len=1431": 5200, "max_query_len=32": 3}`.
        tokens_encoded: tokens processed by the backbone, including queries and special tokens. Cached windows do not
            count; tokens in several windows, or of a text with several queries, count each time.
        tokens_computed: `tokens_encoded` plus the padding of batches and layouts.
        longest_input: tokens of the longest input that the backbone processed, without padding.
        dtype: the precision of the backbone, e.g. `"float32"`; None without a backbone.
        runtime: the library that ran the backbone, `"torch"` or `"openvino"`; None without a backbone.
        rows: rows of the frame; in `fit`, the sampled rows.
        rows_without_text: rows without text: None, NaN or no visible character in all text columns.
        rows_without_query: rows without a query.
        queries_empty: distinct qids of rows without a query.
    """

    pairs: int = 0
    pairs_truncated: int = 0
    tokens: int = 0
    tokens_read: int = 0
    windows: int = 0
    queries: int = 0
    queries_truncated: int = 0
    query_tokens: int = 0
    query_tokens_read: int = 0
    truncated: dict[str, int] = field(default_factory=dict)
    tokens_encoded: int = field(default=0, compare=False)
    tokens_computed: int = field(default=0, compare=False)
    longest_input: int = field(default=0, compare=False)
    dtype: str | None = field(default=None, compare=False)
    runtime: str | None = field(default=None, compare=False)
    rows: int = field(default=0, compare=False)
    rows_without_text: int = field(default=0, compare=False)
    rows_without_query: int = field(default=0, compare=False)
    queries_empty: int = field(default=0, compare=False)

    @classmethod
    def total(cls, parts: Iterable[Coverage]) -> Coverage:
        """Add the counts of several runs; a query in several runs counts in each of them."""
        sums = cls()
        for part in parts:
            for name in {f.name for f in fields(cls)} - {"dtype", "runtime", "truncated", "longest_input"}:
                setattr(sums, name, getattr(sums, name) + getattr(part, name))
            sums.longest_input = max(sums.longest_input, part.longest_input)
            for argument, tokens in part.truncated.items():
                sums.add_truncated(argument, tokens)
            sums.dtype, sums.runtime = sums.dtype or part.dtype, sums.runtime or part.runtime
        return sums

    @property
    def share_read(self) -> float:
        """Share of tokens read over all query-text pairs; 1.0 if there are no tokens."""
        return self.tokens_read / self.tokens if self.tokens else 1.0

    @property
    def windows_per_document(self) -> float:
        """Mean number of windows per text; 0.0 without texts."""
        return self.windows / self.pairs if self.pairs else 0.0

    @property
    def padding(self) -> float:
        """Share of padding among `tokens_computed`; 0.0 if there are none."""
        return 1.0 - self.tokens_encoded / self.tokens_computed if self.tokens_computed else 0.0

    @property
    def lost(self) -> dict[str, int]:
        """`truncated` without `max_windows` and `preselect`, which leave out text on purpose."""
        return {argument: tokens for argument, tokens in self.truncated.items() if not argument.startswith(CHOICES)}

    def add(self, rows: Iterable[PairCoverage], queries: dict[str, PairCoverage]) -> None:
        """Add the rows of distinct pairs, and keep the shortest reading of each query for `add_queries`."""
        for row in rows:
            self.pairs += 1
            self.pairs_truncated += row.tokens_read < row.tokens
            self.tokens += row.tokens
            self.tokens_read += row.tokens_read
            self.windows += row.windows
            for argument, tokens in row.truncated.items():
                self.add_truncated(argument, tokens)
            queries[row.query] = min(queries.get(row.query, row), row, key=lambda each: each.query_tokens_read)

    def add_queries(self, queries: Mapping[str, PairCoverage]) -> None:
        """Add the queries of all pairs."""
        for row in queries.values():
            self.queries += 1
            self.queries_truncated += row.query_tokens_read < row.query_tokens
            self.query_tokens += row.query_tokens
            self.query_tokens_read += row.query_tokens_read
            self.add_truncated(row.query_truncated_by, row.query_tokens - row.query_tokens_read)

    def add_truncated(self, argument: str, tokens: int) -> None:
        """Count tokens truncated by an argument, named with its value."""
        if tokens:
            self.truncated[argument] = self.truncated.get(argument, 0) + tokens

    def add_rows(self, qids: pd.Series, no_query: Iterable[bool], no_text: Iterable[bool]) -> None:
        """Count rows, rows without text and rows without a query."""
        without_query = list(no_query)
        self.rows += len(qids)
        self.rows_without_text += sum(no_text)
        self.rows_without_query += sum(without_query)
        self.queries_empty += qids[without_query].nunique() if any(without_query) else 0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts, precision, runtime and the three ratios by name, as a row of a table."""
        ratios = ("share_read", "windows_per_document", "padding")
        return asdict(self) | {name: getattr(self, name) for name in ratios}

    def _repr_html_(self) -> str:
        shown = {
            name: value for name, value in self.as_dict().items() if name != "truncated" and value not in (0, None)
        }
        shown |= {f"tokens cut by {argument}": tokens for argument, tokens in self.truncated.items()}
        return pd.DataFrame({"coverage": pd.Series(shown, dtype=object)}).to_html(float_format="{:.3f}".format)

    def __str__(self) -> str:
        parts = [
            f"{self.pairs} documents, {self.pairs_truncated} of them cut: {self.tokens_read} of {self.tokens} tokens "
            f"read ({percent(self.share_read)}), {self.windows_per_document:.1f} windows per document",
            f"{self.queries} queries, {self.queries_truncated} of them cut",
        ]
        if self.truncated:
            cuts = (f"{tokens} tokens cut by {argument}" for argument, tokens in self.truncated.items())
            parts.append(f"not read: {', '.join(cuts)}")
        if self.rows_without_text + self.rows_without_query:
            parts.append(
                f"of {self.rows} rows {self.rows_without_text} have no text, {self.rows_without_query} no query"
            )
        if self.tokens_computed:
            padding = f"{percent(self.padding)} of them padding"
            by = f"{self.dtype} by {self.runtime}" if self.runtime not in (None, "torch") else self.dtype
            parts.append(f"{self.tokens_computed} tokens computed in {by}, {padding}")
        return "; ".join(parts)


@dataclass
class Scored:
    """The results of R query-text pairs.

    Attributes:
        scores: `(R,)`.
        coverage: how much was read.
        columns: with `explain`, the columns that explain the scores, each with R values.
    """

    scores: np.ndarray
    coverage: Coverage
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def checked(self) -> Scored:
        """Return the object itself; raise FloatingPointError with the first such row if a score is not finite."""
        bad = np.flatnonzero(~np.isfinite(self.scores))
        if len(bad):
            raise FloatingPointError(
                f"{len(bad)} of {len(self.scores)} scores are not finite, the first in row {bad[0]}; "
                f"with dtype='float16' use bfloat16 or float32; otherwise a weight of the model is not finite"
            )
        return self
