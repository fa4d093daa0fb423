"""Puts token states of windows together into one tensor per document: query states, or matches with the document.

Shapes: B documents, V windows, V' windows of a pass, L layers, Q query tokens, T tokens of a window with its query and
special tokens, D tokens of a document, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .batching import Matches, QueryStates, WindowBatch

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
