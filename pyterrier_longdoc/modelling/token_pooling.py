"""Fewer vectors for a text: neighbours in meaning share one (Clavié et al. 2024, arXiv 2409.14683)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from torch import nn


def pooled(vectors: torch.Tensor, factor: float, *, protected: int = 1, normalize: bool = True) -> torch.Tensor:
    """Return about `T / factor` of `(T, E)` vectors of length 1: the means of clusters by Ward's method.

    As `HierarchicalTokenPooling` of sentence-transformers 6.2 with scipy.

    Args:
        vectors: of the tokens of a text.
        factor: how many tokens share a vector.
        protected: so many vectors at the beginning stay as they are.
        normalize: give all vectors length 1 afterwards.
    """
    first, rest = vectors[:protected], vectors[protected:]
    count = max(int(len(rest) // factor), 1)
    if count < len(rest):
        values = rest.detach().float().cpu()
        distances = (1 - values @ values.T).clamp_(0, 2).numpy()
        tree = hierarchy.linkage(squareform(distances, checks=False), method="ward")
        labels = hierarchy.fcluster(tree, t=count, criterion="maxclust")
        numbers = torch.from_numpy(np.unique(labels, return_inverse=True)[1]).to(rest.device)
        sizes = torch.bincount(numbers)
        sums = rest.new_zeros(len(sizes), rest.shape[1]).index_add(0, numbers, rest)
        vectors = torch.cat([first, sums / sizes.unsqueeze(1)])
    return nn.functional.normalize(vectors, dim=-1) if normalize else vectors
