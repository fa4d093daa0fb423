"""What a run has read, and how it came to its scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from .language import counted
from .presentation import percent


@dataclass(frozen=True)
class Reading:
    """What was read of one text.

    Attributes:
        tokens: its tokens.
        tokens_read: tokens that were in at least one window.
        windows: its windows.
        repeated: tokens of what is read with each of them.
        repeated_read: tokens of it that were read.
    """

    tokens: int
    tokens_read: int
    windows: int
    repeated: int = 0
    repeated_read: int = 0

    @classmethod
    def through(cls, windows: list[tuple[int, int]], tokens: int, repeated: tuple[int, int] = (0, 0)) -> Reading:
        """What is read of a text.

        Args:
            windows: its windows, in order.
            tokens: its tokens.
            repeated: tokens of what is read with each window, and how many of them are read.
        """
        read = end = 0
        for a, b in windows:
            read += max(0, b - max(a, end))
            end = max(end, b)
        return cls(tokens, read, len(windows), *repeated)


class LeftOut(NamedTuple):
    """Why tokens of one text were not read: see the attributes of `Coverage`."""

    beyond: int = 0
    passed_over: int = 0


@dataclass
class Coverage:
    """What was read of the texts of a run, and what the backbone computed for it.

    Two coverages are equal if the same was read; how it was computed may differ.

    Tokens are those of the backbone; words for a served model or a function without a tokenizer.

    A text counts once for each of its queries: for each of them another part of it may be read (`preselect`), and so
    the figures of parts of a run, of workers for instance, add up to those of the whole.

    Attributes:
        documents: texts, each for each of its queries: distinct pairs of a query and a text.
        documents_cut: texts of which at least one token was not read.
        tokens: tokens of all texts.
        tokens_read: tokens that were in at least one window.
        tokens_beyond: of those that were not, the ones after `max_doc_len`.
        tokens_passed_over: of those that were not, the ones that `max_windows` or `preselect` left out.
        windows: windows of all texts.
        repeats_cut: texts of which what is read with each window was not read to its end.
        repeated_tokens: tokens of what is read with each window (titles), each counted once for its pair.
        repeated_tokens_read: tokens of that which were read.
        windows_cut: of the windows that a served model was asked for, each with a query, those that it is known to have
            cut; what is read from a score cache does not count.
        queries: distinct queries.
        queries_cut: queries that were not read to their end, for some text at least.
        query_tokens: tokens of all queries.
        query_tokens_read: tokens of queries that were read with every text.
        tokens_encoded: tokens that went through the backbone, with queries and special tokens; less for what was
            remembered, more where windows overlap or a text was read for several queries.
        tokens_computed: the same with the padding of batches and layouts.
        dtype: precision of the backbone, `"float32"` and so on; None where there is no backbone.
        rows: rows of the frame; in `fit`, of texts that a `text_loader` supplies, those that were drawn.
        rows_without_text: of these, the ones without text: None, NaN or white space in all text columns.
        rows_without_query: of these, the ones without a query.
        queries_empty: qids of these.
    """

    documents: int = 0
    documents_cut: int = 0
    tokens: int = 0
    tokens_read: int = 0
    tokens_beyond: int = 0
    tokens_passed_over: int = 0
    windows: int = 0
    repeats_cut: int = 0
    repeated_tokens: int = 0
    repeated_tokens_read: int = 0
    windows_cut: int = field(default=0, compare=False)
    queries: int = 0
    queries_cut: int = 0
    query_tokens: int = 0
    query_tokens_read: int = 0
    tokens_encoded: int = field(default=0, compare=False)
    tokens_computed: int = field(default=0, compare=False)
    dtype: str | None = field(default=None, compare=False)
    rows: int = field(default=0, compare=False)
    rows_without_text: int = field(default=0, compare=False)
    rows_without_query: int = field(default=0, compare=False)
    queries_empty: int = field(default=0, compare=False)

    @classmethod
    def total(cls, parts: Iterable[Coverage]) -> Coverage:
        """Of several runs as one: counts are added, so that a query that is in several counts in each."""
        whole = cls()
        for part in parts:
            for each in fields(cls):
                if each.name != "dtype":
                    setattr(whole, each.name, getattr(whole, each.name) + getattr(part, each.name))
            whole.dtype = whole.dtype or part.dtype
        return whole

    @property
    def share_read(self) -> float:
        """Tokens read / tokens of all texts, each for each of its queries; 1.0 where there are no tokens."""
        return self.tokens_read / self.tokens if self.tokens else 1.0

    @property
    def is_cut(self) -> bool:
        """Whether any text or query, or what is read with each window, was not read to its end."""
        return bool(self.documents_cut or self.queries_cut or self.repeats_cut or self.windows_cut)

    @property
    def windows_per_document(self) -> float:
        """Mean number of windows of a text; 0.0 without texts."""
        return self.windows / self.documents if self.documents else 0.0

    @property
    def padding(self) -> float:
        """Share of padding in the tokens that were computed; 0.0 where nothing was."""
        return 1.0 - self.tokens_encoded / self.tokens_computed if self.tokens_computed else 0.0

    @property
    def tokens_lost(self) -> int:
        """Tokens of texts that were not read although nothing chose among the windows."""
        return self.tokens - self.tokens_read - self.tokens_passed_over

    def add(self, reading: Reading, left_out: LeftOut = LeftOut()) -> None:  # noqa: B008 - frozen
        """Counts one text."""
        self.tokens_beyond += left_out.beyond
        self.tokens_passed_over += left_out.passed_over
        self.documents += 1
        self.documents_cut += reading.tokens_read < reading.tokens
        self.tokens += reading.tokens
        self.tokens_read += reading.tokens_read
        self.windows += reading.windows
        self.repeats_cut += reading.repeated_read < reading.repeated
        self.repeated_tokens += reading.repeated
        self.repeated_tokens_read += reading.repeated_read

    def add_queries(self, lengths: list[int], limit: int) -> None:
        """Counts queries of these lengths in tokens, of which at most `limit` are read."""
        self.queries += len(lengths)
        self.queries_cut += sum(length > limit for length in lengths)
        self.query_tokens += sum(lengths)
        self.query_tokens_read += sum(min(length, limit) for length in lengths)

    def as_dict(self) -> dict[str, Any]:
        """All counts, the precision, and the three ratios, by name: one row of a table."""
        ratios = ("share_read", "windows_per_document", "padding")
        return asdict(self) | {name: getattr(self, name) for name in ratios}

    def losses(self, of_documents: str = "", of_queries: str = "", of_repeats: str = "") -> str:
        """How many tokens were not read and which arguments cut them, in words; empty if all were, or were passed over.

        Args:
            of_documents: the arguments that cut documents.
            of_queries: the argument that cuts queries.
            of_repeats: the argument that cuts what is read with each window.
        """
        parts = []
        if self.tokens_lost:
            parts.append(
                f"{self.tokens_lost} of {self.tokens} tokens of documents ({percent(self.tokens_lost / self.tokens)}), "
                f"cut by {of_documents}"
            )
        if self.queries_cut:
            lost = self.query_tokens - self.query_tokens_read
            parts.append(
                f"{lost} of {self.query_tokens} tokens of queries ({percent(lost / self.query_tokens)}, in "
                f"{self.queries_cut} of {self.queries} queries), cut by {of_queries}"
            )
        if self.repeats_cut:
            lost = self.repeated_tokens - self.repeated_tokens_read
            share = percent(lost / self.repeated_tokens)
            parts.append(
                f"{lost} of {self.repeated_tokens} tokens of titles ({share}, in "
                f"{self.repeats_cut} of {self.documents} documents), cut by {of_repeats}"
            )
        if self.windows_cut:
            parts.append(f"{self.windows_cut} windows to their end, cut by the server, which takes no longer inputs")
        return "; ".join(parts)

    def empties(self, columns: str) -> str:
        """How many rows have no text, or no query, in words; empty if all have both.

        Args:
            columns: the text columns, in words.
        """
        of_query = f"column 'query'; {counted(self.queries_empty, 'qid', 'qids')}"
        of = [(self.rows_without_text, "text", columns), (self.rows_without_query, "query", of_query)]
        return ", ".join(f"{n} of {self.rows} rows have no {what} ({where})" for n, what, where in of if n)

    def __str__(self) -> str:
        return (
            f"{self.documents} documents, {self.documents_cut} of them cut: {self.tokens_read} of {self.tokens} tokens "
            f"read ({percent(self.share_read)}), {self.windows_per_document:.1f} windows per document"
            f"{self._repeated()}; {self.queries} queries, {self.queries_cut} of them cut"
            f"{self._cut_elsewhere()}{self._empty()}{self._computed()}"
        )

    def _repeated(self) -> str:
        if not self.repeated_tokens:
            return ""
        return (
            f", each with its title, cut in {self.repeats_cut} documents: {self.repeated_tokens_read} of "
            f"{self.repeated_tokens} tokens read"
        )

    def _cut_elsewhere(self) -> str:
        return f"; {self.windows_cut} windows cut by the server" if self.windows_cut else ""

    def _empty(self) -> str:
        if not self.rows_without_text + self.rows_without_query:
            return ""
        return f"; of {self.rows} rows {self.rows_without_text} have no text, {self.rows_without_query} no query"

    def _computed(self) -> str:
        if not self.tokens_computed:
            return ""
        return f"; {self.tokens_computed} tokens computed in {self.dtype}, {percent(self.padding)} of them padding"


@dataclass(frozen=True, eq=False)
class Explanation:
    """How the windows of one document were scored.

    Attributes:
        spans: characters `(start, end)` of each window in the text.
        scores: score that the document would have if it were that window alone.
        weights: attention of the document's score over its windows; None for a head without attention.
        query_terms: each query token and what it adds to the score; None for a head that cannot tell.
    """

    spans: list[tuple[int, int]]
    scores: list[float]
    weights: list[float] | None
    query_terms: list[tuple[str, float]] | None = None

    @property
    def best(self) -> int:
        """Index of the window with the highest score, the first of several."""
        return int(np.argmax(self.scores))


class Scored:
    """What a model makes of R pairs of query and text.

    Args:
        rows: R.
        coverage: of the run.

    Attributes:
        scores: `(R,)` float64.
        explanations: R of them; none if they were not asked for.
    """

    def __init__(self, rows: int, coverage: Coverage) -> None:
        self.scores = np.full(rows, np.nan)
        self.explanations: list[Any] = []
        self.coverage = coverage

    def add(
        self, rows: Iterable[list[int]], values: np.ndarray, explanations: Sequence[Explanation] | None = None
    ) -> None:
        """Takes the scores of P pairs.

        Args:
            rows: for each pair the rows that ask for it.
            values: `(P,)` scores.
            explanations: of each; None if they were not asked for.
        """
        if explanations is not None and not self.explanations:
            self.explanations = [None] * len(self.scores)
        for number, (asking, value) in enumerate(zip(rows, values, strict=True)):
            for row in asking:
                self.scores[row] = value
                if explanations is not None:
                    self.explanations[row] = explanations[number]

    def checked(self) -> Scored:
        """This, or FloatingPointError that names the first bad row, if any score is not finite."""
        bad = np.flatnonzero(~np.isfinite(self.scores))
        if len(bad):
            raise FloatingPointError(
                f"{len(bad)} of {len(self.scores)} scores are not finite, the first in row {bad[0]}; "
                f"with dtype='float16' use bfloat16 or float32; otherwise a weight of the model is not finite"
            )
        return self


class Work:
    """Counts what a run computes: tokens for its coverage, and for a progress bar how much of the work is done.

    Args:
        coverage: of the run.
        bar: a tqdm bar, which starts anew; None for no bar.
        total: the work of the run, in any unit.
    """

    def __init__(self, coverage: Coverage, bar: Any = None, total: float = 0.0) -> None:
        self.coverage, self.bar = coverage, bar
        self._before = self._block = self._share = 0.0
        if bar is not None:
            bar.reset(total=max(1, round(total)))

    def begin(self, amount: float) -> None:
        """A block of so much work begins; the one before is done, also where nothing had to be computed."""
        self._before += self._block
        self._block, self._share = amount, 0.0
        self._show()

    def count(self, tokens: int, computed: int) -> None:
        """Tokens went through the backbone: real ones, and with padding."""
        self.coverage.tokens_encoded += tokens
        self.coverage.tokens_computed += computed

    def advance(self, tokens: int, of: int) -> None:
        """So many of the block's tokens are done."""
        self._share += tokens / of
        self._show()

    def end(self) -> None:
        """All is done."""
        if self.bar is not None:
            self.bar.update(self.bar.total - self.bar.n)

    def _show(self) -> None:
        if self.bar is not None:
            done = round(self._before + min(1.0, self._share) * self._block)
            self.bar.update(max(0, min(done, self.bar.total) - self.bar.n))
