"""Selectors of windows: BM25, the similarity of embeddings, a small cross-encoder."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.arguments import OF_THE_MODEL, arguments_of, check_given
from ..common.frames import TruncationWarning
from ..modelling.preselection import FirstK, KeyBlocks, Preselection, WindowSelector
from ..modelling.texts import Span, TokenizedText
from ..modelling.windows import windows_from_config, windows_to_config
from .base import LongDocReranker
from .biencoder import BiEncoder

FOLDER = "preselect"
"""Where in a checkpoint's folder things are that do not fit into config.json."""
FREQUENCIES = "document_frequencies.json"

_DECIMALS = 5
"""Scores of models are rounded before they are compared: the same text may differ in the last bits between batches."""

# Scripts without spaces: each character counts as a word. Marks: vowel signs and accents, which \w leaves out.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MARKS = "\u0300-\u036f\u064b-\u065f\u0900-\u0963\u0966-\u0dff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:[^\W{_UNSPACED}]|[{_MARKS}])+")


@dataclass(frozen=True, repr=False)
class BM25Windows(WindowSelector):
    """Keeps the `k` windows with the highest BM25 score (KeyB's first selector).

    Words are runs of letters and digits, lower-cased; in scripts without spaces each character is one. There is no
    stemming. The whole query counts, beyond `max_query_len` too. The mean length is that of the document's windows.

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

    k1: float = 1.2
    b: float = 0.75
    document_frequencies: Mapping[str, int] | None = None
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
            self._check_frequencies(self.document_frequencies, self.documents)

    def _check_frequencies(self, frequencies: object, documents: int) -> None:
        if not isinstance(frequencies, Mapping):
            raise ValueError("document_frequencies must be a dictionary from words to numbers of documents")
        for word, count in frequencies.items():
            if not isinstance(word, str) or not isinstance(count, Integral) or not 0 <= int(count) <= documents:
                raise ValueError(
                    f"document_frequencies[{word!r}]={count!r} must be a number of documents, at most "
                    f"documents={documents}, of a word"
                )

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
        return cls(k, k1, b, dict(frequencies), documents)

    def __repr__(self) -> str:
        shown = f"k={self.k}, k1={self.k1}, b={self.b}"
        if self.document_frequencies is not None:
            content = json.dumps(self._table(), sort_keys=True).encode()
            shown += f", document_frequencies=<{len(self._table())} words, {zlib.crc32(content):08x}>"
            shown += f", documents={self.documents}"
        return f"{type(self).__name__}({shown})"

    def _scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        distinct = {id(document): document for document in documents}
        found = {key: _Words(document.text) for key, document in distinct.items()}
        return [
            self._bm25(words(query), found[id(document)], [document.characters(span) for span in own])
            for query, document, own in zip(queries, documents, spans, strict=True)
        ]

    def _bm25(self, query: list[str], text: _Words, windows: list[Span]) -> np.ndarray:
        """`(N,)` scores of the windows, given as characters; a word is in the window in which it begins."""
        lengths = text.count(text.starts, windows)  # (N,)
        norm = self.k1 * (1.0 - self.b + self.b * lengths / max(lengths.mean(), 1.0))
        total = np.zeros(len(windows))
        for word in query:
            times = text.count(text.starts_of.get(word, _NOWHERE), windows)  # (N,)
            if times.any():
                gain = np.divide(times * (self.k1 + 1.0), times + norm, out=np.zeros(len(windows)), where=times > 0)
                total += self._rarity(word, times) * gain
        return total

    def _rarity(self, word: str, times: np.ndarray) -> float:
        """`ln(1 + (N - n + 0.5) / (n + 0.5))` for a word in n of N windows, or of N documents."""
        if self.document_frequencies is None or self.documents is None:
            having, of = int((times > 0).sum()), len(times)
        else:
            having, of = int(self.document_frequencies.get(word, 0)), self.documents
        return math.log1p((of - having + 0.5) / (having + 0.5))

    def _table(self) -> dict[str, int]:
        return {word: int(count) for word, count in (self.document_frequencies or {}).items()}

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        table = None if self.document_frequencies is None else self._table()
        return {"type": type(self).__name__, **self._numbers(), "document_frequencies": table}

    def _numbers(self) -> dict[str, Any]:
        return {"k": self.k, "k1": self.k1, "b": self.b, "documents": self.documents}

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class; the frequencies have a file of their own."""
        if self.document_frequencies is not None:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._table(), ensure_ascii=False, sort_keys=True)
            (folder / FOLDER / FREQUENCIES).write_text(content, encoding="utf-8")
        return {"type": type(self).__name__, **self._numbers()}


@dataclass(frozen=True)
class ModelWindows(WindowSelector):
    """Base of the selectors that score a window with a model, as if it were a document of its own.

    All windows of many documents are scored together, each distinct one once. In half precision windows that are as
    good as equal may be told apart by rounding, which depends on the batch: give the model `dtype="float32"`.
    """

    model: Any

    def _scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        asked = [query for query, own in zip(queries, spans, strict=True) for _ in own]
        texts = []
        for document, own in zip(documents, spans, strict=True):
            texts += [document.text[start:end] for start, end in map(document.characters, own)]
        # Weights that were loaded in the caller's inference mode could not be trained afterwards.
        with torch.inference_mode(False):
            scored = self.model.score_pairs(asked, texts)
        if scored.coverage.is_cut:
            warnings.warn(
                f"{self.model!r}, which selects windows, did not read all of them: {scored.coverage.losses()}",
                TruncationWarning,
                stacklevel=2,
            )
        return np.split(np.round(scored.scores, _DECIMALS), np.cumsum([len(own) for own in spans])[:-1])

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {"type": type(self).__name__, "k": self.k, "model": self.model.describe()}


