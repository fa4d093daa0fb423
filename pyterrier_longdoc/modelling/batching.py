"""From token windows to the tensors that an encoder reads, and the tensors that a head reads.

Shapes: B documents, V windows of all documents together, N windows of the longest document, T tokens of the
longest window, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """The real windows of some documents, flat: windows made of padding alone do not exist.

    Attributes:
        input_ids: `(V, T)` int64.
        attention_mask: `(V, T)` bool, True = real.
        token_type_ids: `(V, T)` int64, or None where the backbone has no segments.
        position_ids: `(V, T)` int64, or None for the backbone's own.
        lengths: `(V,)` int64, one past each window's last real token.
        doc: `(V,)` int64, the document that owns each window; ascending.
        documents: B.
        query_start: `(V,)` int64, where the query begins.
        query_length: `(V,)` int64, its tokens.
        content_start: `(V,)` int64, where the document's tokens begin.
        content_length: `(V,)` int64, how many they are.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    token_type_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    lengths: torch.Tensor
    doc: torch.Tensor
    documents: int
    query_start: torch.Tensor
    query_length: torch.Tensor
    content_start: torch.Tensor
    content_length: torch.Tensor


@dataclass(frozen=True, eq=False)
class Matches:
    """How each query token matches each document token, for heads that look at tokens.

    The windows of a document are put back together along the token axis, in order; windows that overlap repeat
    their tokens.

    Attributes:
        values: `(B, C, Q, D)` C channels, one per layer, of Q query tokens against D document tokens, in fp32; zero
            at padding.
        query_mask: `(B, Q)` bool, True = a real query token.
        document_mask: `(B, D)` bool, True = a real document token.
        window: `(B, D)` int64, the window that each document token is in; -1 at padding.
    """

    values: torch.Tensor
    query_mask: torch.Tensor
    document_mask: torch.Tensor
    window: torch.Tensor

    def of_window(self, n: int) -> Matches:
        """The same documents cut down to their n-th window, which begins at the first token."""
        mask = self.window == n
        place = (~mask).long().argsort(dim=1, stable=True)[:, : max(1, int(mask.sum(1).max()))]  # (B, D')
        mask = mask.gather(1, place)
        values = self.values.gather(3, place[:, None, None].expand(*self.values.shape[:3], -1)) * mask[:, None, None]
        return replace(self, values=values, document_mask=mask, window=self.window.gather(1, place))


@dataclass(frozen=True, eq=False)
class QueryStates:
    """The states of the query's tokens in the first window of each document, for heads that ask for them.

    Attributes:
        states: `(B, Q, H)` fp32.
        mask: `(B, Q)` bool, True = a real query token.
        fixed: whether Q is that of any batch, as in the papers' fixed layout.
    """

    states: torch.Tensor
    mask: torch.Tensor
    fixed: bool = False


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a head sees of a batch of documents.

    Attributes:
        cls: `(B, N, H)` one vector per window; zeros where there is no window.
        mask: `(B, N)` bool, True = a real window; every document has at least one.
        matches: of query and document tokens; None for heads that do not ask for them.
        query: states of the query's tokens; None for heads that do not ask for them.
    """

    cls: torch.Tensor
    mask: torch.Tensor
    matches: Matches | None = None
    query: QueryStates | None = None

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        """The windows, each as a document of its own with its document's query, and the `(B, N)` mask of real ones."""
        times = self.mask.shape[1]
        query = self.query
        if query is not None:
            states, mask = (tensor.repeat_interleave(times, 0) for tensor in (query.states, query.mask))
            query = replace(query, states=states, mask=mask)
        single = Encoded(
            cls=self.cls.flatten(0, 1).unsqueeze(1),  # (B * N, 1, H)
            mask=torch.ones(self.mask.numel(), 1, dtype=torch.bool, device=self.mask.device),
            query=query,
        )
        return single, self.mask


NOTHING = np.zeros(0, dtype=np.int32)
"""No tokens: the query of an input that is a text alone, for instance."""


def for_each_window(values: Sequence[Any], windows: Sequence[Sequence[Any]]) -> list[Any]:
    """B documents' values, each as many times as the document has windows."""
    return [value for value, group in zip(values, windows, strict=True) for _ in group]


