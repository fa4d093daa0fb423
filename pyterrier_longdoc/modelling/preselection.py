"""Which windows of a document the encoder reads for a query: the k best by a cheaper method.

`WindowSelector`s keep k of a model's own windows; `KeyBlocks` makes a shorter document of the k best blocks, for
models that read one window. Both choose for each (query, document) pair by itself, so that no score depends on what
else is ranked.

Sources: Hofstätter et al. 2021 ("Intra-Document Cascading", SIGIR 2021: a small model keeps the windows that a large
one scores), Li et al. 2023 ("The Power of Selecting Key Blocks with Local Pre-ranking", TOIS: BM25 or a cross-encoder
keeps blocks) and Li et al. 2024 (KeyB2, arXiv 2411.06254: a bi-encoder does).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.arguments import check_given
from .texts import Span, TokenizedText
from .windows import SentenceWindows, Truncate, WholeText, Windows, windows_to_config

_SENTENCES = SentenceWindows(max_tokens=63)

Cut = tuple[TokenizedText, list[Span]]
"""A document as it is read, and its windows."""


class Preselection(ABC):
    """What stands before the encoder: chooses what is read of each document for each query."""

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Preselection:
        # It never changes, and a copy would hold a bi-encoder's weights twice.
        return self


@dataclass(frozen=True)
class WindowSelector(Preselection):
    """Keeps the `k` best windows of a document for a query, in document order; of equals the earlier one.

    Of a document with at most `k` windows all are kept and nothing is computed.

    Args:
        k: how many windows.
    """

    k: int

    def __post_init__(self) -> None:
        check_given(k=self.k)

    @property
    def needs_text(self) -> bool:
        """See the base class."""
        return True

    def check(self, windows: Windows) -> None:
        """See the base class."""
        if _is_one_window(windows):
            raise ValueError(
                f"preselect={self!r} has nothing to choose from: this model reads one window, {windows!r}. Use a model "
                f"with several windows, or preselect=KeyBlocks({self!r}), which fills the window with the best blocks"
            )

    def cut(self, queries: Sequence[str], documents: Sequence[TokenizedText], windows: Windows) -> list[Cut]:
        """See the base class."""
        chosen = self.choose(queries, documents, _spans(documents, windows))
        return list(zip(documents, chosen, strict=True))

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
            for i, scores in zip(larger, self._scores(*some), strict=True):
                best = np.argsort(-scores, kind="stable")[: self.k]
                chosen[i] = [spans[i][n] for n in sorted(best)]
        return chosen

    @abstractmethod
    def _scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        """For each pair the `(N,)` scores of its windows."""

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {"type": type(self).__name__, **asdict(self)}

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class."""
        return self.identity()


@dataclass(frozen=True)
class FirstK(WindowSelector):
    """Keeps the first `k` windows, whatever the query: the baseline of a comparison of selectors.

    Args:
        k: how many windows.
    """

    @property
    def needs_text(self) -> bool:
        """See the base class."""
        return False

    def _scores(
        self, queries: Sequence[str], documents: Sequence[TokenizedText], spans: Sequence[list[Span]]
    ) -> list[np.ndarray]:
        return [-np.arange(len(own)) for own in spans]


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

    selector: WindowSelector
    blocks: Windows = _SENTENCES

    def __post_init__(self) -> None:
        if not isinstance(self.selector, WindowSelector):
            raise ValueError(f"selector={self.selector!r} must be a selector, BM25Windows(7) for instance")
        if not isinstance(self.blocks, Windows):
            raise ValueError(f"blocks={self.blocks!r} must be windows, e.g. GreedyChunks(63)")
        if _is_one_window(self.blocks):
            raise ValueError(f"blocks={self.blocks!r} is one block: there is nothing to choose from")

    @property
    def needs_text(self) -> bool:
        """See the base class."""
        return self.blocks.needs_text or self.selector.needs_text

    def check(self, windows: Windows) -> None:
        """See the base class."""
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
        """See the base class."""
        spans = _spans(documents, self.blocks)
        chosen = self.selector.choose(queries, documents, spans)
        shorter = [document.only(own) for document, own in zip(documents, chosen, strict=True)]
        return list(zip(shorter, _spans(shorter, windows), strict=True))

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return self._described(self.selector.identity())

    def to_config(self, folder: Path) -> dict[str, Any]:
        """See the base class."""
        return self._described(self.selector.to_config(folder))

    def _described(self, selector: dict[str, Any]) -> dict[str, Any]:
        return {"type": type(self).__name__, "selector": selector, "blocks": windows_to_config(self.blocks)}


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


def _spans(documents: Sequence[TokenizedText], windows: Windows) -> list[list[Span]]:
    """Each document's windows; a document that stands there several times is cut once."""
    spans: dict[int, list[Span]] = {}
    for document in documents:
        if id(document) not in spans:
            spans[id(document)] = windows(document)
    return [spans[id(document)] for document in documents]


def _is_one_window(windows: Windows) -> bool:
    return windows.max_windows == 1 or isinstance(windows, Truncate | WholeText)


_FROM_CONFIG: dict[str, Any] = {}
"""What makes each type of preselection of its description; see `register`."""


PRESELECT_FOLDER = "preselect"
"""Where in a checkpoint's folder things are that do not fit into config.json."""


def preselection_from_config(config: dict[str, Any], folder: Path) -> Preselection:
    """PLACEHOLDER until the registry of preselections is merged."""
    from ..rerankers.selectors import preselection_from_config as make

    return make(config, folder)
