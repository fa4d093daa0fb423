"""Puts token states of windows together into one matching tensor per document.

Shapes: B documents, V windows, L layers, Q query tokens, T tokens of a window, D tokens of a document, C channels,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .batching import Matches, WindowBatch

MatchFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(V, L, Q, H)` query states, `(V, L, T, H)` document states and `(V, Q, T)` bool, whether the two tokens are the same
word, to `(V, C, Q, T)`."""


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
        counts = torch.bincount(batch.doc, minlength=batch.documents)
        self._first_row = counts.cumsum(0) - counts  # (B,)
        self._queries: torch.Tensor | None = None  # (B, L, Q, H)
        self._query_ids = self._gather_ids(self._first_row, batch.query_start, batch.query_length)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_first(self) -> torch.Tensor:
        """`(V,)` bool, which windows are the first of their document."""
        first = torch.zeros_like(self._batch.doc, dtype=torch.bool)
        first[self._first_row] = True
        return first

    def add(self, rows: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        """Matches the windows of one pass.

        Args:
            rows: `(V',)` their rows in the batch.
            states: L tensors `(V', T', H)`.
        """
        stacked = torch.stack([layer.float() for layer in states], 1)  # (V', L, T', H)
        batch = self._batch
        self._keep_queries(rows, stacked)
        queries = self._queries
        if queries is None:
            raise RuntimeError("a document's first window must be encoded before its others")
        content, mask = _slice(stacked, batch.content_start[rows], batch.content_length[rows])  # (V', L, T, H)
        doc = batch.doc[rows]
        ids = self._gather_ids(rows, batch.content_start, batch.content_length)  # (V', T)
        same = (self._query_ids[doc].unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(1)  # (V', Q, T)
        real = mask[:, None, None, :] & (self._query_ids[doc] >= 0)[:, None, :, None]
        with torch.autocast(stacked.device.type, enabled=False):
            values = self._match(queries[doc], content, same)
        self._parts.append((rows, values.masked_fill(~real, 0.0)))

    def collect(self) -> Matches:
        """The matching tensor of every document, its windows in order along the token axis."""
        batch = self._batch
        lengths = batch.content_length
        ends = lengths.cumsum(0)
        starts = ends - lengths
        offset = starts - starts[self._first_row][batch.doc]  # (V,) where a window begins in its document
        totals = torch.zeros(batch.documents, dtype=torch.long, device=lengths.device).index_add_(0, batch.doc, lengths)
        width = max(1, int(totals.max()))
        rows, positions, columns = [], [], []
        for part, values in self._parts:
            inside = torch.arange(values.shape[-1], device=lengths.device) < lengths[part].unsqueeze(1)  # (V', T)
            window, column = inside.nonzero(as_tuple=True)
            rows.append(part[window])
            positions.append(offset[part[window]] + column)
            columns.append(values.permute(0, 3, 1, 2)[window, column])  # (tokens, C, Q)
        row, position, values = torch.cat(rows), torch.cat(positions), torch.cat(columns)
        dense = values.new_zeros(batch.documents, width, *values.shape[1:])
        dense = dense.index_put((batch.doc[row], position), values)  # (B, D, C, Q)
        window = torch.full((batch.documents, width), -1, dtype=torch.long, device=lengths.device)
        number = torch.arange(len(batch.doc), device=lengths.device) - self._first_row[batch.doc]
        window[batch.doc[row], position] = number[row]
        return Matches(
            values=dense.permute(0, 2, 3, 1),
            query_mask=self._query_ids >= 0,
            document_mask=window >= 0,
            window=window,
        )

    def _keep_queries(self, rows: torch.Tensor, stacked: torch.Tensor) -> None:
        batch = self._batch
        doc = batch.doc[rows]
        first = self._first_row[doc] == rows
        if not bool(first.any()):
            return
        own = rows[first]
        states, _ = _slice(
            stacked[first], batch.query_start[own], batch.query_length[own], width=self._query_ids.shape[1]
        )
        if self._queries is None:
            self._queries = states.new_zeros(batch.documents, *states.shape[1:])
        self._queries = self._queries.index_put((doc[first],), states)

    def _gather_ids(self, rows: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """`(V', T)` token ids of a part of some windows; -1 at padding."""
        width = max(1, int(length[rows].max()))
        column = torch.arange(width, device=rows.device)
        place = (start[rows].unsqueeze(1) + column).clamp(max=self._batch.input_ids.shape[1] - 1)
        ids = self._batch.input_ids[rows].gather(1, place)
        return ids.masked_fill(column >= length[rows].unsqueeze(1), -1)


def _slice(
    states: torch.Tensor, start: torch.Tensor, length: torch.Tensor, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of each window's states, `(V, L, T', H)` to `(V, L, width, H)`, and its `(V, width)` mask."""
    width = max(1, int(length.max())) if width is None else width
    column = torch.arange(width, device=states.device)
    place = (start.unsqueeze(1) + column).clamp(max=states.shape[2] - 1)  # (V, width)
    index = place[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index), column < length.unsqueeze(1)
