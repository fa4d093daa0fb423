"""The window encoder: every window of a batch through the backbone, the document axis restored at the end."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from .backbones.load import Backbone
from .batching import Encoded, Matches, PairLayout, QueryStates, WindowBatch, to_dense
from .runtimes import BackboneRuntime, pack

logger = logging.getLogger(__name__)

GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 16384, 2048
"""Most tokens in a pass where no limit is given. A CPU keeps the states of a small pass in its caches; a GPU is busy
with large ones alone (`tests/benchmarks/README.md`)."""

EXACT_RUN = 4
"""So many windows of one length make passes of their own when a CPU scores: without padding attention needs no mask and
is faster. In half precision a single window does, as a mask makes such passes slower than those in fp32."""


class WindowEncoder(nn.Module):
    """Encodes windows into one vector each.

    Args:
        backbone: the pre-trained encoder, and the representation step if it was a cross-encoder.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens, padding included, in one pass; a longer window passes alone. None for 16,384 on
            a GPU and 2,048 on a CPU.

    Attributes:
        affordable_tokens: a lower limit that was learned when memory ran out.
        runtime: what computes the backbone.
    """

    def __init__(self, backbone: Backbone, *, batch_size: int = 64, max_batch_tokens: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.representation = backbone.representation or nn.Identity()
        self.pooling = backbone.pooling
        self.rules = backbone.rules
        self.hidden_size = backbone.hidden_size
        self.batch_size = batch_size
        self.max_batch_tokens = max_batch_tokens
        self.affordable_tokens = sys.maxsize
        self.runtime = BackboneRuntime()
        self._real = self._computed = 0

    @property
    def on_cpu(self) -> bool:
        """Whether the weights are in main memory."""
        return next(self.parameters()).device.type == "cpu"

    @property
    def batch_tokens(self) -> int:
        """The limit on the tokens of a pass that is in force."""
        given = self.max_batch_tokens or (CPU_BATCH_TOKENS if self.on_cpu else GPU_BATCH_TOKENS)
        return min(given, self.affordable_tokens)

    def take_counts(self) -> tuple[int, int]:
        """Tokens that went through the backbone since the last call: real ones, and with padding."""
        counts = self._real, self._computed
        self._real = self._computed = 0
        return counts

    def forward(
        self,
        batch: WindowBatch,
        on_share: Callable[[float], None] | None = None,
        *,
        match: MatchFunction | None = None,
        all_layers: bool = False,
        query_states: bool = False,
    ) -> Encoded:
        """Encodes the windows in batches of like length.

        Args:
            batch: V windows of B documents.
            on_share: called after each pass with its share of the batch's windows, for a progress bar.
            match: how query and document tokens are matched, for heads that look at tokens.
            all_layers: match the states of all layers, the embedding layer included, not of the last one alone.
            query_states: keep the last layer's states of the query's tokens in each document's first window; of a
                cross-encoder after its representation step, as the windows' vectors.

        Returns:
            `cls (B, N, H)` in fp32, `mask (B, N)` and, if asked for, the matches or the query's states.
        """
        collector = None if match is None else MatchCollector(batch, match)
        queries = QueryCollector(batch) if query_states else None
        order = self._order(batch, collector)
        vectors = []
        for rows, states, mask in self._states(batch, order, all_layers):
            vectors.append(self._vectors(states[-1], mask))
            if collector is not None:
                collector.add(rows, states)
            if queries is not None:
                queries.add(rows, states[-1])
            if on_share is not None:
                on_share(len(rows) / len(order))
        restore = torch.empty_like(order)
        restore[order] = torch.arange(len(order), device=order.device)
        pooled = torch.cat(vectors)[restore]  # (V, H)
        encoded = to_dense(pooled.float(), batch.doc, batch.documents)
        if queries is not None:
            encoded = replace(encoded, query=self._represent_query(queries.collect()))
        return encoded if collector is None else replace(encoded, matches=collector.collect())

    def token_states(self, batch: WindowBatch) -> list[torch.Tensor]:
        """The last layer's states of every window's own tokens, special ones included: V times `(T, H)` in fp32."""
        order = self._order(batch, None)
        states: dict[int, torch.Tensor] = {}
        for rows, encoded, mask in self._states(batch, order, False):
            for row, state, real in zip(rows.tolist(), encoded[-1].float(), mask, strict=True):
                states[row] = state[real]
        return [states[row] for row in range(len(order))]

    def _represent_query(self, query: QueryStates) -> QueryStates:
        states = self.representation(query.states).float()
        return QueryStates(states.masked_fill(~query.mask.unsqueeze(-1), 0.0), query.mask)

    def _order(self, batch: WindowBatch, collector: MatchCollector | None) -> torch.Tensor:
        """By length; for matches, the first windows of all documents before all others."""
        order = torch.argsort(batch.lengths, stable=True)
        if collector is None:
            return order
        first = collector.is_first()[order]
        return torch.cat([order[first], order[~first]])

    def passes(
        self, lengths: list[int], order: torch.Tensor, *, exact_run: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Divides rows into passes: neighbours in length, within the limits on windows and tokens.

        Args:
            lengths: V lengths in tokens, ascending.
            order: `(V,)` the rows that they belong to.
            exact_run: so many or more rows of one length are not padded together with others; None pads all.
        """
        start = longest = 0
        groups, most = self._groups(lengths, exact_run), self.batch_tokens
        for row, length in enumerate(map(self.rules.cost, lengths)):
            longest = max(longest, length)
            full = row - start == self.batch_size or (row + 1 - start) * longest > most
            if (full or groups[row] != groups[start]) and row > start:
                yield order[start:row]
                start, longest = row, length
        yield order[start:]

    def _groups(self, lengths: list[int], exact_run: int | None) -> list[tuple[int, int | None]]:
        """What the rows of a pass have in common: the architecture's group and, in a long run of one length, that."""
        groups: list[tuple[int, int | None]] = []
        for length, run in itertools.groupby(lengths):
            rows = len(list(run))
            # What the architecture pads anyway needs its mask anyway.
            alone = exact_run is not None and rows >= exact_run and self.rules.padded(length) == length
            groups += [(self.rules.group(length), length if alone else None)] * rows
        return groups

    def _states(
        self, batch: WindowBatch, order: torch.Tensor, all_layers: bool
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]]:
        """Rows, states and mask of each pass; where memory runs out, passes are smaller from then on."""
        lengths, done = batch.lengths[order].tolist(), 0
        exact_run = None
        if self.on_cpu and not torch.is_grad_enabled():
            exact_run = 1 if torch.is_autocast_enabled("cpu") else EXACT_RUN
        while done < len(order):
            for rows in self.passes(lengths[done:], order[done:], exact_run=exact_run):
                encoded = self._encode_if_it_fits(batch, rows, all_layers)
                if encoded is None:
                    break
                done += len(rows)
                yield rows, *encoded
        self._real += int(batch.attention_mask.sum())

    def _encode_if_it_fits(
        self, batch: WindowBatch, rows: torch.Tensor, all_layers: bool
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
        """None where memory ran out, after lowering the limit on tokens.

        In training it is an error: the graph of earlier passes fills the memory, which smaller passes do not change.
        """
        try:
            return self._encode(batch, rows, all_layers)
        except RuntimeError as error:
            if len(rows) == 1 or torch.is_grad_enabled() or not _is_out_of_memory(error):
                raise
        # Not within "except": there the error would keep the failed pass's memory.
        longest = int(batch.lengths[rows].max())
        self.affordable_tokens = max(1, len(rows) // 2) * self.rules.cost(longest)
        logger.warning(
            "memory ran out in a pass of %d windows of up to %d tokens: from now on a pass has at most %d tokens; "
            "max_batch_tokens=%d spares the attempt",
            *(len(rows), longest, self.affordable_tokens, self.affordable_tokens),
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _encode(
        self, batch: WindowBatch, rows: torch.Tensor, all_layers: bool
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """States `(V', T', H)` of the last layer, or of every layer, and the `(V', T')` mask."""
        length = self.rules.padded(int(batch.lengths[rows].max()))

        def of_pass(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
            values = values[rows, :length]
            return nn.functional.pad(values, (0, length - values.shape[1]), value=padding)

        mask = of_pass(batch.attention_mask)
        inputs: dict[str, Any] = {"input_ids": of_pass(batch.input_ids, self.backbone.config.pad_token_id or 0)}
        # Without padding no mask is needed, and attention without one is faster.
        inputs["attention_mask"] = None if bool(mask.all()) else mask.long()
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = of_pass(batch.token_type_ids)
        if batch.position_ids is not None:
            inputs["position_ids"] = of_pass(batch.position_ids)
        inputs |= self.rules.further_inputs(batch, rows, mask)
        packing = pack(self.backbone, inputs, mask) if self.runtime.name == "torch" else None
        recording: AbstractContextManager[list[torch.Tensor]] = self._recording() if all_layers else nullcontext([])
        with recording as earlier, self.rules.around(self.backbone, length):
            last = packing.encode(self.backbone) if packing else self.runtime(self.backbone, inputs)
        states = (*earlier, last)
        self._computed += last.shape[0] * last.shape[1]
        return (tuple(map(packing.padded, states)) if packing else states), mask

    @contextmanager
    def _recording(self) -> Iterator[list[torch.Tensor]]:
        """Collects what enters each layer: the embeddings, and the states of all layers but the last.

        With `output_hidden_states` transformers 5 leaves hooks on the model that cannot be pickled.
        """
        states: list[torch.Tensor] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        layers = self.backbone.config.num_hidden_layers
        stack = next(m for m in self.backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
        handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in stack]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _vectors(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`(V', H)` vectors: states pooled and then represented, or (`"late"`) the other way round."""
        if self.pooling == "late":
            return self._pool(self.representation(states), mask)
        return self.representation(self._pool(states, mask))

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return states[:, 0]  # (V', H)
        if self.pooling == "last":
            position = torch.arange(mask.shape[1], device=mask.device)
            last = (position * mask).argmax(1)  # (V',)
            return states[torch.arange(len(last), device=last.device), last]  # (V', H)
        # In fp32: bfloat16 cannot count beyond 256 tokens.
        weights = mask.unsqueeze(-1).float()
        return (states * weights).sum(1) / weights.sum(1)  # (V', H)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of the allocator of a CPU, which has no error of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


MICRO_TOKENS = 2**18
"""Tokens, padding included, that are laid out as tensors at a time, about 17 bytes each. Sixteen times a pass of the
largest default size, so that cutting the sorted windows here costs next to nothing."""


def encode_distinct(
    encoder: WindowEncoder,
    layout: PairLayout,
    queries: Sequence[np.ndarray],
    windows: Sequence[np.ndarray],
    *,
    on_share: Callable[[float], None] | None = None,
) -> torch.Tensor:
    """One vector for each (query, window); without gradients, equal ones are encoded once.

    Windows are laid out in order of length over all documents, so that the memory for padded inputs is bounded
    whatever the longest window: one long sentence among 20,000 short ones does not make them all long.

    Args:
        encoder: the encoder.
        layout: how a query and a window become an input.
        queries: V arrays of token ids; those of one query should be one object, by which they are told apart.
        windows: V arrays of token ids, at least one.
        on_share: called after each pass with its share of the work, for a progress bar.

    Returns:
        `(V, H)` in fp32.
    """
    place, chosen = _distinct(queries, windows)
    device = next(encoder.parameters()).device
    order: list[int] = []
    vectors = []
    for part in micro_batches([layout.length(len(queries[i]), len(windows[i])) for i in chosen]):
        inputs = [chosen[number] for number in part]
        batch = layout.collate([queries[i] for i in inputs], [[windows[i]] for i in inputs], device)
        vectors.append(encoder(batch, _scaled(on_share, len(part) / len(chosen))).cls[:, 0])
        order += part
    restore = torch.tensor(order).argsort()
    return torch.cat(vectors)[restore[place].to(device)]


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divides inputs of these lengths, in ascending order, into parts of at most `MICRO_TOKENS` when padded."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[i] > MICRO_TOKENS:
            yield part
            part = []
        part.append(i)
    yield part


def _distinct(queries: Sequence[np.ndarray], windows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """For each input its number among the distinct ones, and the first input of each number."""
    if torch.is_grad_enabled():
        # Dropout makes equal inputs differ.
        every = list(range(len(windows)))
        return every, every
    numbers: dict[tuple[int, bytes], int] = {}
    place: list[int] = []
    chosen: list[int] = []
    for i, (query, window) in enumerate(zip(queries, windows, strict=True)):
        number = numbers.setdefault((id(query), window.tobytes()), len(numbers))
        if number == len(chosen):
            chosen.append(i)
        place.append(number)
    return place, chosen


def _scaled(on_share: Callable[[float], None] | None, part: float) -> Callable[[float], None] | None:
    return None if on_share is None else lambda share: on_share(share * part)


MatchFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""One layer's `(V', Q, H)` query and `(V', T, H)` window states, and `(V', Q, T)` bool, whether two tokens are the
same word piece, to `(V', Q, T)`."""


class MatchCollector:
    """Matches windows with their document's query, pass by pass, so that no pass's token states need to be kept.

    The query states of a document are those of its first window (Boytsov et al. 2025, section 3, as CEDR): first
    windows must be added before the others.

    Args:
        batch: the windows.
        match: how query and document states are matched.
    """

    def __init__(self, batch: WindowBatch, match: MatchFunction) -> None:
        self._batch = batch
        self._match = match
        lengths = batch.content_length
        counts = torch.bincount(batch.doc, minlength=batch.documents)
        self._first_row = counts.cumsum(0) - counts  # (B,)
        self._number = torch.arange(len(batch.doc), device=batch.doc.device) - self._first_row[batch.doc]  # (V,)
        starts = lengths.cumsum(0) - lengths
        self._offset = starts - starts[self._first_row][batch.doc]  # (V,) where a window begins in its document
        totals = torch.zeros_like(counts).index_add_(0, batch.doc, lengths)
        self._longest = max(1, int(totals.max()))
        place, self._query_mask = _span(batch.query_start, batch.query_length, self._first_row)
        self._query_ids = batch.input_ids[self._first_row.unsqueeze(1), place]  # (B, Q)
        self._query_place = place
        self._queries: list[torch.Tensor] = []  # L times (B, Q, H)
        self._has_query = torch.zeros_like(counts, dtype=torch.bool)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def is_first(self) -> torch.Tensor:
        """`(V,)` bool, which windows are the first of their document."""
        return self._number == 0

    def add(self, rows: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        """Matches the windows of one pass.

        Args:
            rows: `(V',)` their rows in the batch.
            states: L tensors `(V', T, H)`.

        Raises:
            RuntimeError: if a document's first window has not been added yet.
        """
        batch, doc, size = self._batch, self._batch.doc[rows], states[0].shape[1]
        self._keep_queries(rows, states)
        same = self._query_ids[doc].unsqueeze(2) == batch.input_ids[rows, :size].unsqueeze(1)  # (V', Q, T)
        with torch.autocast(states[0].device.type, enabled=False):
            # Layer by layer: all at once would copy the states of all layers.
            values = [
                self._match(queries[doc], layer.float(), same)
                for queries, layer in zip(self._queries, states, strict=True)
            ]
        column = torch.arange(size, device=rows.device)
        start, length = batch.content_start[rows].unsqueeze(1), batch.content_length[rows].unsqueeze(1)
        window, token = ((column >= start) & (column < start + length)).nonzero(as_tuple=True)
        position = self._offset[rows[window]] + token - batch.content_start[rows[window]]
        self._parts.append((rows[window], position, torch.stack(values, 1)[window, :, :, token]))  # (tokens, L, Q)

    def collect(self) -> Matches:
        """The matching tensor of every document, its windows in order along the token axis."""
        row, position, values = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        self._parts.clear()  # each further copy of the matches of a long document would take hundreds of MB
        place = (self._batch.doc[row], position)
        dense = values.new_zeros(self._batch.documents, self._longest, *values.shape[1:])
        dense = dense.index_put_(place, values).permute(0, 2, 3, 1)  # (B, L, Q, D)
        del values
        window = torch.full((self._batch.documents, self._longest), -1, device=row.device)
        window[place] = self._number[row]
        return Matches(
            values=dense.masked_fill_(~self._query_mask[:, None, :, None], 0.0),
            query_mask=self._query_mask,
            document_mask=window >= 0,
            window=window,
        )

    def _keep_queries(self, rows: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        first = self.is_first()[rows]
        if bool(first.any()):
            doc = self._batch.doc[rows[first]]
            own = first.nonzero()  # (V', 1)
            place = self._query_place[doc].clamp(max=states[0].shape[1] - 1)
            if not self._queries:
                shape = (self._batch.documents, place.shape[1], states[0].shape[2])
                self._queries = [layer.new_zeros(shape, dtype=torch.float32) for layer in states]
            self._has_query[doc] = True
            self._queries = [
                queries.index_put((doc,), layer[own, place].float())
                for queries, layer in zip(self._queries, states, strict=True)
            ]
        if not bool(self._has_query[self._batch.doc[rows]].all()):
            raise RuntimeError("a document's first window must be encoded before its others")


class QueryCollector:
    """Keeps the states of the query's tokens in the first window of each document, pass by pass.

    Args:
        batch: the windows.
    """

    def __init__(self, batch: WindowBatch) -> None:
        counts = torch.bincount(batch.doc, minlength=batch.documents)
        self._first_row = counts.cumsum(0) - counts  # (B,)
        self._doc = batch.doc
        self._place, self._mask = _span(batch.query_start, batch.query_length, self._first_row)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        """Takes what it needs of one pass.

        Args:
            rows: `(V',)` their rows in the batch.
            states: `(V', T, H)` of the last layer.
        """
        doc = self._doc[rows]
        own = (self._first_row[doc] == rows).nonzero()  # (documents that begin here, 1)
        doc = doc[own[:, 0]]
        place = self._place[doc].clamp(max=states.shape[1] - 1)
        self._parts.append((doc, states[own, place].float()))

    def collect(self) -> QueryStates:
        """The states of every document's query; zeros where it has fewer tokens than others."""
        doc, states = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        states = torch.empty_like(states).index_put((doc,), states)
        return QueryStates(states.masked_fill(~self._mask.unsqueeze(-1), 0.0), self._mask)


def _span(start: torch.Tensor, length: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `(B, Q)` of the tokens from `start` on in some rows, and their mask; clamped to the last real one."""
    width = max(1, int(length[rows].max()))
    column = torch.arange(width, device=rows.device)
    place = start[rows].unsqueeze(1) + torch.minimum(column, (length[rows].unsqueeze(1) - 1).clamp(min=0))
    return place, column < length[rows].unsqueeze(1)