def to_dense(vectors: torch.Tensor, counts: Sequence[int]) -> Encoded:
    """Restores the document axis: `(V, H)` window vectors to `(B, N, H)` and their mask.

    Args:
        vectors: `(V, H)`, the windows of each document next to each other and in order.
        counts: B numbers of windows, at least 1 each.
    """
    number = torch.tensor(counts, device=vectors.device)  # (B,)
    doc = torch.repeat_interleave(torch.arange(len(counts), device=vectors.device), number)  # (V,)
    position = torch.arange(len(doc), device=doc.device) - (number.cumsum(0) - number)[doc]  # (V,)
    longest = max(counts)
    cls = vectors.new_zeros(len(counts), longest, vectors.shape[-1])
    cls = cls.index_put((doc, position), vectors)
    mask = torch.arange(longest, device=doc.device) < number.unsqueeze(1)
    return Encoded(cls=cls, mask=mask)


@dataclass(frozen=True)
class PairLayout:
    """How a query and a window become one input: `prefix query middle window suffix`.

    Attributes:
        prefix: special tokens before the query, `[CLS]`.
        middle: special tokens between query and window, `[SEP]` (RoBERTa's own pair layout has two).
        suffix: special tokens after the window, `[SEP]`.
        types: segment of the prefix, query, middle, window and suffix; None where the backbone has no segments.
        pad_id: token id of padding; it is masked, but for one in an input that would otherwise have no token.
        query_size: pad every query to this many tokens (the papers' fixed layout); None leaves queries unpadded.
        window_size: pad every window to this many tokens, so that the suffix stands at a fixed position (the
            papers' fixed layout); None puts the suffix right after the last real token.
        budget: most tokens of a query and its text together; None where each has a limit of its own.
        position_offset: first position id, given where the backbone would otherwise derive positions from the
            token ids (RoBERTa); None leaves positions to the backbone.
        skips_padding: whether these positions leave out padding inside the input.
        query_lead: characters that are tokenized with a query, before it.
        query_trail: characters that are tokenized with a query, after it.
        query_trail_size: how many tokens these take when on their own.
        text_lead: characters that are tokenized with a text, before it.
        marks_sentences: whether the first special token stands before each sentence of a text, too.
        spread: `(longest, step)`: inputs of up to `longest` tokens use every `step`-th position; see `positions.py`.
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    types: tuple[int, int, int, int, int] | None
    pad_id: int
    query_size: int | None = None
    window_size: int | None = None
    budget: int | None = None
    position_offset: int | None = None
    skips_padding: bool = False
    query_lead: str = ""
    query_trail: str = ""
    query_trail_size: int = 0
    text_lead: str = ""
    marks_sentences: bool = False
    spread: tuple[int, int] | None = None

    @property
    def specials(self) -> int:
        """Number of special tokens in an input."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def fixed(self, query_size: int, window_size: int | None, *, skips_padding: bool = False) -> PairLayout:
        """The papers' layout: `[CLS] query padded to query_size [SEP] window padded to window_size [SEP]`.

        One separator between query and window, also for RoBERTa (Boytsov et al. 2025; models follow FlexNeuART).

        Raises:
            ValueError: if positions are to skip padding, and the backbone does not number them by token ids.
        """
        if skips_padding and self.position_offset is None:
            raise ValueError(
                "positions='real tokens' is for backbones that number positions by token ids, such as RoBERTa and "
                "Longformer, not for this one: leave positions='columns'"
            )
        types = None if self.types is None else (0, 0, 0, 1, 1)
        return replace(
            self,
            prefix=self.prefix[:1],
            middle=self.middle[:1],
            suffix=self.suffix[:1],
            types=types,
            query_size=query_size,
            window_size=window_size,
            skips_padding=skips_padding,
        )

    def collate(
        self, queries: Sequence[np.ndarray], windows: Sequence[Sequence[np.ndarray]], device: Any = "cpu"
    ) -> WindowBatch:
        """Tensors for one query and several windows per document.

        Args:
            queries: B arrays of token ids.
            windows: B sequences, each with at least one array of token ids.
            device: where the tensors go.
        """
        of_window, flat = for_each_window(queries, windows), list(chain.from_iterable(windows))
        doc = np.repeat(np.arange(len(queries)), list(map(len, windows)))
        query_lengths, window_lengths = np.array(list(map(len, of_window))), np.array(list(map(len, flat)))
        starts = self.specials - len(self.suffix) + np.maximum(query_lengths, self.query_size or 0)
        lengths = self.length(query_lengths, window_lengths)
        shape = (len(flat), int(lengths.max()))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        types = np.zeros(shape, dtype=np.int64)
        for row, (query, window) in enumerate(zip(of_window, flat, strict=True)):
            self._fill(ids[row], mask[row], types[row], query, window)

        return WindowBatch(
            input_ids=torch.as_tensor(ids, device=device),
            attention_mask=torch.as_tensor(mask, device=device),
            token_type_ids=None if self.types is None else torch.as_tensor(types, device=device),
            position_ids=self._positions(lengths, mask, device),
            lengths=torch.as_tensor(lengths, device=device),
            doc=torch.as_tensor(doc, device=device),
            documents=len(queries),
            query_start=torch.full((len(flat),), len(self.prefix), device=device),
            query_length=torch.as_tensor(query_lengths, device=device),
            content_start=torch.as_tensor(starts, device=device),
            content_length=torch.as_tensor(window_lengths, device=device),
        )

    def _positions(self, lengths: np.ndarray, mask: np.ndarray, device: Any) -> torch.Tensor | None:
        columns = np.arange(mask.shape[1])
        if self.spread is not None:
            limit, step = self.spread
            # By each input's own length, never by its batch's. Padding is masked: any position will do.
            spread = (columns * step).clip(max=(limit - 1) * step)
            return torch.from_numpy(np.where(lengths[:, None] <= limit, spread, columns)).to(device)
        if self.position_offset is not None and self.query_size is not None:
            # That of a real token before padding is as good as any for the padding.
            places = mask.cumsum(1) - 1 if self.skips_padding else np.tile(columns, (len(lengths), 1))
            return torch.from_numpy(places.clip(min=0) + self.position_offset).to(device)
        return None

    def length(self, query: Any, window: Any) -> np.ndarray:
        """Tokens of inputs with these numbers of tokens of a query and of a window, padding inside them included."""
        query, window = np.maximum(query, self.query_size or 0), np.maximum(window, self.window_size or 0)
        return np.maximum(1, self.specials + query + window)

    def _fill(
        self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray, query: np.ndarray, window: np.ndarray
    ) -> None:
        parts: tuple[Sequence[int] | np.ndarray, ...] = (self.prefix, query, self.middle, window, self.suffix)
        sizes = (0, self.query_size or 0, 0, self.window_size or 0, 0)
        start = 0
        for part, size, segment in zip(parts, sizes, self.types or (0,) * 5, strict=True):
            end = start + len(part)
            ids[start:end] = part
            mask[start:end] = True
            end = max(end, start + size)
            types[start:end] = segment
            start = end
        if not mask.any():
            mask[0] = True  # a model cannot read nothing: where there are no special tokens, padding stands in