@dataclass(frozen=True)
class EmbeddingWindows(ModelWindows):
    """Keeps the `k` windows that a bi-encoder finds most similar to the query (as KeyB2 does).

    The bi-encoder remembers its embeddings, so that a window that several queries ask for is embedded once.

    Args:
        k: how many windows.
        model: a `BiEncoder`. It gets each window as a text; one that is longer than its own windows is scored as its
            `aggregation` says.

    Example:
        `ld.PARADE(preselect=ld.EmbeddingWindows(3, ld.BiEncoder()))`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, BiEncoder):
            raise ValueError(f"model={self.model!r} must be a BiEncoder; CrossEncoderWindows takes the other rerankers")

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class; a bi-encoder is never trained, so its arguments say all."""
        if self.model.trust_remote_code:
            raise ValueError(f"{self.model!r} runs remote code, which cannot be stored: give another bi-encoder")
        parameters = arguments_of(self.model, *OF_THE_MODEL)
        parameters["backbone"] = str(parameters["backbone"])
        if parameters["windows"] is not None:
            parameters["windows"] = windows_to_config(parameters["windows"])
        return {"type": type(self).__name__, "k": self.k, "model": parameters}


@dataclass(frozen=True)
class CrossEncoderWindows(ModelWindows):
    """Keeps the `k` windows that a smaller cross-encoder scores best (IDCM, and KeyB with BERT as selector).

    Differs from IDCM, whose selector is a kernel model over convolutions: here it is any reranker of this package,
    which `fit` trains on labels or, as in IDCM, on the large one's scores (`TeacherScores`).

    Args:
        k: how many windows. 4 in Hofstätter et al. 2021.
        model: a reranker of this package, `FirstP` for instance; it gets each window as a document.

    Example:
        `ld.KMaxP(large, k=3, window_size=64, stride=50, preselect=ld.CrossEncoderWindows(4, ld.FirstP(small)))`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, LongDocReranker):
            raise ValueError(
                f"model={self.model!r} must be a cross-encoder of this package, FirstP(...) for instance; "
                f"EmbeddingWindows takes a BiEncoder"
            )
        if type(self.model).transform is not LongDocReranker.transform:
            raise ValueError(
                f"{type(self.model).__name__} scores by more than query and text: it cannot select windows"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CrossEncoderWindows:
        # Its model can be trained.
        return replace(self, model=copy.deepcopy(self.model, memo))

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class; the model is saved below the folder."""
        self.model.save(folder / FOLDER)
        return {"type": type(self).__name__, "k": self.k}


_PLAIN: dict[str, type[WindowSelector]] = {cls.__name__: cls for cls in (FirstK, BM25Windows)}


def preselection_from_config(config: dict[str, Any], folder: Path) -> Preselection:
    """What `to_config` described.

    Args:
        config: the description.
        folder: of the checkpoint.

    Raises:
        ValueError: if the type is not one of this module's, or its model is missing.
    """
    arguments = dict(config)
    name = arguments.pop("type", None)
    if name in _PLAIN:
        if arguments.get("documents") is not None:
            content = (folder / FOLDER / FREQUENCIES).read_text(encoding="utf-8")
            arguments["document_frequencies"] = json.loads(content)
        return _PLAIN[name](**arguments)
    if name == "EmbeddingWindows":
        parameters = dict(arguments["model"])
        if parameters["windows"] is not None:
            parameters["windows"] = windows_from_config(parameters["windows"])
        return EmbeddingWindows(arguments["k"], BiEncoder(**parameters))
    if name == "CrossEncoderWindows":
        return CrossEncoderWindows(arguments["k"], LongDocReranker.load(folder / FOLDER))
    if name == "KeyBlocks":
        selector: Any = preselection_from_config(arguments["selector"], folder)
        return KeyBlocks(selector, windows_from_config(arguments["blocks"]))
    raise ValueError(f"unknown preselection {name!r}: this version of pyterrier_longdoc does not have it")


def words(text: str) -> list[str]:
    """The words of a text as `BM25Windows` counts them.

    Example:
        >>> words("The cat's 2nd map")
        ['the', 'cat', 's', '2nd', 'map']
    """
    return [match.group().lower() for match in _WORD.finditer(text)]


_NOWHERE = np.zeros(0, dtype=np.int64)


class _Words:
    """Where the words of a text begin.

    Attributes:
        starts: `(L,)` first characters of all words, ascending.
        starts_of: the same for each distinct word.
    """

    def __init__(self, text: str) -> None:
        starts_of: dict[str, list[int]] = defaultdict(list)
        starts = []
        for match in _WORD.finditer(text):
            starts.append(match.start())
            starts_of[match.group().lower()].append(match.start())
        self.starts = np.array(starts, dtype=np.int64)
        self.starts_of = {word: np.array(places) for word, places in starts_of.items()}

    def count(self, starts: np.ndarray, windows: list[Span]) -> np.ndarray:
        """`(N,)` how many of these ascending places are in each window."""
        edges = np.searchsorted(starts, np.array(windows))  # (N, 2)
        return edges[:, 1] - edges[:, 0]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
