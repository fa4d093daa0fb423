"""What of a long document a language model is shown: its best passages for the query, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..modelling.preselection import TextPairs, WindowSelector
from ..modelling.tokens import Span
from ..modelling.windows import Windows

MARK = "[...]"
"""Stands where text was left out."""

PASSAGE_PAIRS = 256
"""Pairs of query and document whose passages are scored at a time: enough for a model's batches, few enough to hold."""


@dataclass(frozen=True)
class Passages:
    """The passages of a document that a selector has chosen for a query."""

    text: str  # of the document
    spans: list[Span]  # characters `(start, end)` of the passages, in document order
    best: list[int]  # their numbers, the best first
    all_chosen: bool  # these are all passages of the document

    def shown(self, chosen: Collection[int]) -> str:
        """Return these passages in document order, with marks where text was left out, or the text if they are all."""
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
        """Return the best passages that have at most `limit` tokens together, marks included; perhaps none."""
        if count(self.shown(self.best)) <= limit:
            return self.best
        chosen: list[int] = []
        for number in self.best:
            if count(self.shown([*chosen, number])) <= limit:
                chosen.append(number)
        return chosen


def best_passages(
    selector: WindowSelector,
    windows: Windows,
    pairs: Sequence[tuple[str, str]],
    *,
    on_pairs: Callable[[int], object] = lambda number: None,
) -> dict[tuple[str, str], Passages]:
    """Return the selector's `k` best windows of each document for its query; `on_pairs` hears how many are done."""
    found: dict[tuple[str, str], Passages] = {}
    for start in range(0, len(pairs), PASSAGE_PAIRS):
        block = pairs[start : start + PASSAGE_PAIRS]
        numbered = TextPairs.of(block, None)
        spans = list(map(windows, numbered.documents))
        chosen = selector.choose(numbered, spans, ordered=True)
        for pair, number, best in zip(block, numbered.document, chosen, strict=True):
            document, own, kept = numbered.documents[number], spans[number], sorted(best)
            found[pair] = Passages(
                document.text,
                [document.characters(own[window]) for window in kept],
                list(map(kept.index, best)),
                all_chosen=len(kept) == len(own),
            )
        on_pairs(len(block))
    return found
