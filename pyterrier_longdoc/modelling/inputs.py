"""What goes into an encoder, as tensors, and what the head gets from it.

Shapes: P pairs of a query and a document (B in training), V windows of all documents together, N windows of the
longest document, T tokens of the longest window, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from .layout import LAYOUTS, PUBLISHED_SPECIALS, InputLayout
from .preselection import Preselection
from .windows import Windows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """What is read of queries and texts, and how scores are computed; nothing here concerns the weights.

    Attributes:
        windows: how texts are cut; fitted to the backbone's longest input by `InputFormat.fit`.
        windows_argument: the reranker's argument that bounds the windows; the account names it for text they cut.
        max_windows: the number of windows that a user allows; None for no such limit.
        max_doc_len: read only this many tokens of a text; None reads all.
        max_query_len: read only this many tokens of a query, 32 in Boytsov et al. 2025; None reads what fits.
        layout: how a query and a window become one input.
        preselect: which windows are read for a query; None reads all.
        repeat_tokens: most tokens of the title that is read with each window; 0 for no title.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens, padding included, in one pass; a longer window passes alone. None for the
            device's default.
        device: where the weights are.
        dtype: precision of the encoder when it scores; heads always work in fp32.
        runtime: the library that computes the backbone when it scores; None until a model has chosen one.
        token_pooling: how many tokens of a window share a vector, in `MaxSim`; None for what the checkpoint says.
    """

    windows: Windows
    windows_argument: str = ""
    max_windows: int | None = None
    max_doc_len: int | None = None
    max_query_len: int | None = 32
    layout: InputLayout = LAYOUTS["pair"]
    preselect: Preselection | None = None
    repeat_tokens: int = 0
    batch_size: int = 64
    max_batch_tokens: int | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    runtime: str | None = None
    token_pooling: float | None = None

    def __post_init__(self) -> None:
        if self.preselect is not None:
            self.preselect.check(self.windows)
        self.layout.check(self.windows, self.preselect, self.max_query_len, repeats=self.repeat_tokens > 0)

    @property
    def largest_window(self) -> int | None:
        """The most tokens of a window and its title; None if only the backbone limits it."""
        largest = self.windows.largest
        return None if largest is None else largest + self.repeat_tokens

    def within(self, room: int) -> Settings:
        """Fit the windows into the tokens that the backbone has for a window and its title."""
        if self.repeat_tokens and room <= self.repeat_tokens:
            raise ValueError(
                f"repeat_tokens={self.repeat_tokens} leave no room for windows in {room} tokens: lower repeat_tokens"
            )
        return replace(self, windows=self.windows.within(room - self.repeat_tokens))


@dataclass(frozen=True, eq=False)
class Pairs:
    """P pairs of a query and a document, as token ids."""

    queries: Sequence[np.ndarray]  # the token ids of each distinct query
    documents: Sequence[Sequence[np.ndarray]]  # of each distinct document the token ids of its windows, at least one
    query: Sequence[int]  # for each pair the number of its query
    document: Sequence[int]  # for each pair the number of its document

    @property
    def counts(self) -> list[int]:
        """The number of windows of each pair."""
        return list(map(len, map(self.documents.__getitem__, self.document)))

    def by_window(self) -> tuple[list[int], list[np.ndarray]]:
        """Return the query's number and the token ids of each window of all pairs, one after the other."""
        queries: list[int] = []
        windows: list[np.ndarray] = []
        for query, document in zip(self.query, self.document, strict=True):
            windows += self.documents[document]
            queries += [query] * len(self.documents[document])
        return queries, windows


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """The windows of B documents, one after the other; none consists of padding alone."""

    input_ids: torch.Tensor  # `(V, T)` int64
    attention_mask: torch.Tensor  # `(V, T)` bool, True = real
    token_type_ids: torch.Tensor | None  # `(V, T)` int64, or None where the backbone has no segments
    position_ids: torch.Tensor | None  # `(V, T)` int64, or None for the backbone's own
    lengths: torch.Tensor  # `(V,)` int64, one past each window's last real token
    doc: torch.Tensor  # `(V,)` int64, the document that owns each window; ascending
    documents: int  # B
    query_start: torch.Tensor  # `(V,)` int64, where the query begins
    query_length: torch.Tensor  # `(V,)` int64, its tokens
    content_start: torch.Tensor  # `(V,)` int64, where the document's tokens begin
    content_length: torch.Tensor  # `(V,)` int64, their number


