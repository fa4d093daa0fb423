"""Excerpts of long documents for a language model: the best passages for the query, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..modelling.preselection import TextPairs, WindowSelector
from ..modelling.tokens import Span
from ..modelling.windows import Windows

MARK = "[...]"
"""Stands where text was left out."""

PASSAGE_PAIRS = 256
"""Pairs of query and document whose passages are scored at a time: enough to fill a model's batches."""


@dataclass(frozen=True)
class Passages:
    """The passages of a document that a selector has chosen for a query."""

    text: str  # of the document
    spans: list[Span]  # characters `(start, end)` of the passages, in document order
    best: list[int]  # their numbers, the best first
    is_complete: bool  # whether these are all passages of the document

    def excerpt(self, numbers: Collection[int]) -> str:
        """Return passages in document order, with marks where text was left out; the text for all passages."""
        if self.is_complete and len(numbers) == len(self.spans):
            return self.text
        parts, end = [], 0
        for start, stop in [*(self.spans[number] for number in sorted(numbers)), (len(self.text), len(self.text))]:
            if self.text[end:start].strip():
                parts.append(MARK)
            parts.append(self.text[max(start, end) : stop].strip())  # windows may overlap
            end = max(stop, end)
        return " ".join(part for part in parts if part)

    def best_within(self, limit: int, count: Callable[[str], int]) -> list[int]:
        """Return the best passages of at most `limit` tokens together, marks included; perhaps none."""
        if count(self.excerpt(self.best)) <= limit:
            return self.best
        numbers: list[int] = []
        for number in self.best:
            if count(self.excerpt([*numbers, number])) <= limit:
                numbers.append(number)
        return numbers


def best_passages(
    selector: WindowSelector,
    windows: Windows,
    pairs: Sequence[tuple[str, str]],
    *,
    on_pairs: Callable[[int], object] = lambda number: None,
) -> dict[tuple[str, str], Passages]:
    """Return the selector's `k` best windows of each document for its query; `on_pairs` gets numbers of done pairs."""
    passages: dict[tuple[str, str], Passages] = {}
    for start in range(0, len(pairs), PASSAGE_PAIRS):
        block = pairs[start : start + PASSAGE_PAIRS]
        numbered = TextPairs.of(block, None)
        spans = list(map(windows, numbered.documents))
        selections = selector.choose(numbered, spans, ordered=True)
        for pair, number, best in zip(block, numbered.document, selections, strict=True):
            document, spans_of_text, selection = numbered.documents[number], spans[number], sorted(best)
            passages[pair] = Passages(
                document.text,
                [document.characters(spans_of_text[window]) for window in selection],
                list(map(selection.index, best)),
                is_complete=len(selection) == len(spans_of_text),
            )
        on_pairs(len(block))
    return passages
