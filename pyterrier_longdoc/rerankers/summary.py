"""What a run of a reranker would read, what it would not, and about how long it would take: before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from ..common.caches import nothing_remembered
from ..common.coverage import Coverage
from ..common.documents import Text
from ..common.presentation import percent
from ..common.undisturbed import undisturbed
from ..modelling.scorer import LongDocScorer
from ..modelling.survey import Survey, survey
from ..modelling.texts import numbered
from .score_cache import ScoreCache, look_up_pairs

TIMED_SECONDS = 2.0
"""About how long some documents are scored, so that the time for all can be estimated."""


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """What `transform` of some candidates would read, and about how long it would take.

    All numbers but `seconds` are exact.

    Attributes:
        model: the reranker as it shows itself.
        coverage: what `coverage` of the model would be afterwards, apart from what is computed.
        windows_per_document: `(P,)` windows of each document, for each of its queries.
        unread: one row for each argument that leaves text out: `of` (`"queries"`, `"documents"`, or `"repeated"`: what
            is read with each window), `tokens` not read, `share` of the tokens, and the `argument`.
        pairs: distinct pairs of a query and a text.
        cached: those of them whose score is in the `score_cache`.
        inputs: distinct inputs of the backbone for the others: a query and a window; for a `BiEncoder` a window; equal
            ones, too, for heads that look at tokens (`CEDR`, `PARADE` with `query_states`).
        tokens_of_inputs: their tokens, with queries, special tokens and, in a fixed layout, the padding inside it.
        seconds: estimated time of `transform` here, on a machine that does nothing else.
        timed_pairs: so many pairs were scored to tell.
        timed_seconds: so long that took.
        device: on which.
    """

    model: str
    coverage: Coverage
    windows_per_document: np.ndarray
    unread: pd.DataFrame
    pairs: int = 0
    cached: int = 0
    inputs: int = 0
    tokens_of_inputs: int = 0
    seconds: float = 0.0
    timed_pairs: int = 0
    timed_seconds: float = 0.0
    device: str = ""

    def __repr__(self) -> str:
        return "\n".join([f"{self.model} would read", *(f"  {name:<11}{said}" for name, said in self._lines().items())])

    def _repr_html_(self) -> str:
        lines = pd.DataFrame({self.model: self._lines()})
        with pd.option_context("display.max_colwidth", None):
            return lines.to_html()

    def _lines(self) -> dict[str, str]:
        coverage, windows = self.coverage, self.windows_per_document
        lines = {
            "queries": f"{coverage.queries:,} with {coverage.query_tokens:,} tokens{self._not_read('queries')}",
            "documents": f"{coverage.documents:,} with {coverage.tokens:,} tokens{self._not_read('documents')}",
        }
        if coverage.repeated_tokens:
            lines["repeated"] = f"{coverage.repeated_tokens:,} tokens of titles{self._not_read('repeated')}"
        if not self.pairs:
            return lines
        lines["windows"] = (
            f"{coverage.windows:,}, per document {np.median(windows):g} (median) to {windows.max():,} (most)"
        )
        known = f", {self.cached:,} of them in the score cache" if self.cached else ""
        lines["to score"] = (
            f"{self.pairs:,} pairs{known}: {self.inputs:,} distinct inputs of {self.tokens_of_inputs:,} tokens"
        )
        where = "" if coverage.dtype is None else f" on {self.device} in {coverage.dtype}"
        measured = f" (estimate: {self.timed_pairs:,} pairs took {_duration(self.timed_seconds)})"
        lines["time"] = f"about {_duration(self.seconds)}{where}{measured}" if self.inputs else "nothing to compute"
        return lines

    def _not_read(self, of: str) -> str:
        rows = self.unread[self.unread["of"] == of].to_dict("records")
        if not rows:
            return ", all of them read"
        coverage = self.coverage
        cut = {"queries": coverage.queries_cut, "repeated": coverage.repeats_cut}.get(of, coverage.documents_cut)
        by = "; ".join(f"{row['tokens']:,} ({percent(row['share'])}), cut by {row['argument']}" for row in rows)
        return f"; tokens not read, in {cut:,} of them: {by}"


def summarise(model: Any, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Summary:
    """What a reranker would read of R rows; it is left as it was, but that its weights are loaded.

    Args:
        model: a `WindowReranker`.
        queries: R queries.
        texts: R texts.
        bar: a tqdm bar for the texts, in characters; None for no bar.
    """
    if not len(texts):
        return Summary(repr(model), Coverage(), np.zeros(0, "int64"), _unread(model, Coverage()))
    scorer = model.load_scorer()  # what loading warns of is not said again
    cached = _in_cache(model, queries, texts)
    with undisturbed(model):
        whole = survey(scorer, queries, texts, bar)
        to_score = whole
        if cached.any():
            new = np.flatnonzero(~cached).tolist()
            queries, texts = [queries[row] for row in new], [texts[row] for row in new]
            to_score = survey(scorer, queries, texts)
        seconds, timed_seconds, timed_pairs = _estimate(scorer, queries, texts, to_score, explain=model.explain)
    return Summary(
        repr(model),
        whole.coverage,
        whole.windows,
        _unread(model, whole.coverage),
        len(whole.rows),
        int(cached[whole.rows].sum()),
        to_score.inputs,
        to_score.tokens_of_inputs,
        seconds,
        timed_pairs,
        timed_seconds,
        str(scorer.settings.device),
    )


def _in_cache(model: Any, queries: Sequence[str], texts: Sequence[Text]) -> np.ndarray:
    """`(R,)` bool: whether the score of a row need not be computed."""
    path = getattr(model, "score_cache", None)
    if path is None or model.explain:
        return np.zeros(len(texts), dtype=bool)
    keys, known = look_up_pairs(ScoreCache(path), model.describe(), queries, texts)
    return np.array([key in known for key in keys])


def _unread(model: Any, coverage: Coverage) -> pd.DataFrame:
    totals = {
        "queries": coverage.query_tokens,
        "documents": coverage.tokens,
        "repeated": coverage.repeated_tokens,
    }
    rows = [(of, tokens, tokens / totals[of], argument) for of, tokens, argument in model.unread(coverage)]
    return pd.DataFrame(rows, columns=["of", "tokens", "share", "argument"])


def _estimate(
    scorer: LongDocScorer, queries: Sequence[str], texts: Sequence[Text], to_score: Survey, *, explain: bool
) -> tuple[float, float, int]:
    """Seconds for all pairs, by those that some of the texts take with all of their queries; these, and their pairs.

    Texts are spread evenly over all, in order of their tokens to encode, then of their length.
    """
    if not len(to_score.rows):
        return 0.0, 0.0, 0
    rows = to_score.rows
    distinct, text_of_pair = numbered([texts[row] for row in rows])
    tokens_of_text = np.bincount(text_of_pair, to_score.tokens)
    order = np.lexsort((np.array(list(map(len, distinct))), tokens_of_text))

    def timed(number: int, pairs: int | None = None) -> tuple[float, int, int]:
        """Seconds, tokens and pairs of so many texts, of which only the first so many pairs may be taken."""
        chosen = order[((np.arange(number) + 0.5) * len(order) / number).astype("int64")]
        sample = rows[np.isin(text_of_pair, chosen)][:pairs].tolist()
        own_queries, own_texts = [queries[row] for row in sample], [texts[row] for row in sample]
        with nothing_remembered():
            start = perf_counter()
            scorer.score(own_queries, own_texts, explain=explain)
            seconds = perf_counter() - start
        return seconds, survey(scorer, own_queries, own_texts).tokens_of_inputs, len(sample)

    seconds, tokens, _ = timed(1, 1)  # slower than all others, as it warms up
    number, sampled = 0, 0
    while number < len(order) and (not number or seconds < TIMED_SECONDS / 2):
        affordable = TIMED_SECONDS / max(seconds, 1e-3) * tokens
        number = min(len(order), max(1, 2 * number, int(affordable / tokens_of_text.mean())))
        pairs = max(1, int(affordable / to_score.tokens.mean())) if number == 1 else None
        seconds, tokens, sampled = timed(number, pairs)
    return seconds / tokens * to_score.tokens_of_inputs, seconds, sampled


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
