"""Excerpts of long documents: the best passages for a query, within a token budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.language import is_visible
from .preselection import WindowSelector
from .tokens import Span, tokenized
from .windows import Windows

MARK = "[...]"
"""Marks text that was left out."""

PASSAGE_PAIRS = 256
"""Query-document pairs whose passages are scored together: enough to fill a model's batches."""


@dataclass(frozen=True)
class ChosenPassages:
    """Passages of a document, ranked for a query."""

    text: str  # of the document
    spans: list[Span]  # characters `(start, end)` of the passages, in document order
    best: list[int]  # their indices in `spans`, best first
    is_complete: bool  # whether they are all passages of the document

    def pieces(self, numbers: Collection[int]) -> list[Span]:
        """Return the spans of passages in document order; passages with no visible text between them are merged."""
        joined: list[Span] = []
        for start, end in sorted(self.spans[number] for number in numbers):
            if joined and not is_visible(self.text[joined[-1][1] : start]):  # windows may overlap
                first, last = joined.pop()
                start, end = first, max(last, end)
            if is_visible(self.text[start:end]):
                joined.append((start, end))
        return joined

    def excerpt(self, numbers: Collection[int], *, ends: bool = True) -> str:
        """Return the text of passages in document order, with marks for omitted text (with `ends`, also at the ends).

        If all passages are given, this is the document's text.
        """
        if self.is_complete and len(numbers) == len(self.spans):
            return self.text
        parts, end, length = [], 0, len(self.text)
        for start, stop in [*self.pieces(numbers), (length, length)]:
            if is_visible(self.text[end:start]) and (ends or 0 < end < start < length):
                parts.append(MARK)
            parts.append(self.text[start:stop].strip())
            end = stop
        return " ".join(part for part in parts if part)

    def best_within(self, limit: int, count: Callable[[str], int]) -> list[int]:
        """Return the best passages that together have at most `limit` tokens, including marks; possibly none."""
        if count(self.excerpt(self.best)) <= limit:
            return self.best
        budget = Budget(limit, lambda _, numbers: count(self.excerpt(numbers)))
        for number in self.best:
            budget.take(0, number)
        return budget.taken[0]


class Budget:
    """A token budget for passages of documents; `cost` returns the tokens of a document's passages."""

    def __init__(self, limit: int, cost: Callable[[int, list[int]], int], at_most: int | None = None) -> None:
        self.left, self._cost, self._at_most = limit, cost, limit if at_most is None else at_most
        self.taken: dict[int, list[int]] = defaultdict(list)
        self.spent: Counter[int] = Counter()

    def take(self, document: int, number: int) -> None:
        """Add a passage if it fits and has not been added yet."""
        if number in self.taken[document]:
            return
        passages = [*self.taken[document], number]
        tokens = self._cost(document, passages)
        if tokens <= min(self._at_most, self.left + self.spent[document]):
            self.taken[document] = passages
            self.left -= tokens - self.spent[document]
            self.spent[document] = tokens


def best_passages(
    selector: WindowSelector,
    windows: Windows,
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any = None,
    *,
    on_pairs: Callable[[int], object] = lambda number: None,
) -> dict[tuple[str, str], ChosenPassages]:
    """Return the selector's `k` best windows for each query-document pair; `on_pairs` is told how many are done."""
    passages: dict[tuple[str, str], ChosenPassages] = {}
    for start in range(0, len(pairs), PASSAGE_PAIRS):
        block = pairs[start : start + PASSAGE_PAIRS]
        tokens = {text: tokenized(tokenizer, text) for text in dict.fromkeys(text for _, text in block)}
        spans_of = {text: windows(document) for text, document in tokens.items()}
        documents, spans = [tokens[text] for _, text in block], [spans_of[text] for _, text in block]
        selections = selector.choose([query for query, _ in block], documents, spans, ordered=True)
        for pair, document, every, best in zip(block, documents, spans, selections, strict=True):
            selection = sorted(best)
            passages[pair] = ChosenPassages(
                document.text,
                [document.characters(every[window]) for window in selection],
                list(map(selection.index, best)),
                is_complete=len(selection) == len(every),
            )
        on_pairs(len(block))
    return passages
