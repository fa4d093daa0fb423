"""Preselection: a cheaper method selects the k best windows of a document for a query before the encoder.

A selector decides for each query-document pair separately, so scores do not depend on other candidates. The selectors
in this file need no model; the others are in `rerankers/selectors.py`.

Sources: Hofstätter et al. 2021 ("Intra-Document Cascading", SIGIR 2021: a small model selects the windows for a large
one), Li et al. 2023 ("The Power of Selecting Key Blocks with Local Pre-ranking", TOIS: BM25 or a cross-encoder selects
blocks) and Li et al. 2024 (KeyB2, arXiv 2411.06254: a bi-encoder selects blocks).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..common.arguments import argument, check_type, validate
from ..common.citations import Cited
from ..common.language import word_spans, words
from ..common.registry import CLASSES, from_config, register, to_config
from .tokens import Span, TokenizedText
from .windows import Truncate, WholeText, Windows

FOLDER = "preselect"
"""The subfolder of a saved model for the model of a selector."""


@dataclass(frozen=True)
class WindowSelector(Cited, ABC):
    """Keeps the `k` best windows of a document for a query, in document order; the first among equal ones.

    A document with at most `k` windows keeps all of them, and nothing is computed. A new selector is a frozen dataclass
    with one method, `scores`.

    Args:
        k: the number of windows.
    """

    k: int = argument(at_least=1)

    needs_text: ClassVar[bool] = True
    """Whether the selection depends on the text and its character offsets."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(CLASSES["preselect"], "selectors of windows", cls.__name__, cls)

    def __post_init__(self) -> None:
        validate(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> WindowSelector:
        # It never changes, and a copy might hold a bi-encoder's weights twice.
        return self

    def select(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[list[Span]]:
        """Return the selected windows for each of P pairs, in document order."""
        spans_of = {document: windows(document) for document in dict.fromkeys(documents)}
        spans = [spans_of[document] for document in documents]
        best = self.choose(queries, documents, spans)
        return [[every[number] for number in sorted(numbers)] for every, numbers in zip(spans, best, strict=True)]

    def choose(
        self,
        queries: Sequence[str],
        documents: Sequence[TokenizedText],
        spans: Sequence[list[Span]],
        *,
        ordered: bool = False,
    ) -> list[list[int]]:
        """Return the indices of the `k` best windows for each of P pairs, best first.

        Args:
            queries: the query of each pair.
            documents: its document.
            spans: all windows of that document, in document order.
            ordered: also score and sort the windows of documents with at most `k` windows; otherwise they keep document
                order.
        """
        best = [list(range(len(windows))) for windows in spans]
        unscored_limit = 1 if ordered else self.k
        scored = [pair for pair, windows in enumerate(spans) if len(windows) > unscored_limit]
        if scored:
            some_queries, some_documents = [queries[pair] for pair in scored], [documents[pair] for pair in scored]
            scores = self.scores(some_queries, some_documents, [spans[pair] for pair in scored])
            for pair, values in zip(scored, scores, strict=True):
                best[pair] = np.argsort(-values, kind="stable")[: self.k].tolist()
        return best

    @abstractmethod
    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        """Return the `(N,)` scores of the document's windows for each of P pairs."""

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description of everything on which the selection depends, including weights."""
        return to_config(self)

    def to_config(self, folder: Path) -> dict[str, Any]:
        """Return a JSON-able description for `preselection_from_config`; write large data into the folder."""
        return self.describe()

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> WindowSelector:
        """Return the selector described by `to_config`; `config` has no `type`."""
        return cls(**config)


def preselection_from_config(config: dict[str, Any], folder: Path) -> WindowSelector:
    """Return the selector described by `to_config`; ValueError if its class is not defined."""
    cls, arguments = from_config("preselect", config)
    selector: WindowSelector = cls.from_config(arguments, folder)
    return selector


def check_preselection(preselect: WindowSelector | None, windows: Windows) -> None:
    """Raise ValueError if `preselect` is not a selector, or if the model reads a single window."""
    check_type(WindowSelector | None, "a selector of windows such as BM25Windows(3), or None", preselect=preselect)
    if preselect is not None and (windows.max_windows == 1 or isinstance(windows, Truncate | WholeText)):
        raise ValueError(
            f"preselect={preselect!r} has nothing to select, because this model reads one window: select text before "
            f"it, MaxP(explain=True) >> Evidence(...)"
        )


@dataclass(frozen=True)
class FirstK(WindowSelector):
    """Keeps the first `k` windows, independent of the query: a baseline for other selectors.

    Args:
        k: the number of windows.
    """

    needs_text = False

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        return [-np.arange(len(windows)) for windows in spans]


@dataclass(frozen=True)
class BM25Windows(WindowSelector):
    """Keeps the `k` windows with the highest BM25 score (KeyB's first selector).

    Words are runs of letters and digits; in scripts without spaces, each character is a word. Like an uncased BERT, it
    ignores letter case, accents, invisible characters and the Unicode form. There is no stemming. It uses the whole
    query, even beyond `max_query_len`, and the title of a window.

    The average length and IDF are those of the document's own windows, so that scores do not depend on other
    candidates: a word that occurs in all windows does not discriminate between them. Li et al. 2023 compute IDF over
    the collection.

    Args:
        k: the number of windows.
        k1: the saturation of term frequencies. 1.2 and `b` 0.75 are Robertson's values and Terrier's defaults.
        b: the length normalization, from 0 (none) to 1.

    Example:
        `ld.MaxP(preselect=ld.BM25Windows(3))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2023-power",)

    k1: float = argument(1.2, at_least=0)
    b: float = argument(0.75, at_least=0, at_most=1)

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        counts = {d: _WindowWords(d, windows) for d, windows in dict(zip(documents, spans, strict=True)).items()}
        return [self._bm25(words(query), counts[d]) for query, d in zip(queries, documents, strict=True)]

    def _bm25(self, query: list[str], windows: _WindowWords) -> np.ndarray:
        """Return the `(N,)` scores of windows; a word belongs to the window in which it begins."""
        lengths = windows.count(None)  # (N,)
        norm = self.k1 * (1.0 - self.b + self.b * lengths / max(lengths.mean(), 1.0))
        total = np.zeros(len(lengths))
        for word in query:
            times = windows.count(word)  # (N,)
            if times.any():
                gain = np.divide(times * (self.k1 + 1.0), times + norm, out=np.zeros(len(times)), where=times > 0)
                having = int((times > 0).sum())
                total += math.log1p((len(times) - having + 0.5) / (having + 0.5)) * gain
        return total


class _WindowWords:
    """Counts how often each word, or any (None), begins in each of N windows of a document, or in its title."""

    def __init__(self, document: TokenizedText, spans: list[Span]) -> None:
        document_words, places = word_spans(document.text)
        self._starts: defaultdict[str | None, list[int]] = defaultdict(list, {None: places[:, 0].tolist()})
        for word, start in zip(document_words, self._starts[None], strict=True):
            self._starts[word].append(start)
        self._windows = np.array([document.characters(span) for span in spans])  # (N, 2)
        title_words = [] if document.title is None else words(document.title.text)
        self._title = Counter[str | None]([*title_words, *[None] * len(title_words)])

    def count(self, word: str | None) -> np.ndarray:
        """Return the `(N,)` counts of a word."""
        edges = np.searchsorted(self._starts.get(word, []), self._windows)  # (N, 2)
        return edges[:, 1] - edges[:, 0] + self._title[word]