NOTHING = np.zeros(0, dtype=np.int32)
"""No tokens: the query of an input that is a text alone, for instance."""


@dataclass(frozen=True)
class InputFormat:
    """How a backbone reads a query and a window: `prefix query middle window suffix` in one input.

    The backbone makes it once; `fit` fits it and the settings of a model to each other. Where queries and windows are
    separate inputs, the format is for windows, with an empty query, and `query_format` for queries, whose tokens take
    the place of the window.

    Attributes:
        prefix: special tokens before the query, `[CLS]`.
        middle: special tokens between query and window, `[SEP]` (RoBERTa's own pair layout has two).
        suffix: special tokens after the window, `[SEP]`.
        types: segment of the prefix, query, middle, window and suffix; None where the backbone has no segments.
        pad_id: token id of padding, which is masked, except for one token of an otherwise empty input.
        longest: most tokens in one input; None where nothing limits it.
        query_format: the format of separate queries; None where query and window share an input.
        longest_pair: most tokens of a separate query and window; None where nothing limits them.
        has_words: whether a template puts words around query and window.
        query_size: pad every query to this many tokens (the papers' fixed layout); None leaves queries unpadded.
        window_size: pad every window to this many tokens, so that the suffix stands at a fixed position (the
            papers' fixed layout); None puts the suffix right after the last real token.
        budget: most tokens of a query and its text together; None where each has a limit of its own.
        position_offset: first position id, for backbones that would derive positions from token ids (RoBERTa); None
            leaves positions to the backbone.
        skips_padding: whether these positions leave out padding inside the input.
        query_lead: characters that are tokenized with a query, before it.
        query_trail: characters that are tokenized with a query, after it.
        query_trail_size: how many tokens these characters are by themselves.
        text_lead: characters that are tokenized with a text, before it.
        marks_sentences: whether the first special token stands before each sentence of a text, too.
        spread: `(longest, step)`: inputs of up to `longest` tokens use every `step`-th position; see
            `biencoder.spread_positions`.
        vectors: which tokens get vectors of their own, see `TokenVectors`; None elsewhere.
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    types: tuple[int, int, int, int, int] | None
    pad_id: int
    longest: int | None = None
    query_format: InputFormat | None = None
    longest_pair: int | None = None
    has_words: bool = False
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
    vectors: Any = None

    @property
    def specials(self) -> int:
        """Number of special tokens in an input."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    # Settings and format, fitted to each other.

    def fit(self, settings: Settings) -> tuple[Settings, InputFormat]:
        """Return the settings with queries and windows that fit, and the format in which they are read."""
        layout = settings.layout
        if layout.is_for_pairs and self.has_words:
            raise ValueError(
                f"{layout!r} is for [CLS] query [SEP] text [SEP]; this backbone reads words around query and text: "
                f"leave layout='pair'"
            )
        form = self._with_one_separator(layout.positions) if layout.pad_query else self
        settings = form._within(settings)
        query = settings.max_query_len or 0  # the layouts that need it allow no None
        if layout.shared_budget:
            text = min(filter(None, (settings.windows.largest, settings.max_doc_len)), default=sys.maxsize)
            longest = min(query + text + PUBLISHED_SPECIALS, self.longest or sys.maxsize)
            return settings, replace(form, budget=longest - form.specials - form.query_trail_size)
        if not layout.pad_query:
            return settings, form
        if form.query_format is None:
            return settings, replace(form, query_size=query, window_size=settings.largest_window)
        query_format = replace(form.query_format, query_size=0, window_size=query)
        return settings, replace(form, query_size=0, window_size=settings.largest_window, query_format=query_format)

    def _with_one_separator(self, positions: str) -> InputFormat:
        """Return the papers' format, for RoBERTa, too (Boytsov et al. 2025, as in FlexNeuART)."""
        skips_padding = positions != "columns"
        if skips_padding and self.position_offset is None:
            raise ValueError(
                "positions='real tokens' is for backbones that number positions by token ids, such as RoBERTa and "
                "Longformer, not for this one: leave positions='columns'"
            )
        form = replace(
            self,
            prefix=self.prefix[:1],
            middle=self.middle[:1],
            suffix=self.suffix[:1],
            types=None if self.types is None else (0, 0, 0, 1, 1),
            skips_padding=skips_padding,
        )
        if self.query_format is None:
            return form
        query_format = self.query_format._with_one_separator(positions)
        return replace(form, query_format=replace(query_format, types=self.query_format.types))

    def _within(self, settings: Settings) -> Settings:
        """Return the settings with queries and windows that fit into the longest input.

        With `max_query_len=None` a query is read as far as it fits: next to windows of a given size queries have the
        rest of the input, next to windows without a size a quarter. So all queries of a model have the same room, and
        no score depends on other queries.
        """
        room = self._room()
        if room is None:
            return settings
        query, window, pair = room
        if settings.max_query_len is not None:
            capacity = min(window, pair - settings.max_query_len)
            if capacity < 1 or settings.max_query_len > query:
                raise ValueError(
                    f"max_query_len={settings.max_query_len} leaves no room for a document: the backbone takes "
                    f"{self.longest} tokens, {self.specials + self.query_trail_size} of them special; lower "
                    f"max_query_len"
                )
            return settings.within(capacity)
        fitted_settings = settings.within(min(window, pair - 1))
        if fitted_settings.windows != settings.windows:  # of no given size
            fitted_settings = settings.within(min(window, pair - pair // 4))
        return replace(fitted_settings, max_query_len=min(query, pair - (fitted_settings.largest_window or 0)))

    def _room(self) -> tuple[int, int, int] | None:
        """Return the most tokens of a query, of a window and of both; None if nothing limits them."""
        if self.longest is None:
            return None if self.longest_pair is None else (self.longest_pair, self.longest_pair, self.longest_pair)
        window = self.longest - self.specials - self.query_trail_size
        if self.query_format is None:
            return window, window, window
        query = self.longest - self.query_format.specials
        return query, window, query + window if self.longest_pair is None else self.longest_pair

    # From token ids to tensors.

    def collate(
        self, queries: Sequence[np.ndarray], windows: Sequence[Sequence[np.ndarray]], device: Any = "cpu"
    ) -> WindowBatch:
        """Return tensors of B queries and, for each, the token ids of at least one window."""
        flat = list(chain.from_iterable(windows))
        doc = np.repeat(np.arange(len(queries)), list(map(len, windows)))
        window_queries = list(map(queries.__getitem__, doc.tolist()))
        query_lengths, window_lengths = np.array(list(map(len, window_queries))), np.array(list(map(len, flat)))
        starts = self.specials - len(self.suffix) + np.maximum(query_lengths, self.query_size or 0)
        lengths = self.length(query_lengths, window_lengths)
        shape = (len(flat), int(lengths.max()))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        types = np.zeros(shape, dtype=np.int64)
        for row, (query, window) in enumerate(zip(window_queries, flat, strict=True)):
            self._fill(ids[row], mask[row], types[row], query, window)

        positions = None
        if self.spread is not None or (self.position_offset is not None and self.query_size is not None):
            positions = torch.from_numpy(self._positions(lengths, mask)).to(device)
        return WindowBatch(
            input_ids=torch.as_tensor(ids, device=device),
            attention_mask=torch.as_tensor(mask, device=device),
            token_type_ids=None if self.types is None else torch.as_tensor(types, device=device),
            position_ids=positions,
            lengths=torch.as_tensor(lengths, device=device),
            doc=torch.as_tensor(doc, device=device),
            documents=len(queries),
            query_start=torch.full((len(flat),), len(self.prefix), device=device),
            query_length=torch.as_tensor(query_lengths, device=device),
            content_start=torch.as_tensor(starts, device=device),
            content_length=torch.as_tensor(window_lengths, device=device),
        )

    def _positions(self, lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
        columns = np.arange(mask.shape[1])
        if self.spread is not None:
            limit, step = self.spread
            # By the length of each input, not of the batch. Padding is masked and may have any position.
            spread = (columns * step).clip(max=(limit - 1) * step)
            return np.where(lengths[:, None] <= limit, spread, columns)
        # Padding may have any position: it has that of the real token before it.
        positions = mask.cumsum(1) - 1 if self.skips_padding else np.tile(columns, (len(lengths), 1))
        return positions.clip(min=0) + (self.position_offset or 0)

    def length(self, query: Any, window: Any) -> np.ndarray:
        """Return the lengths of inputs with so many tokens of a query and a window, padding inside them included."""
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
            mask[0] = True  # a model cannot read an empty input: without special tokens it reads padding


@dataclass(frozen=True, eq=False)
class Matches:
    """How each query token matches each document token, for heads that look at tokens.

    A document's windows stand along the token axis, in order; overlapping windows repeat their tokens.

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

    def one_window(self, n: int) -> Matches:
        """Return the same documents with their n-th window alone."""
        mask = self.window == n
        order = (~mask).long().argsort(dim=1, stable=True)[:, : max(1, int(mask.sum(1).max()))]  # (B, D')
        mask = mask.gather(1, order)
        values = self.values.gather(3, order[:, None, None].expand(*self.values.shape[:3], -1)) * mask[:, None, None]
        return replace(self, values=values, document_mask=mask, window=self.window.gather(1, order))


@dataclass(frozen=True, eq=False)
class QueryStates:
    """The states of the query's tokens in the first window of each document, for heads that need them."""

    states: torch.Tensor  # `(B, Q, H)` fp32
    mask: torch.Tensor  # `(B, Q)` bool, True = a real query token
    fixed: bool = False  # whether Q is the same in all batches, as in the papers' fixed layout


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a head sees of a batch of documents.

    Attributes:
        cls: `(B, N, H)` one vector per window; zeros where there is no window.
        mask: `(B, N)` bool, True = a real window; every document has at least one.
        matches: `Matches` of query and document tokens; None for heads that do not need them.
        query: `QueryStates` of the query's tokens; None for heads that do not need them.
        places: `(B, N, Q)` int64, in which vector of a window each query token has its maximum; None but in `MaxSim`.
    """

    cls: torch.Tensor
    mask: torch.Tensor
    matches: Any = None
    query: Any = None
    places: torch.Tensor | None = None

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        """Return each window as a document with its query, and the `(B, N)` mask of real windows."""
        num_windows = self.mask.shape[1]
        query = self.query
        if query is not None:
            states, mask = (tensor.repeat_interleave(num_windows, 0) for tensor in (query.states, query.mask))
            query = replace(query, states=states, mask=mask)
        single_windows = Encoded(
            cls=self.cls.flatten(0, 1).unsqueeze(1),  # (B * N, 1, H)
            mask=torch.ones(self.mask.numel(), 1, dtype=torch.bool, device=self.mask.device),
            query=query,
        )
        return single_windows, self.mask


def to_dense(vectors: torch.Tensor, counts: Sequence[int]) -> Encoded:
    """Turn `(V, H)` vectors, those of a document next to each other, into `(B, N, H)` ones and their mask."""
    num_windows = torch.tensor(counts, device=vectors.device)  # (B,)
    doc = torch.repeat_interleave(torch.arange(len(counts), device=vectors.device), num_windows)  # (V,)
    position = torch.arange(len(doc), device=doc.device) - (num_windows.cumsum(0) - num_windows)[doc]  # (V,)
    longest = max(counts)
    cls = vectors.new_zeros(len(counts), longest, vectors.shape[-1])
    cls = cls.index_put((doc, position), vectors)
    mask = torch.arange(longest, device=doc.device) < num_windows.unsqueeze(1)
    return Encoded(cls=cls, mask=mask)


class InputRules:
    """The needs of an architecture in passes through it; here: none."""

    def group(self, length: int) -> int:
        """Return the group of an input: a pass holds inputs of one group, neighbours in length."""
        return 0

    def padded(self, length: int) -> int:
        """Return the padded length of an input of `length` tokens that is alone in its pass."""
        return length

    def cost(self, length: int) -> int:
        """Return how many tokens an input of `length` tokens counts in the limit of a pass."""
        return self.padded(length)

    def longest(self, positions: int) -> int:
        """Return the longest input for a table of so many positions, padding included."""
        return positions

    def extra_inputs(self, batch: WindowBatch, rows: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Return inputs besides ids, mask, segments and positions for the rows of a pass and their padded mask."""
        return {}

    @contextmanager
    def pass_context(self, model: Any, length: int) -> Iterator[None]:
        """Prepare the model for a pass of padded length `length`, and tidy up after it."""
        yield
