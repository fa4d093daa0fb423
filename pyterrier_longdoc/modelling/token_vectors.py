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

from .inputs import Input


@dataclass(frozen=True)
class TokenVectors:
    """The rules by which a checkpoint turns texts into vectors of tokens; JSON-able.

    Attributes:
        query_prefix, document_prefix: the marker token or prompt before every query or document.
        query_length, document_length: the maximum number of tokens, special ones included; None if only the backbone
            limits them.
        expand_to, expand_with: queries of fewer tokens are expanded to this number with the token of this id.
        attends: whether the encoder attends to the added tokens.
        skipped: the ids of tokens without a vector.
        skips_in: `"query"` and `"document"`: where they are skipped.
        normalize: whether vectors have length 1.
        mean: whether the score is the mean over the query's tokens instead of the sum.
        pooling, protected: how many tokens of a document share a vector, and how many at its beginning do not.
        pooling_normalizes: whether pooled vectors are normalized again.
        trained: whether the projection is the checkpoint's.
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

    def __post_init__(self) -> None:
        sides = (self.skips_in,) if isinstance(self.skips_in, str) else tuple(self.skips_in)
        object.__setattr__(self, "skips_in", sides)  # JSON does not have tuples
        object.__setattr__(self, "skipped", tuple(self.skipped))

    def expanded(self, query: Input) -> Input:
        """Return the query, expanded if it is short."""
        missing = self.expand_to - len(query)
        if missing <= 0:
            return query
        ids = np.pad(query.ids, (0, missing), constant_values=self.expand_with)
        types = None if query.types is None else np.pad(query.types, (0, missing))
        mask = None if self.attends else np.arange(len(ids)) < len(query)
        return replace(query, ids=ids, types=types, mask=mask)

    def kept(self, one: Input, side: str) -> np.ndarray:
        """Return `(T,)` bool, whether each token of a query or window (`side`) has a vector."""
        every = np.ones(len(one), dtype=bool)
        if side not in self.skips_in:
            return every
        kept = ~np.isin(one.ids, self.skipped)
        # An input of only such tokens keeps them, so that every text has a score.
        return kept if kept.any() else every

    def finish(self, vectors: torch.Tensor, side: str) -> torch.Tensor:
        """Return the projected states `(T, E)` of an input as vectors for the comparison."""
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        if side == "query":
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
