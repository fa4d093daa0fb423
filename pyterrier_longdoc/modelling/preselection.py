"""Preselection: a cheaper method selects the k best windows of a document for a query before the encoder.

A `WindowSelector` keeps k of a model's windows. `KeyBlocks` joins the k best blocks into a shorter document, for models
with one window. Both select for each query-document pair separately, so scores do not depend on other candidates. The
selectors in this file need no model; the others are in `rerankers/selectors.py`.

Sources: Hofstätter et al. 2021 ("Intra-Document Cascading", SIGIR 2021: a small model selects the windows for a large
one), Li et al. 2023 ("The Power of Selecting Key Blocks with Local Pre-ranking", TOIS: BM25 or a cross-encoder selects
blocks) and Li et al. 2024 (KeyB2, arXiv 2411.06254: a bi-encoder selects blocks).
"""

from __future__ import annotations

import json
import math
import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..common.arguments import argument, check_type, validate
from ..common.citations import Cited
from ..common.language import normalized, word_spans, words
from ..common.registry import defined_in, look_up, register
from .tokens import Span, TokenizedText
from .windows import SentenceWindows, Truncate, WholeText, Windows, windows_from_config, windows_to_config

FOLDER = "preselect"
"""The subfolder of a saved model for data that does not fit into config.json."""
FREQUENCIES = "document_frequencies.json"

_CLASSES: dict[str, type[Preselection]] = {}

Cut = tuple[TokenizedText, list[Span]]
"""The part of a document that is read, and its windows."""


class Preselection(Cited, ABC):
    """Base of the preselections: which part of each document the encoder reads for a query."""

    needs_text: bool
    """Whether the selection depends on the text and its character offsets."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(_CLASSES, "preselections", cls.__name__, cls)

    @abstractmethod
    def check(self, windows: Windows) -> None:
        """Raise ValueError if it cannot select from these windows."""

    @abstractmethod
    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        """Return for P pairs the document that is read, perhaps shortened, and its windows in document order.

        Pairs with the same document share one object.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description of everything on which the selection depends, including weights."""

    @abstractmethod
    def to_config(self, folder: Path) -> dict[str, Any]:
        """Return a JSON-able description for `preselection_from_config`; write large data into the folder."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        """Return the preselection described by `to_config`; `config` has no `type`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Preselection:
        # It never changes, and a copy might hold a bi-encoder's weights twice.
        return self


def preselection_from_config(config: dict[str, Any], folder: Path) -> Preselection:
    """Return the preselection described by `to_config`; ValueError if its class is not defined."""
    arguments = dict(config)
    cls = look_up(_CLASSES, "unknown preselection", arguments.pop("type", None), arguments.pop("module", None))
    return cls.from_config(arguments, folder)


def check_preselection(preselect: Preselection | None, windows: Windows) -> None:
    """Raise ValueError if `preselect` is not a preselection, or does not fit a model with these windows."""
    rule = "a selector of windows such as BM25Windows(3), or None"
    check_type(Preselection | None, rule, preselect=preselect)
    if preselect is not None:
        preselect.check(windows)


@dataclass(frozen=True)
class WindowSelector(Preselection):
    """Keeps the `k` best windows of a document for a query, in document order; the first among equal ones.

    A document with at most `k` windows keeps all of them, and nothing is computed. A new selector is a frozen dataclass
    with one method, `scores`.

    Args:
        k: the number of windows.
    """

    k: int = argument(at_least=1)

    needs_text = True

    def __post_init__(self) -> None:
        validate(self)

    def check(self, windows: Windows) -> None:
        if _is_one_window(windows):
            raise ValueError(
                f"preselect={self!r} has nothing to select: this model reads one window, which KeyBlocks can fill"
            )

    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        spans_of = {document: windows(document) for document in dict.fromkeys(documents)}
        spans = [spans_of[document] for document in documents]
        chosen = zip(documents, spans, self.choose(queries, documents, spans), strict=True)
        return [(document, [every[number] for number in sorted(best)]) for document, every, best in chosen]

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
        return {"type": type(self).__name__, **defined_in(type(self)), **asdict(self)}

    def to_config(self, folder: Path) -> dict[str, Any]:
        return self.describe()

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        return cls(**config)


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