@dataclass(frozen=True)
class ApartLayout:
    """How a query and a text become inputs of their own, each as the window of a pair with an empty query.

    Attributes:
        query: of queries.
        text: of windows.
        query_lead: characters that are tokenized with a query, before it.
        text_lead: the same for a text.
    """

    query: PairLayout
    text: PairLayout
    query_lead: str = ""
    text_lead: str = ""
    query_trail: ClassVar[str] = ""
    marks_sentences: ClassVar[bool] = False
    query_size: ClassVar[int | None] = None


class InputRules:
    """How passes through a backbone are made up; here: nothing special."""

    def group(self, length: int) -> int:
        """Inputs of a pass are of one group; a group holds neighbours in length."""
        return 0

    def padded(self, length: int) -> int:
        """To how many tokens an input of `length` tokens is padded if it is alone."""
        return length

    def cost(self, length: int) -> int:
        """What an input of `length` tokens counts towards the most tokens in a pass."""
        return self.padded(length)

    def longest(self, positions: int) -> int:
        """The longest input for which a table of so many positions suffices, padding included."""
        return positions

    def further_inputs(self, batch: WindowBatch, rows: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Inputs besides ids, mask, segments and positions.

        Args:
            batch: the windows.
            rows: `(V,)` those of this pass.
            mask: `(V, T)` their padded mask.
        """
        return {}

    @contextmanager
    def around(self, model: Any, length: int) -> Iterator[None]:
        """Prepares the model for a pass of padded length `length`, and tidies up after it."""
        yield
