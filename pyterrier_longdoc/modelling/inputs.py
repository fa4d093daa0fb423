"""What goes through an encoder: what is read of queries and texts, as tensors, and what the head gets of it.

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
    """What is read of queries and texts, and how it is computed; the weights have no part in it.

    Attributes:
        windows: how texts are cut; fitted to the backbone's longest input by `InputFormat.fit`.
        windows_argument: the reranker's argument that bounds the windows, by which the account names what they cut.
        max_windows: the same for a choice of windows that a user asks for; None if nobody does.
        max_doc_len: read only this many tokens of a text; None reads all.
        max_query_len: read only this many tokens of a query, 32 in Boytsov et al. 2025; None reads what fits.
        layout: how a query and a window become one input.
        preselect: which windows are read for a query; None reads all.
        repeat_tokens: most tokens of what is read with each window, next to its own; 0 where nothing is.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens, padding included, in one pass; a longer window passes alone. None for what suits
            the device.
        device: where the weights are.
        dtype: precision of the encoder when it scores; heads always work in fp32.
        runtime: what computes the backbone when it scores, see `runtimes.py`.
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
    runtime: str = "torch"

    def __post_init__(self) -> None:
        if self.preselect is not None:
            self.preselect.check(self.windows)
        self.layout.check(self.windows, self.preselect, self.max_query_len, repeats=self.repeat_tokens > 0)

    @property
    def largest_window(self) -> int | None:
        """The most tokens of a window with what is read with it; None if only the backbone limits it."""
        largest = self.windows.largest
        return None if largest is None else largest + self.repeat_tokens

    def within(self, room: int) -> Settings:
        """Fit the windows into the tokens that the backbone has for a window and what is read with it."""
        if self.repeat_tokens and room <= self.repeat_tokens:
            raise ValueError(
                f"repeat_tokens={self.repeat_tokens} leave nothing of {room} tokens to windows: lower repeat_tokens"
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
        """How many windows each pair has."""
        return list(map(len, map(self.documents.__getitem__, self.document)))

    def by_window(self) -> tuple[list[int], list[np.ndarray]]:
        """Return, for the windows of all pairs one after the other, the number of the query and the token ids."""
        queries: list[int] = []
        windows: list[np.ndarray] = []
        for query, document in zip(self.query, self.document, strict=True):
            windows += self.documents[document]
            queries += [query] * len(self.documents[document])
        return queries, windows


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """The real windows of some documents, flat: windows made of padding alone do not exist."""

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
    content_length: torch.Tensor  # `(V,)` int64, how many they are


NOTHING = np.zeros(0, dtype=np.int32)
"""No tokens: the query of an input that is a text alone, for instance."""


@dataclass(frozen=True)
class InputFormat:
    """How a backbone reads a query and a window: `prefix query middle window suffix` in one input.

    The backbone makes it once; `fit` adapts it, and the settings of a model, to each other. Where queries are read
    apart from windows, `of_query` is the form of a query, whose tokens take the place of the window, and the format
    itself that of a window, with an empty query.

    Attributes:
        prefix: special tokens before the query, `[CLS]`.
        middle: special tokens between query and window, `[SEP]` (RoBERTa's own pair layout has two).
        suffix: special tokens after the window, `[SEP]`.
        types: segment of the prefix, query, middle, window and suffix; None where the backbone has no segments.
        pad_id: token id of padding; it is masked, but for one in an input that would otherwise have no token.
        longest: most tokens in one input; None where nothing limits it.
        of_query: the form of a query that is read apart; None where query and window share an input.
        together: most tokens of a query and a window that are read apart; None where nothing limits them.
        has_words: whether there are words of a template around query and window.
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
        spread: `(longest, step)`: inputs of up to `longest` tokens use every `step`-th position; see
            `biencoder.spread_positions`.
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    types: tuple[int, int, int, int, int] | None
    pad_id: int
    longest: int | None = None
    of_query: InputFormat | None = None
    together: int | None = None
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
        query = settings.max_query_len or 0  # None goes with no layout that needs it
        if layout.shared_budget:
            text = min(filter(None, (settings.windows.largest, settings.max_doc_len)), default=sys.maxsize)
            longest = min(query + text + PUBLISHED_SPECIALS, self.longest or sys.maxsize)
            return settings, replace(form, budget=longest - form.specials - form.query_trail_size)
        if not layout.pad_query:
            return settings, form
        if form.of_query is None:
            return settings, replace(form, query_size=query, window_size=settings.largest_window)
        of_query = replace(form.of_query, query_size=0, window_size=query)
        return settings, replace(form, query_size=0, window_size=settings.largest_window, of_query=of_query)

    def _with_one_separator(self, positions: str) -> InputFormat:
        """Return the papers' form, also for RoBERTa (Boytsov et al. 2025; models follow FlexNeuART)."""
        skips_padding = positions != "columns"
        if skips_padding and self.position_offset is None:
            raise ValueError(
                "positions='real tokens' is for backbones that number positions by token ids, such as RoBERTa and "
                "Longformer, not for this one: leave positions='columns'"
            )
        one = replace(
            self,
            prefix=self.prefix[:1],
            middle=self.middle[:1],
            suffix=self.suffix[:1],
            types=None if self.types is None else (0, 0, 0, 1, 1),
            skips_padding=skips_padding,
        )
        if self.of_query is None:
            return one
        of_query = self.of_query._with_one_separator(positions)
        return replace(one, of_query=replace(of_query, types=self.of_query.types))

    def _within(self, settings: Settings) -> Settings:
        """Return the settings with queries and windows that fit into the longest input.

        All of a query that fits is read for `max_query_len=None`: windows of a given size have it, and queries have the
        rest; windows of no given size leave a quarter to queries. So the room is the same for all queries of a model,
        and no score depends on other queries.
        """
        room = self._room()
        if room is None:
            return settings
        query, window, together = room
        if settings.max_query_len is not None:
            left = min(window, together - settings.max_query_len)
            if left < 1 or settings.max_query_len > query:
                raise ValueError(
                    f"max_query_len={settings.max_query_len} leaves no room for a document: the backbone takes "
                    f"{self.longest} tokens, {self.specials + self.query_trail_size} of them special; lower "
                    f"max_query_len"
                )
            return settings.within(left)
        fitting = settings.within(min(window, together - 1))
        if fitting.windows != settings.windows:  # of no given size
            fitting = settings.within(min(window, together - together // 4))
        return replace(fitting, max_query_len=min(query, together - (fitting.largest_window or 0)))

    def _room(self) -> tuple[int, int, int] | None:
        """Return the most tokens of a query, of a window and of both; None if nothing limits them."""
        if self.longest is None:
            return None if self.together is None else (self.together, self.together, self.together)
        window = self.longest - self.specials - self.query_trail_size
        if self.of_query is None:
            return window, window, window
        query = self.longest - self.of_query.specials
        return query, window, query + window if self.together is None else self.together

    # Token ids to tensors.

    def collate(
        self, queries: Sequence[np.ndarray], windows: Sequence[Sequence[np.ndarray]], device: Any = "cpu"
    ) -> WindowBatch:
        """Return tensors of B queries and, for each, the token ids of at least one window."""
        flat = list(chain.from_iterable(windows))
        doc = np.repeat(np.arange(len(queries)), list(map(len, windows)))
        of_window = list(map(queries.__getitem__, doc.tolist()))
        query_lengths, window_lengths = np.array(list(map(len, of_window))), np.array(list(map(len, flat)))
        starts = self.specials - len(self.suffix) + np.maximum(query_lengths, self.query_size or 0)
        lengths = self.length(query_lengths, window_lengths)
        shape = (len(flat), int(lengths.max()))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        types = np.zeros(shape, dtype=np.int64)
        for row, (query, window) in enumerate(zip(of_window, flat, strict=True)):
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
            # By each input's own length, never by its batch's. Padding is masked: any position will do.
            spread = (columns * step).clip(max=(limit - 1) * step)
            return np.where(lengths[:, None] <= limit, spread, columns)
        # That of a real token before padding is as good as any for the padding.
        places = mask.cumsum(1) - 1 if self.skips_padding else np.tile(columns, (len(lengths), 1))
        return places.clip(min=0) + (self.position_offset or 0)

    def length(self, query: Any, window: Any) -> np.ndarray:
        """Return the tokens of inputs with so many tokens of a query and of a window, padding inside them included."""
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
        """Return the same documents cut down to their n-th window, which begins at the first token."""
        mask = self.window == n
        place = (~mask).long().argsort(dim=1, stable=True)[:, : max(1, int(mask.sum(1).max()))]  # (B, D')
        mask = mask.gather(1, place)
        values = self.values.gather(3, place[:, None, None].expand(*self.values.shape[:3], -1)) * mask[:, None, None]
        return replace(self, values=values, document_mask=mask, window=self.window.gather(1, place))


@dataclass(frozen=True, eq=False)
class QueryStates:
    """The states of the query's tokens in the first window of each document, for heads that ask for them."""

    states: torch.Tensor  # `(B, Q, H)` fp32
    mask: torch.Tensor  # `(B, Q)` bool, True = a real query token
    fixed: bool = False  # whether Q is that of any batch, as in the papers' fixed layout


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a head sees of a batch of documents.

    Attributes:
        cls: `(B, N, H)` one vector per window; zeros where there is no window.
        mask: `(B, N)` bool, True = a real window; every document has at least one.
        matches: `Matches` of query and document tokens; None for heads that do not ask for them.
        query: `QueryStates` of the query's tokens; None for heads that do not ask for them.
    """

    cls: torch.Tensor
    mask: torch.Tensor
    matches: Any = None
    query: Any = None

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        """Return each window as a document of its own with its query, and the `(B, N)` mask of real ones."""
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


def to_dense(vectors: torch.Tensor, counts: Sequence[int]) -> Encoded:
    """Restore the document axis: `(V, H)` vectors, a document's next to each other, to `(B, N, H)` and their mask."""
    number = torch.tensor(counts, device=vectors.device)  # (B,)
    doc = torch.repeat_interleave(torch.arange(len(counts), device=vectors.device), number)  # (V,)
    position = torch.arange(len(doc), device=doc.device) - (number.cumsum(0) - number)[doc]  # (V,)
    longest = max(counts)
    cls = vectors.new_zeros(len(counts), longest, vectors.shape[-1])
    cls = cls.index_put((doc, position), vectors)
    mask = torch.arange(longest, device=doc.device) < number.unsqueeze(1)
    return Encoded(cls=cls, mask=mask)


class InputRules:
    """How passes through a backbone are made up; here: nothing special."""

    def group(self, length: int) -> int:
        """Return the group of an input: a pass has inputs of one group, which are neighbours in length."""
        return 0

    def padded(self, length: int) -> int:
        """Return to how many tokens an input of `length` tokens is padded if it is alone."""
        return length

    def cost(self, length: int) -> int:
        """Return what an input of `length` tokens counts towards the most tokens in a pass."""
        return self.padded(length)

    def longest(self, positions: int) -> int:
        """Return the longest input for which a table of so many positions suffices, padding included."""
        return positions

    def further_inputs(self, batch: WindowBatch, rows: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Return inputs besides ids, mask, segments and positions; `rows` are the pass's, `mask` is padded."""
        return {}

    @contextmanager
    def around(self, model: Any, length: int) -> Iterator[None]:
        """Prepare the model for a pass of padded length `length`, and tidy up after it."""
        yield