@dataclass(frozen=True, repr=False)
class BM25Windows(WindowSelector):
    """Keeps the `k` windows with the highest BM25 score (KeyB's first selector).

    Words are runs of letters and digits; in scripts without spaces, each character is a word. Like an uncased BERT, it
    ignores letter case, accents, invisible characters and the Unicode form. There is no stemming. It uses the whole
    query, even beyond `max_query_len`, and the title of a window. The average length is that of the document's windows.

    By default, IDF is computed over the document's own windows, so that scores do not depend on other candidates: a
    word that occurs in all windows does not discriminate between them. Li et al. 2023 compute it over the collection:
    use `document_frequencies` or `BM25Windows.from_texts`.

    Args:
        k: the number of windows.
        k1: the saturation of term frequencies. 1.2 and `b` 0.75 are Robertson's values and Terrier's defaults.
        b: the length normalization, from 0 (none) to 1.
        document_frequencies: the document frequency of each word in a collection; 0 for missing words. The counts of
            words that differ only in case, accents and the like are added up. None uses the document's windows.
        documents: the number of documents in that collection.

    Example:
        `ld.MaxP(preselect=ld.BM25Windows(3))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2023-power",)

    k1: float = argument(1.2, at_least=0)
    b: float = argument(0.75, at_least=0, at_most=1)
    document_frequencies: Mapping[str, int] | None = field(default=None, hash=False)
    documents: int | None = argument(None, at_least=1, needs="document_frequencies")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.document_frequencies is None:
            return
        table = {word: int(count) for word, count in dict(self.document_frequencies).items()}
        if self.documents is None or not all(0 <= count <= self.documents for count in table.values()):
            raise ValueError(
                f"BM25Windows: document_frequencies must be at most documents={self.documents}, the collection's size"
            )
        frequencies: Counter[str] = Counter()
        for word, count in table.items():
            plain = normalized(word)
            frequencies[plain] = min(frequencies[plain] + count, self.documents)
        object.__setattr__(self, "document_frequencies", dict(frequencies))

    @classmethod
    def from_texts(cls, texts: Iterable[str], k: int, *, k1: float = 1.2, b: float = 0.75) -> BM25Windows:
        """Return a selector that counts the rarity of words in these texts; for the other arguments see the class."""
        frequencies: Counter[str] = Counter()
        documents = 0
        for text in texts:
            frequencies.update(set(words(text)))
            documents += 1
        return cls(k, k1, b, frequencies, documents)

    def __repr__(self) -> str:
        arguments = f"k={self.k}, k1={self.k1}, b={self.b}"
        if self.document_frequencies is not None:
            content = json.dumps(self.document_frequencies, sort_keys=True).encode()
            arguments += f", document_frequencies=<{zlib.crc32(content):08x}>, documents={self.documents}"
        return f"{type(self).__name__}({arguments})"

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
                total += self._rarity(word, times) * gain
        return total

    def _rarity(self, word: str, times: np.ndarray) -> float:
        """Return `ln(1 + (N - n + 0.5) / (n + 0.5))` for a word in n of N windows, or of N documents."""
        count, total = int((times > 0).sum()), len(times)
        if self.document_frequencies is not None and self.documents is not None:
            count, total = self.document_frequencies.get(word, 0), self.documents
        return math.log1p((total - count + 0.5) / (count + 0.5))

    def to_config(self, folder: Path) -> dict[str, Any]:
        config = self.describe()
        frequencies = config.pop("document_frequencies")
        if frequencies is not None:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            content = json.dumps(frequencies, ensure_ascii=False, sort_keys=True)
            (folder / FOLDER / FREQUENCIES).write_text(content, encoding="utf-8")
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        if config["documents"] is None:
            return cls(**config)
        content = (folder / FOLDER / FREQUENCIES).read_text(encoding="utf-8")
        return cls(document_frequencies=json.loads(content), **config)


@dataclass(frozen=True)
class KeyBlocks(Preselection):
    """Joins the `k` best blocks, in document order, into a shorter document for the model (KeyB, KeyB2).

    With `FirstP` or `LongP`, the input then holds the best blocks instead of the beginning of the text. Overlapping or
    adjacent blocks are merged. `explain` returns a span for each block, with the score and weight of its window. Li et
    al. 2023 choose the ends of blocks by dynamic programming over punctuation instead.

    Args:
        selector: selects the blocks.
        blocks: the candidate blocks. Default: as many whole sentences as fit into 63 tokens, the block size in Li et
            al. 2023.

    Example:
        `ld.FirstP(preselect=ld.KeyBlocks(ld.BM25Windows(7)))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2023-power",)

    selector: WindowSelector
    blocks: Windows = SentenceWindows(max_tokens=63)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        check_type(WindowSelector, "a selector such as BM25Windows(7)", selector=self.selector)

    @property
    def needs_text(self) -> bool:  # type: ignore[override]
        return self.blocks.needs_text or self.selector.needs_text

    def cited(self) -> list[str]:
        return [*super().cited(), *self.selector.cited()]

    def check(self, windows: Windows) -> None:
        if windows.needs_text:
            raise ValueError(
                f"{windows!r} needs whole words or sentences, which key blocks can split: use windows in tokens"
            )
        if not _is_one_window(windows) or windows.largest is None:
            return
        k, size = self.selector.k, self.blocks.largest
        if size is None or k * size > windows.largest:
            raise ValueError(
                f"{k} blocks of up to {size} tokens do not fit into the one window of {windows.largest} tokens: lower "
                f"k or the max_tokens of the blocks"
            )

    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        blocks = self.selector.cut(queries, documents, self.blocks)
        shorter = [document.select(spans) for document, spans in blocks]
        return [(document, windows(document)) for document in shorter]

    def describe(self) -> dict[str, Any]:
        return self._config(self.selector.describe())

    def to_config(self, folder: Path) -> dict[str, Any]:
        return self._config(self.selector.to_config(folder))

    def _config(self, selector: dict[str, Any]) -> dict[str, Any]:
        return {"type": type(self).__name__, "selector": selector, "blocks": windows_to_config(self.blocks)}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        selector: Any = preselection_from_config(config["selector"], folder)
        return cls(selector, windows_from_config(config["blocks"]))


def _is_one_window(windows: Windows) -> bool:
    return windows.max_windows == 1 or isinstance(windows, Truncate | WholeText)


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
