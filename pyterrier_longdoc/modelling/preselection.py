"""Which windows of a document the encoder reads for a query: the k best by a cheaper method.

`WindowSelector`s keep k of a model's own windows; `KeyBlocks` makes a shorter document of the k best blocks, for
models that read one window. Both choose for each (query, document) pair by itself, so that no score depends on what
else is ranked. Here are those that need no model; `rerankers/selectors.py` has the others.

Sources: Hofstätter et al. 2021 ("Intra-Document Cascading", SIGIR 2021: a small model keeps the windows that a large
one scores), Li et al. 2023 ("The Power of Selecting Key Blocks with Local Pre-ranking", TOIS: BM25 or a cross-encoder
keeps blocks) and Li et al. 2024 (KeyB2, arXiv 2411.06254: a bi-encoder does).
"""

from __future__ import annotations

import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..common.arguments import check_given, plain_fields
from ..common.citations import Cited
from ..common.language import UNSPACED
from ..common.registry import defined_in, look_up, register
from .texts import Context, Span, TokenizedText, each_once
from .windows import SentenceWindows, Truncate, WholeText, Windows, windows_from_config, windows_to_config

FOLDER = "preselect"
"""Where in a checkpoint's folder things are that do not fit into config.json."""
FREQUENCIES = "document_frequencies.json"

_CLASSES: dict[str, type[Preselection]] = {}

Cut = tuple[TokenizedText, list[Span]]
"""A document as it is read, and its windows."""


class Preselection(Cited, ABC):
    """What stands before the encoder: chooses what is read of each document for each query."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(_CLASSES, "preselections", cls.__name__, cls)

    @property
    @abstractmethod
    def needs_text(self) -> bool:
        """Whether the choice depends on the text and its character offsets."""

    @abstractmethod
    def check(self, windows: Windows) -> None:
        """Raises ValueError if the choice cannot be made from these windows of a model."""

    @abstractmethod
    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        """What is read of B documents for B queries.

        Args:
            queries: B queries.
            documents: B documents; one that stands there for several queries is the same object.
            windows: how the model cuts a text.

        Returns:
            For each pair the document, or a shorter one made of it, and its windows in document order.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON-able description of all that a choice depends on, weights included."""

    @abstractmethod
    def to_config(self, folder: Path) -> dict[str, Any]:
        """JSON-able description, read back by `preselection_from_config`.

        Args:
            folder: of the checkpoint; what does not fit into the description is written below it.

        Raises:
            ValueError: for what cannot be stored.
        """

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        """What `to_config` described, without its `type`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Preselection:
        # It never changes, and a copy would hold a bi-encoder's weights twice.
        return self


def preselection_from_config(config: dict[str, Any], folder: Path) -> Preselection:
    """What `to_config` described.

    Args:
        config: the description.
        folder: of the checkpoint.

    Raises:
        ValueError: if no class of that name is defined, or what it needs is missing from the folder.
    """
    arguments = dict(config)
    found = look_up(_CLASSES, "unknown preselection", arguments.pop("type", None), arguments.pop("module", None))
    return found.from_config(arguments, folder)


def check_preselection(preselect: object, windows: Windows) -> None:
    """Raises ValueError if that is no preselection, or none for a model with these windows."""
    if preselect is None:
        return
    if not isinstance(preselect, Preselection):
        raise ValueError(
            f"preselect={preselect!r} must be FirstK, BM25Windows, EmbeddingWindows, CrossEncoderWindows or KeyBlocks, "
            f"e.g. BM25Windows(3); None reads all windows"
        )
    preselect.check(windows)


