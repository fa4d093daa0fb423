"""The window encoder: every window of a batch through the backbone, the document axis restored at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .backbones import Backbone
from .batching import Encoded, QueryStates, WindowBatch, to_dense
from .matching import MatchCollector, MatchFunction, QueryCollector


class WindowEncoder(nn.Module):
    """Encodes windows into one vector each.

    Args:
        backbone: the pre-trained encoder, and the representation step if it was a cross-encoder.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens, padding included, in one pass; a longer window passes alone.
    """

    def __init__(self, backbone: Backbone, *, batch_size: int = 64, max_batch_tokens: int = 16384) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.representation = backbone.representation or nn.Identity()
        self.pooling = backbone.pooling
        self.hidden_size = backbone.hidden_size
        self.batch_size = batch_size
        self.max_batch_tokens = max_batch_tokens

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
        for rows in self.passes(batch.lengths[order].tolist(), order):
            states, mask = self._encode(batch, rows, all_layers)
            vectors.append(self._pool(states[-1], mask))
            if collector is not None:
                collector.add(rows, states)
            if queries is not None:
                queries.add(rows, states[-1])
            if on_share is not None:
                on_share(len(rows) / len(order))
        restore = torch.empty_like(order)
        restore[order] = torch.arange(len(order), device=order.device)
        pooled = torch.cat(vectors)[restore]  # (V, H)
        encoded = to_dense(self.representation(pooled).float(), batch.doc, batch.documents)
        if queries is not None:
            encoded = replace(encoded, query=self._represent(queries.collect()))
        return encoded if collector is None else replace(encoded, matches=collector.collect())

    def token_states(self, batch: WindowBatch) -> list[torch.Tensor]:
        """The last layer's states of every window's own tokens, special ones included: V times `(T, H)` in fp32."""
        order = self._order(batch, None)
        states: dict[int, torch.Tensor] = {}
        for rows in self.passes(batch.lengths[order].tolist(), order):
            encoded, mask = self._encode(batch, rows, False)
            for row, state, real in zip(rows.tolist(), encoded[-1].float(), mask, strict=True):
                states[row] = state[real]
        return [states[row] for row in range(len(order))]

    def _represent(self, query: QueryStates) -> QueryStates:
        states = self.representation(query.states).float()
        return QueryStates(states.masked_fill(~query.mask.unsqueeze(-1), 0.0), query.mask)

    def _order(self, batch: WindowBatch, collector: MatchCollector | None) -> torch.Tensor:
        """By length; for matches, the first windows of all documents before all others."""
        order = torch.argsort(batch.lengths, stable=True)
        if collector is None:
            return order
        first = collector.is_first()[order]
        return torch.cat([order[first], order[~first]])

    def passes(self, lengths: list[int], order: torch.Tensor) -> Iterator[torch.Tensor]:
        """Divides rows into passes: neighbours in length, within the limits on windows and tokens.

        Args:
            lengths: V lengths in tokens, ascending.
            order: `(V,)` the rows that they belong to.
        """
        start = longest = 0
        for row, length in enumerate(lengths):
            longest = max(longest, length)
            full = row - start == self.batch_size or (row + 1 - start) * longest > self.max_batch_tokens
            if full and row > start:
                yield order[start:row]
                start, longest = row, length
        yield order[start:]

    def _encode(
        self, batch: WindowBatch, rows: torch.Tensor, all_layers: bool
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """States `(V', T', H)` of the last layer, or of every layer, and the `(V', T')` mask."""
        length = int(batch.lengths[rows].max())
        mask = batch.attention_mask[rows, :length]
        inputs: dict[str, Any] = {"input_ids": batch.input_ids[rows, :length]}
        # Without padding no mask is needed, and attention without one is faster.
        inputs["attention_mask"] = None if bool(mask.all()) else mask.long()
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = batch.token_type_ids[rows, :length]
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids[rows, :length]
        recording: AbstractContextManager[list[torch.Tensor]] = self._recording() if all_layers else nullcontext([])
        with recording as earlier:
            last = self.backbone(**inputs).last_hidden_state
        return (*earlier, last), mask

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

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return states[:, 0]  # (V', H)
        # In fp32: bfloat16 cannot count beyond 256 tokens.
        weights = mask.unsqueeze(-1).float()
        return (states * weights).sum(1) / weights.sum(1)  # (V', H)
