"""What of a long document a language model is shown: its best passages for the query, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..modelling.preselection import WindowSelector
from ..modelling.texts import Span, TokenizedText, each_once, tokenized
from ..modelling.windows import Windows

MARK = "[...]"
"""Stands where text was left out."""

BLOCK_PAIRS = 256
"""Pairs of query and document whose passages are scored at a time: enough for a model's batches, few enough to hold."""


@dataclass(frozen=True)
class Passages:
    """The passages of a document that a selector has chosen for a query.

    Attributes:
        text: of the document.
        spans: characters `(start, end)` of the passages, in document order.
        best: their numbers, the best first.
        all_chosen: whether these are all passages of the document.
    """

    text: str
    spans: list[Span]
    best: list[int]
    all_chosen: bool

    def shown(self, chosen: Collection[int]) -> str:
        """These passages in document order, with a mark wherever text was left out; the text itself if they are all.

        Example:
            >>> Passages("One. Two. Three.", [(0, 4), (5, 9), (10, 16)], [1, 0, 2], True).shown([1])
            '[...] Two. [...]'
        """
        if self.all_chosen and len(chosen) == len(self.spans):
            return self.text
        parts, end = [], 0
        for start, stop in [*(self.spans[number] for number in sorted(chosen)), (len(self.text), len(self.text))]:
            if self.text[end:start].strip():
                parts.append(MARK)
            parts.append(self.text[max(start, end) : stop].strip())  # windows may overlap
            end = max(stop, end)
        return " ".join(part for part in parts if part)

    def within(self, limit: int, count: Callable[[str], int]) -> list[int]:
        """The best passages that have at most `limit` tokens together, marks included; none if not one of them fits."""
        if count(self.shown(self.best)) <= limit:
            return self.best
        chosen: list[int] = []
        for number in self.best:
            if count(self.shown([*chosen, number])) <= limit:
                chosen.append(number)
        return chosen


def check_selector(preselect: object, windows: object) -> None:
    """Raises ValueError for what cannot choose passages for a language model, or windows that are none."""
    if not isinstance(windows, Windows):
        raise ValueError(f"windows={windows!r} must be windows, e.g. SentenceWindows(max_tokens=63)")
    if preselect is None:
        return
    if not isinstance(preselect, WindowSelector):
        raise ValueError(
            f"preselect={preselect!r} must be FirstK, BM25Windows, EmbeddingWindows or CrossEncoderWindows, e.g. "
            f"BM25Windows(8)"
        )
    preselect.check(windows)


def best_passages(
    selector: WindowSelector,
    windows: Windows,
    pairs: Sequence[tuple[str, str]],
    *,
    on_pairs: Callable[[int], object] = lambda number: None,
) -> dict[tuple[str, str], Passages]:
    """The selector's `k` best windows of each document for its query.

    Args:
        selector: one with `scores`, as those of the cross-encoders.
        windows: how a document is cut; their tokens are words and punctuation marks.
        pairs: distinct queries and documents.
        on_pairs: is told how many pairs are done.
    """
    found: dict[tuple[str, str], Passages] = {}
    for start in range(0, len(pairs), BLOCK_PAIRS):
        block = pairs[start : start + BLOCK_PAIRS]
        words = {text: tokenized(None, text) for text in dict.fromkeys(text for _, text in block)}
        documents = [words[text] for _, text in block]
        spans = each_once(documents, windows)
        scores = _scores(selector, [query for query, _ in block], documents, spans)
        for pair, document, own, of_own in zip(block, documents, spans, scores, strict=True):
            best = np.argsort(-of_own, kind="stable")[: selector.k]
            kept = sorted(best.tolist())
            found[pair] = Passages(
                document.text,
                [document.characters(own[number]) for number in kept],
                [kept.index(number) for number in best.tolist()],
                all_chosen=len(kept) == len(own),
            )
        on_pairs(len(block))
    return found


def _scores(
    selector: WindowSelector, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
) -> list[np.ndarray]:
    """For each pair the scores of its windows; those of documents with one window are not computed."""
    scores = [np.zeros(len(own)) for own in spans]
    several = [number for number, own in enumerate(spans) if len(own) > 1]
    if several:
        found = selector.scores(
            [queries[number] for number in several],
            [documents[number] for number in several],
            [spans[number] for number in several],
        )
        for number, of_own in zip(several, found, strict=True):
            scores[number] = np.asarray(of_own, dtype="float64")
    return scores
