"""Setwise schedules, where a prompt finds the best of a small set: heapsort and insertion."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from ...common.arguments import argument
from .base import Answer, PromptGroup, Rounds, Schedule


@dataclass(frozen=True)
class SetwiseHeapsort(Schedule):
    """Heapsort with several children per document; a prompt finds the best of a family (a parent and its children).

    Source: Setwise prompting (Zhuang et al. 2024, arXiv 2310.09497). Only the best `k` are taken from the heap; the
    others follow in the order of the first stage. While the heap is built, families of one level are independent and
    share a round. Differs in the prompt, which asks for an order of the family, of which only the best is used.

    Prompts, depending on the answers: at most the heights of all documents with children, plus the height of the heap
    for each of the best but the first, O(n / children + k log n); for 100 documents, 3 children and k = 10 at most 85.

    Args:
        children: the number of children of a document in the heap; a prompt has one more document. 3 in Zhuang et al.
            2024.
        k: the number of documents to rank. 10 in Zhuang et al. 2024.
    """

    papers: ClassVar[tuple[str, ...]] = ("zhuang-2024-setwise",)
    best_only: ClassVar[bool] = True

    children: int = argument(3, at_least=1)
    k: int = argument(10, at_least=1)

    def rank(self, n: int) -> Rounds:
        """Rank; a family without an answer has the order of the first stage."""
        heap, level = list(range(n)), [0]
        levels = []
        while level:
            levels.append(level)
            level = [child for place in level for child in self._children(place, n)]
        for level in reversed(levels):
            yield from self._sift(heap, level)
        top: list[int] = []
        while heap and len(top) < self.k:
            if top:
                yield from self._sift(heap, [0])
            top.append(heap[0])
            last = heap.pop()
            heap[:1] = [last] if heap else []
        return top

    def estimate(self, n: int) -> int:
        build = sum(self._height(place, n) for place in range(-(-(n - 1) // self.children)))
        return build + sum(self._height(0, n - count) for count in range(1, min(self.k, n)))

    def _sift(self, heap: list[int], places: list[int]) -> Generator[list[PromptGroup], list[Answer], None]:
        """Sift the documents at these independent places down until no child is better."""
        while places:
            families = [[place, *self._children(place, len(heap))] for place in places]
            families = [family for family in families if len(family) > 1]
            if not families:
                return
            answers = yield [[heap[place] for place in family] for family in families]
            places = []
            for family, answer in zip(families, answers, strict=True):
                # A family without an answer has the order of the first stage.
                first = min(heap[place] for place in family) if answer is None else answer[0]
                parent, best = family[0], next(place for place in family if heap[place] == first)
                if best != parent:
                    heap[parent], heap[best] = heap[best], heap[parent]
                    places.append(best)

    def _children(self, place: int, n: int) -> range:
        return range(min(self.children * place + 1, n), min(self.children * (place + 1) + 1, n))

    def _height(self, place: int, n: int) -> int:
        """Return the number of levels below a place."""
        height = 0
        while (place := self.children * place + 1) < n:
            height += 1
        return height


@dataclass(frozen=True)
class SetwiseInsertion(SetwiseHeapsort):
    """Orders the first `k` documents, then inserts others that are better than the last of them.

    Source: Setwise Insertion (Podolak et al. 2025, arXiv 2504.10509), which assumes that most of the best documents are
    at the top of the first stage. `SetwiseHeapsort` orders the first `k`. Then sets of the other documents are compared
    with the last of the best `k` so far, until this one is the best. The place of a document to insert is found by a
    search whose prompts have several of the best.

    Prompts, depending on the answers: those of `SetwiseHeapsort` for k documents, plus ceil((n - k) / children) if no
    document is inserted, plus at most 1 + ceil(log_(children + 1) k) for each inserted document.

    Args:
        children: the number of documents compared with another one in a prompt. 3 as for `SetwiseHeapsort`.
        k: the number of documents to rank. 10 in Podolak et al. 2025.
    """

    papers: ClassVar[tuple[str, ...]] = ("podolak-2025-beyond", "zhuang-2024-setwise")
    best_only: ClassVar[bool] = False  # a document is inserted by its place in an order

    def rank(self, n: int) -> Rounds:
        """Rank; a set without an answer inserts nothing."""
        first = min(self.k, n)
        top = (yield from super().rank(first)) if first > 1 else [0]
        for start in range(first, n, self.children):
            others = list(range(start, min(start + self.children, n)))
            while others:
                (answer,) = yield [[top[-1], *others]]
                if answer is None or answer[0] == top[-1]:
                    break
                others.remove(answer[0])
                top[-1:] = []
                place = yield from self._place(answer[0], top)
                top.insert(place, answer[0])
        return top

    def _place(self, document: int, top: list[int]) -> Generator[list[PromptGroup], list[Answer], int]:
        """Return the place of a document in the order; the end if an answer is missing."""
        low, high = 0, len(top)
        while low < high:
            step = -(-(high - low + 1) // (self.children + 1))
            probes = list(range(low + step - 1, high, step))[: self.children]
            (answer,) = yield [[document, *(top[place] for place in probes)]]
            if answer is None:
                return len(top)
            rank = answer.index(document)
            low, high = probes[rank - 1] + 1 if rank else low, probes[rank] if rank < len(probes) else high
        return low

    def estimate(self, n: int) -> int:
        first = min(self.k, n)
        others, places, search = n - first, first, 0
        while places > 1:
            places = -(-places // (self.children + 1))
            search += 1
        sets = -(-others // self.children)
        return super().estimate(first) + sets + others * (1 + search)
