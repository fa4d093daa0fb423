"""TKL: kernels over sliding regions, saturated, and the best regions of a document.

S. Hofstätter, H. Zamani, B. Mitra, N. Craswell, A. Hanbury, "Local Self-Attention over Long Text for Efficient Document
Retrieval", SIGIR 2020. Constants, and all that the paper leaves open, are from the published code (matchmaker,
`sigir20_tkl.py` and `tkl.yaml`).

Shapes: B documents, Q query tokens, D document tokens, R regions of the longest document, K kernels, H width of the
query's states.
"""

from __future__ import annotations

import torch
from torch import nn

from ..inputs import Encoded
from .base import TokenHead

MEANS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, -0.1, -0.3, -0.5, -0.7, -0.9)
WIDTH = 0.1

NEIGHBOURS = (0, -1, 1, -2, 2)
"""Offsets of the regions that count along with a best one, including itself."""

_DECIMALS = 4
"""Decimals to which regions are compared: repeated text may differ in the last bits between batches."""


class TklHead(TokenHead, name="tkl"):
    """`sum_(t, n) v_tn s(r_t + n)`, `s(r) = sum_i sum_k w_k (a k_ir^(1/b) - c)` over kernels `k`, query tokens `i`.

    `k_ir` sums the Gaussian kernel of the cosines of query token i and the tokens of region r. Kernels have means of
    -0.9, -0.7 ... 0.9 and 1, and a width of 0.1; they are not trained. `a`, `b` and `c` are linear in two features: the
    salience of the query token (linear in its state) and the tokens in the region. `r_t` are the best regions, none of
    which overlaps a better one; `n` is 0, -1, 1, -2 and 2: their neighbours count with separate weights.

    As in the published code, the two features first go through a layer norm, which retains little more than which is
    larger: salience hardly learns.

    Differs from the published code, where a document's score depends on its batch. Here, regions end with the document;
    there, they extend into the padding up to the longest document of the batch. A document with fewer than `t` such
    regions counts those it has; there, some may count twice. A document without tokens has one empty region.

    Args:
        hidden_size: H.
        region_size: tokens in a region.
        region_stride: tokens from one region's start to the next one's.
        best_regions: t, the number of best regions.
    """

    needs = "last"

    def __init__(
        self, hidden_size: int, *, region_size: int = 30, region_stride: int = 2, best_regions: int = 3
    ) -> None:
        super().__init__(hidden_size, len(MEANS))
        self.size, self.stride, self.best = region_size, region_stride, best_regions
        self.salience = nn.Linear(hidden_size, 1, bias=False)
        self.norm = nn.LayerNorm(2)
        self.saturation = nn.Linear(2, 3)  # a, b, c
        self.region_weights = nn.Parameter(torch.ones(best_regions, len(NEIGHBOURS)))
        self.final = nn.Linear(len(MEANS), 1, bias=False)
        nn.init.constant_(self.saturation.bias, 100.0)
        for layer in (self.saturation, self.final):
            nn.init.uniform_(layer.weight, -0.014, 0.014)

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.query_contributions(encoded).sum(1)

    def query_contributions(self, encoded: Encoded) -> torch.Tensor:
        lengths = encoded.matches.document_mask.sum(1)  # (B,)
        counts = -(-(lengths - self.size).clamp(min=0) // self.stride) + 1
        terms = self.region_terms(encoded, int(counts.max()))  # (B, Q, R)
        regions, weights = self._best(terms.detach().sum(1), counts)
        best_terms = terms.gather(2, regions.unsqueeze(1).expand(-1, terms.shape[1], -1))
        return (best_terms * weights.unsqueeze(1)).sum(2)

    def region_terms(self, encoded: Encoded, regions: int) -> torch.Tensor:
        """Return each query token's part in the score of each region, `(B, Q, R)`; 0 at padded query tokens."""
        matches = encoded.matches
        tokens = self._over_regions(matches.document_mask.float(), regions).unsqueeze(1)  # (B, 1, R)
        features = torch.broadcast_tensors(self.salience(encoded.query.states), tokens)  # (B, Q, R) each
        a, b, c = self.saturation(self.norm(torch.stack(features, -1))).unbind(-1)  # (B, Q, R)
        terms = torch.zeros_like(a)
        # Kernel by kernel: all at once would take eleven times the memory of the matching tensor.
        for mean, weight in zip(MEANS, self.final.weight[0], strict=True):
            kernel = torch.exp(-0.5 * ((matches.values[:, -1] - mean) / WIDTH) ** 2)  # (B, Q, D)
            count = self._over_regions(kernel * matches.document_mask.unsqueeze(1), regions).clamp(min=1e-10)
            terms = terms + weight * (a * count ** (1.0 / b) - c)
        return terms.masked_fill(~matches.query_mask.unsqueeze(2), 0.0)

    def _over_regions(self, values: torch.Tensor, regions: int) -> torch.Tensor:
        """Return `(..., R)` sums of `(..., D)` values."""
        missing = self.size + (regions - 1) * self.stride - values.shape[-1]
        return nn.functional.pad(values, (0, missing)).unfold(-1, self.size, self.stride).sum(-1)

    def _best(self, scores: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `(B, t * n)` regions that count and their weights; 0 for regions that a document lacks."""
        column = torch.arange(scores.shape[1], device=scores.device)
        open_scores = scores.round(decimals=_DECIMALS).masked_fill(column >= counts.unsqueeze(1), -torch.inf)
        offsets = torch.tensor(NEIGHBOURS, device=scores.device)
        regions, weights = [], []
        for weight in self.region_weights:
            value, best = open_scores.max(1, keepdim=True)  # (B, 1)
            # Beyond an end of the document, its region at that end is used.
            regions.append(torch.minimum((best + offsets).clamp(min=0), counts.unsqueeze(1) - 1))
            weights.append(weight * value.isfinite())
            open_scores = open_scores.masked_fill((column - best).abs() * self.stride < self.size, -torch.inf)
        return torch.cat(regions, 1), torch.cat(weights, 1)
