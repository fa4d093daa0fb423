"""The window encoder: every window of a batch through the backbone, the document axis restored at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from .backbones import Backbone
from .batching import Encoded, WindowBatch, to_dense


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

    def forward(self, batch: WindowBatch, on_share: Callable[[float], None] | None = None) -> Encoded:
        """Encodes the windows in batches of like length.

        Args:
            batch: V windows of B documents.
            on_share: called after each pass with its share of the batch's windows, for a progress bar.

        Returns:
            `cls (B, N, H)` in fp32 and `mask (B, N)`.
        """
        order = torch.argsort(batch.lengths, stable=True)
        vectors = []
        for rows in self._passes(batch.lengths[order].tolist(), order):
            vectors.append(self._encode(batch, rows))
            if on_share is not None:
                on_share(len(rows) / len(order))
        restore = torch.empty_like(order)
        restore[order] = torch.arange(len(order), device=order.device)
        pooled = torch.cat(vectors)[restore]  # (V, H)
        return to_dense(self.representation(pooled).float(), batch.doc, batch.documents)

    def _passes(self, lengths: list[int], order: torch.Tensor) -> Iterator[torch.Tensor]:
        """Rows of each pass: neighbours in length, within the limits on windows and tokens."""
        start = 0
        for row in range(1, len(lengths) + 1):
            full = row - start == self.batch_size
            if row == len(lengths) or full or (row + 1 - start) * lengths[row] > self.max_batch_tokens:
                yield order[start:row]
                start = row

    def _encode(self, batch: WindowBatch, rows: torch.Tensor) -> torch.Tensor:
        length = int(batch.lengths[rows].max())
        mask = batch.attention_mask[rows, :length]
        inputs: dict[str, torch.Tensor | None] = {"input_ids": batch.input_ids[rows, :length]}
        # Without padding no mask is needed, and attention without one is faster.
        inputs["attention_mask"] = None if bool(mask.all()) else mask.long()
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = batch.token_type_ids[rows, :length]
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids[rows, :length]
        states = self.backbone(**inputs).last_hidden_state  # (V', T', H)
        return self._pool(states, mask)

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return states[:, 0]  # (V', H)
        # In fp32: bfloat16 cannot count beyond 256 tokens.
        weights = mask.unsqueeze(-1).float()
        return (states * weights).sum(1) / weights.sum(1)  # (V', H)