@dataclass(frozen=True)
class WindowSelector(Preselection):
    """Keeps the `k` best windows of a document for a query, in document order; of equals the earlier one.

    Of a document with at most `k` windows all are kept and nothing is computed. A new selector is a frozen dataclass
    with one method, `scores`.

    Args:
        k: how many windows.
    """

    k: int

    needs_text = True

    def __post_init__(self) -> None:
        plain_fields(self)
        check_given(k=self.k)

    def check(self, windows: Windows) -> None:
        if _is_one_window(windows):
            raise ValueError(
                f"preselect={self!r} has nothing to choose from: this model reads one window, {windows!r}. Use a model "
                f"with several windows, or preselect=KeyBlocks({self!r}), which fills the window with the best blocks"
            )

    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        return list(zip(documents, self.choose(queries, documents, each_once(documents, windows)), strict=True))

    def choose(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[list[Span]]:
        """The best windows of B documents for B queries.

        Args:
            queries: B queries.
            documents: B documents.
            spans: all windows of each, in document order.

        Returns:
            At most `k` of each document's windows, in document order.
        """
        chosen = list(spans)
        larger = [i for i, own in enumerate(spans) if len(own) > self.k]
        if larger:
            some = ([queries[i] for i in larger], [documents[i] for i in larger], [spans[i] for i in larger])
            for i, scores in zip(larger, self.scores(*some), strict=True):
                best = np.argsort(-scores, kind="stable")[: self.k]
                chosen[i] = [spans[i][n] for n in sorted(best)]
        return chosen

    @abstractmethod
    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        """For each pair the `(N,)` scores of its windows; for the arguments see `choose`."""

    def identity(self) -> dict[str, Any]:
        return {"type": type(self).__name__, **defined_in(type(self)), **asdict(self)}

    def to_config(self, folder: Path) -> dict[str, Any]:
        return self.identity()

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        return cls(**config)


@dataclass(frozen=True)
class FirstK(WindowSelector):
    """Keeps the first `k` windows, whatever the query: the baseline of a comparison of selectors.

    Args:
        k: how many windows.
    """

    needs_text = False

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        return [-np.arange(len(own)) for own in spans]


@dataclass(frozen=True, repr=False)
class BM25Windows(WindowSelector):
    """Keeps the `k` windows with the highest BM25 score (KeyB's first selector).

    Words are runs of letters and digits, lower-cased; in scripts without spaces each character is one. There is no
    stemming. The whole query counts, beyond `max_query_len` too, and with a window the title that is read with it. The
    mean length is that of the document's windows.

    By default a word's rarity is counted in the document's own windows: one that stands in all of them tells nothing
    about which to keep. It must not be counted in the other candidates, or a score would change with them. Li et al.
    2023 count it in the whole collection: `document_frequencies`, or `BM25Windows.from_texts`.

    Args:
        k: how many windows.
        k1: saturation of repeated words. 1.2 and `b` 0.75 are Robertson's values and Terrier's defaults.
        b: correction for the length of a window, from 0 (none) to 1.
        document_frequencies: for lower-cased words, in how many of a collection's documents they stand; others count
            as in none. None: in how many of the document's windows.
        documents: of that collection.

    Example:
        `ld.MaxP(preselect=ld.BM25Windows(3))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2023-power",)

    k1: float = 1.2
    b: float = 0.75
    document_frequencies: Mapping[str, int] | None = field(default=None, hash=False)
    documents: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.k1) or not 0 <= self.k1 < math.inf:
            raise ValueError(f"k1={self.k1!r} must be a number of at least 0")
        if not _is_number(self.b) or not 0 <= self.b <= 1:
            raise ValueError(f"b={self.b!r} must be a number between 0 and 1")
        if (self.document_frequencies is None) != (self.documents is None):
            raise ValueError("document_frequencies and documents, the number of them that were counted, go together")
        if self.documents is not None:
            check_given(documents=self.documents)
            object.__setattr__(self, "document_frequencies", _table(self.document_frequencies, self.documents))

    @classmethod
    def from_texts(cls, texts: Iterable[str], k: int, *, k1: float = 1.2, b: float = 0.75) -> BM25Windows:
        """A selector that counts the rarity of words in these texts.

        Args:
            texts: of a collection, whose texts count as its documents.
            k: see the class.
            k1: see the class.
            b: see the class.
        """
        frequencies: Counter[str] = Counter()
        documents = 0
        for text in texts:
            frequencies.update(set(words(text)))
            documents += 1
        return cls(k, k1, b, frequencies, documents)

    def __repr__(self) -> str:
        shown = f"k={self.k}, k1={self.k1}, b={self.b}"
        if self.document_frequencies is not None:
            content = json.dumps(self.document_frequencies, sort_keys=True).encode()
            shown += f", document_frequencies=<{len(self.document_frequencies)} words, {zlib.crc32(content):08x}>"
            shown += f", documents={self.documents}"
        return f"{type(self).__name__}({shown})"

    def scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        pairs = list(zip(documents, spans, strict=True))
        distinct = {(id(document), id(own)): (document, own) for document, own in pairs}
        found = {key: _WindowWords(*pair) for key, pair in distinct.items()}
        return [
            self._bm25(words(query), found[id(document), id(own)])
            for query, (document, own) in zip(queries, pairs, strict=True)
        ]

    def _bm25(self, query: list[str], windows: _WindowWords) -> np.ndarray:
        """`(N,)` scores of the windows; a word is in the window in which it begins."""
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
        """`ln(1 + (N - n + 0.5) / (n + 0.5))` for a word in n of N windows, or of N documents."""
        having, of = int((times > 0).sum()), len(times)
        if self.document_frequencies is not None and self.documents is not None:
            having, of = self.document_frequencies.get(word, 0), self.documents
        return math.log1p((of - having + 0.5) / (having + 0.5))

    def to_config(self, folder: Path) -> dict[str, Any]:
        config = self.identity()
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
    """Makes a shorter document of the `k` best blocks, in document order, which the model then reads (KeyB, KeyB2).

    With `FirstP` or `LongP` the one input holds the best blocks instead of the text's beginning. Blocks that overlap
    are merged; a span that `explain` gives reaches from a window's first block to its last. Differs from Li et al.
    2023, who choose where blocks end by dynamic programming over punctuation.

    Args:
        selector: chooses the blocks.
        blocks: what it chooses from. Default: as many whole sentences as fit into 63 tokens, the size of a block in Li
            et al. 2023.

    Example:
        `ld.FirstP(preselect=ld.KeyBlocks(ld.BM25Windows(7)))`.
    """

    papers: ClassVar[tuple[str, ...]] = ("li-2023-power",)

    selector: WindowSelector
    blocks: Windows = SentenceWindows(max_tokens=63)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not isinstance(self.selector, WindowSelector):
            raise ValueError(f"selector={self.selector!r} must be a selector, BM25Windows(7) for instance")
        if not isinstance(self.blocks, Windows):
            raise ValueError(f"blocks={self.blocks!r} must be windows, e.g. GreedyChunks(63)")
        if _is_one_window(self.blocks):
            raise ValueError(f"blocks={self.blocks!r} is one block: there is nothing to choose from")

    @property
    def needs_text(self) -> bool:
        return self.blocks.needs_text or self.selector.needs_text

    def cited(self) -> list[str]:
        return [*super().cited(), *self.selector.cited()]

    def check(self, windows: Windows) -> None:
        if windows.needs_text:
            raise ValueError(
                f"{windows!r} need a text's words or sentences, which key blocks do not leave whole: use windows in "
                f"tokens, or preselect={self.selector!r} without KeyBlocks"
            )
        if not _is_one_window(windows) or windows.largest is None:
            return
        k, most = self.selector.k, self.blocks.largest
        if most is None:
            raise ValueError(f"{self.blocks!r} may be of any length, and this model reads one window: give max_tokens")
        if k * most > windows.largest:
            raise ValueError(
                f"{k} blocks of up to {most} tokens do not fit into the one window of {windows.largest} tokens that "
                f"this model reads: choose k={windows.largest // most} or less, or smaller blocks"
            )

    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        chosen = self.selector.choose(queries, documents, each_once(documents, self.blocks))
        shorter = [document.only(own) for document, own in zip(documents, chosen, strict=True)]
        return list(zip(shorter, each_once(shorter, windows), strict=True))

    def identity(self) -> dict[str, Any]:
        return self._described(self.selector.identity())

    def to_config(self, folder: Path) -> dict[str, Any]:
        return self._described(self.selector.to_config(folder))

    def _described(self, selector: dict[str, Any]) -> dict[str, Any]:
        return {"type": type(self).__name__, "selector": selector, "blocks": windows_to_config(self.blocks)}

    @classmethod
    def from_config(cls, config: dict[str, Any], folder: Path) -> Preselection:
        selector: Any = preselection_from_config(config["selector"], folder)
        return cls(selector, windows_from_config(config["blocks"]))


def _is_one_window(windows: Windows) -> bool:
    return windows.max_windows == 1 or isinstance(windows, Truncate | WholeText)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _table(frequencies: object, documents: int) -> dict[str, int]:
    """The frequencies as a plain dictionary; raises ValueError for what cannot be any."""
    if not isinstance(frequencies, Mapping):
        raise ValueError("document_frequencies must be a dictionary from words to numbers of documents")
    for word, count in frequencies.items():
        if not isinstance(word, str) or not isinstance(count, Integral) or not 0 <= int(count) <= documents:
            raise ValueError(
                f"document_frequencies[{word!r}]={count!r} must be a number of documents, at most "
                f"documents={documents}, of a word"
            )
    return {word: int(count) for word, count in frequencies.items()}


# Marks: vowel signs and accents, which \w leaves out.
_MARKS = "\u0300-\u036f\u064b-\u065f\u0900-\u0963\u0966-\u0dff"
_WORD = re.compile(rf"[{UNSPACED}]|(?:[^\W{UNSPACED}]|[{_MARKS}])+")


def words(text: str) -> list[str]:
    """The words of a text as `BM25Windows` counts them.

    Example:
        >>> words("The cat's 2nd map")
        ['the', 'cat', 's', '2nd', 'map']
    """
    return [match.group().lower() for match in _WORD.finditer(text)]


class _WindowWords:
    """How often each word, or any (None), begins in each of N windows of a document, or in what is read with it."""

    def __init__(self, document: TokenizedText, spans: list[Span]) -> None:
        starts: dict[str | None, list[int]] = defaultdict(list)
        for match in _WORD.finditer(document.text):
            starts[None].append(match.start())
            starts[match.group().lower()].append(match.start())
        self._starts = {word: np.array(places) for word, places in starts.items()}
        self._windows = np.array([document.characters(span) for span in spans])  # (N, 2)
        self._context = Counter[str | None]() if document.context is None else _words_of(document.context)

    def count(self, word: str | None) -> np.ndarray:
        """`(N,)` numbers."""
        edges = np.searchsorted(self._starts.get(word, np.zeros(0)), self._windows)  # (N, 2)
        return edges[:, 1] - edges[:, 0] + self._context[word]


def _words_of(context: Context) -> Counter[str | None]:
    """How often each word, or any (None), stands in what is read with a window."""
    found = words(context.text)
    return Counter([*found, *[None] * len(found)])
