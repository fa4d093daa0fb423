"""Which tokens of a query or window have a vector for late interaction, and what happens to these vectors.

Shapes: V inputs, T tokens of an input, E width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from torch import nn

from .inputs import WindowBatch


@dataclass(frozen=True)
class TokenVectors:
    """How a checkpoint turns texts into vectors of tokens; JSON-able.

    Attributes:
        query_prefix, document_prefix: marker token or prompt before every query, or document.
        query_length, document_length: most tokens, special ones included; None if only the backbone limits them.
        expand_to, expand_with: queries of fewer tokens are filled up to this number, with the token of this id.
        attends: whether the encoder attends to these tokens.
        skipped: ids of tokens that have no vector.
        skips_in: `"query"` and `"document"`: where these are skipped.
        normalize: whether vectors have length 1.
        mean: whether the score is the mean over the query's tokens in place of the sum.
        pooling, protected: how many tokens of a document share a vector, except so many at its beginning.
        pooling_normalizes: whether pooled vectors get length 1 again.
        trained: whether the projection is the checkpoint's.
        side: `"query"` or `"document"`, in the format of an input.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expand_to: int = 0
    expand_with: int = 0
    attends: bool = False
    skipped: tuple[int, ...] = ()
    skips_in: tuple[str, ...] = ("document",)
    normalize: bool = True
    mean: bool = False
    pooling: float = 1.0
    protected: int = 1
    pooling_normalizes: bool = False
    trained: bool = True
    side: str = "document"

    def __post_init__(self) -> None:
        sides = (self.skips_in,) if isinstance(self.skips_in, str) else tuple(self.skips_in)
        object.__setattr__(self, "skips_in", sides)  # JSON has no tuples
        object.__setattr__(self, "skipped", tuple(self.skipped))

    def prepare(self, batch: WindowBatch) -> tuple[WindowBatch, torch.Tensor]:
        """Return V inputs with short queries filled up, and `(V, T)` bool, whether a token has a vector."""
        size = self.expand_to if self.side == "query" else 0
        missing = max(0, size - batch.input_ids.shape[1])
        ids, real = (nn.functional.pad(rows, (0, missing)) for rows in (batch.input_ids, batch.attention_mask))
        types = None if batch.token_type_ids is None else nn.functional.pad(batch.token_type_ids, (0, missing))
        column = torch.arange(ids.shape[1], device=ids.device)
        added = (column >= batch.lengths.unsqueeze(1)) & (column < size)
        ids = ids.masked_fill(added, self.expand_with)
        mask, lengths = real | added if self.attends else real, batch.lengths.clamp(min=size)
        prepared = replace(batch, input_ids=ids, attention_mask=mask, token_type_ids=types, lengths=lengths)
        if self.side not in self.skips_in:
            return prepared, real | added
        kept = (real | added) & ~torch.isin(ids, torch.tensor(self.skipped, device=ids.device, dtype=ids.dtype))
        # An input of nothing but such tokens keeps them: every text has a score.
        return prepared, torch.where(kept.any(1, keepdim=True), kept, real | added)

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the projected states `(T, E)` of an input as vectors that are compared."""
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        if self.side == "query":
            return vectors / len(vectors) if self.mean else vectors
        return self.pooled(vectors)

    def pooled(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return about `T / pooling` of `(T, E)` vectors (of length 1, if this is above 1): means of Ward's clusters.

        Clavié et al. 2024 (arXiv 2409.14683), as `HierarchicalTokenPooling` of sentence-transformers 6.2 with scipy.
        """
        first, rest = vectors[: self.protected], vectors[self.protected :]
        count = max(int(len(rest) // self.pooling), 1)
        if count < len(rest):
            values = rest.detach().cpu().numpy()
            distances = (1 - values @ values.T).clip(0, 2)
            tree = hierarchy.linkage(squareform(distances, checks=False), method="ward")
            labels = hierarchy.fcluster(tree, t=count, criterion="maxclust")
            numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1]).to(rest.device)
            sizes = torch.bincount(numbers)
            sums = rest.new_zeros(len(sizes), rest.shape[1]).index_add(0, numbers, rest)
            vectors = torch.cat([first, sums / sizes.unsqueeze(1)])
        return nn.functional.normalize(vectors, dim=-1) if self.pooling_normalizes else vectors
