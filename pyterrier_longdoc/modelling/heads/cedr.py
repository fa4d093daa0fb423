"""CEDR: classic interaction models over the contextual token embeddings of every layer, concatenated with `[CLS]`.

MacAvaney et al., "CEDR: Contextualized Embeddings for Document Ranking" (2019), with the constants of Boytsov et al.
2025. Shapes: B documents, C = layers + 1 channels (the embedding layer included), Q query tokens, D document tokens,
H hidden size. `X[c, i, j]` is the cosine of query token i and document token j in layer c.

Differs from CEDR and FlexNeuART: padding is ignored in kernels, histograms and n-grams, and `[CLS]` is averaged only
over real chunks, so that a score depends neither on padding nor on other documents. `[CLS]` passes through the
cross-encoder's representation step if there is one.
"""

from __future__ import annotations

import torch
from torch import nn

from ..inputs import Encoded, Matches
from .base import TokenHead, WarmStart, masked_mean


class CedrKnrmHead(TokenHead, name="cedr-knrm"):
    """`w . [sum_i log(1e-6 + sum_j k(X[c, i, j])) for every kernel k and layer c; cls] + b` (CEDR-KNRM).

    Eleven Gaussian kernels `exp(-(x - mu)^2 / (2 sigma^2))` with learnable mu and sigma; mu starts at -0.9, -0.7 ...
    0.9 with sigma 0.1, and at 1.0 with sigma 0.001. On top of a cross-encoder, the kernels' weights start at zero,
    so that the head starts as AvgP over the same chunks. No dropout, as in CEDR.

    Args:
        hidden_size: H.
        channels: C.
    """

    needs = "all"

    def __init__(self, hidden_size: int, *, channels: int) -> None:
        means = [-0.9 + 0.2 * k for k in range(10)] + [1.0]
        super().__init__(hidden_size, len(means) * channels + hidden_size)
        self.means = nn.Parameter(torch.tensor(means))
        self.widths = nn.Parameter(torch.tensor([0.1] * 10 + [0.001]))

    def forward(self, encoded: Encoded) -> torch.Tensor:
        features = self.soft_counts(encoded.matches).sum(2).flatten(1)  # (B, K * C)
        return self.score(torch.cat([features, masked_mean(encoded.cls, encoded.mask)], 1))

    def soft_counts(self, matches: Matches) -> torch.Tensor:
        """Return the `(B, K * C, Q)` logarithms of the kernels' sums over document tokens; 0 at padded query tokens."""
        document = matches.document_mask[:, None, None, :]
        kernel_counts = []
        # Kernel by kernel: all at once would take eleven times the memory of the matching tensor.
        for mean, width in zip(self.means, self.widths, strict=True):
            kernel = torch.exp(-0.5 * ((matches.values - mean) / width) ** 2) * document
            kernel_counts.append(torch.log(kernel.sum(-1) + 1e-6))  # (B, C, Q)
        counts = torch.cat(kernel_counts, 1)
        return counts.masked_fill(~matches.query_mask.unsqueeze(1), 0.0)

    def query_contributions(self, encoded: Encoded) -> torch.Tensor:
        counts = self.soft_counts(encoded.matches)  # (B, K * C, Q)
        weights = self.final.weight[0, : counts.shape[1]]
        return torch.einsum("bkq,k->bq", counts, weights)

    def ready_from(self, start: WarmStart) -> bool:
        """Return whether the checkpoint has the part of the last layer that scores window vectors."""
        return start.final is not None and start.final.in_features == self.hidden_size

    def warm_start(self, start: WarmStart) -> None:
        if start.final is None or start.final.in_features != self.hidden_size:
            return
        features = self.final.in_features - self.hidden_size
        with torch.no_grad():
            self.final.weight[:, :features] = 0.0
            self.final.weight[:, features:] = start.final.weight
            self.final.bias.copy_(start.final.bias)


class CedrPacrrHead(TokenHead, name="cedr-pacrr"):
    """`network([top_j max_f relu(conv_n(X))[f, i, j] for every query token i and n = 1, 2, 3; cls])` (CEDR-PACRR).

    The convolutions are n x n with 32 filters f, `top` keeps the 2 best matches over the document, and the network
    has 32, 32 and 1 units. The number of query tokens is part of the weights.

    Args:
        hidden_size: H.
        channels: C.
        query_size: the maximum number of query tokens; 32 in Boytsov et al. 2025.
        filters: the number of filters of each convolution.
        top: the number of best matches that are kept per query token and n.
    """

    needs = "all"

    def __init__(
        self, hidden_size: int, *, channels: int, query_size: int = 32, filters: int = 32, top: int = 2
    ) -> None:
        super().__init__(hidden_size, 32)
        self.query_size, self.top = query_size, top
        self.ngrams = nn.ModuleList(nn.Conv2d(channels, filters, n) for n in (1, 2, 3))
        self.hidden = nn.Sequential(
            nn.Linear(query_size * 3 * top + hidden_size, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        )

    def forward(self, encoded: Encoded) -> torch.Tensor:
        matches = encoded.matches
        tokens, length = matches.values.shape[2:]
        missing, short = self.query_size - tokens, max(0, self.top - length)
        if missing < 0:
            raise ValueError(f"this head has weights for {self.query_size} query tokens, not {tokens}")
        values = nn.functional.pad(matches.values, (0, short, 0, missing))
        query = nn.functional.pad(matches.query_mask, (0, missing))  # (B, query_size)
        document = nn.functional.pad(matches.document_mask, (0, short))
        features = torch.cat(
            [self._best(values, document, n, ngram) for n, ngram in enumerate(self.ngrams, 1)], 2
        )  # (B, Q, 3 * top)
        features = features * query.unsqueeze(-1)
        return self.score(self.hidden(torch.cat([features.flatten(1), masked_mean(encoded.cls, encoded.mask)], 1)))

    def _best(self, values: torch.Tensor, document: torch.Tensor, n: int, ngram: nn.Module) -> torch.Tensor:
        strongest = ngram(nn.functional.pad(values, (0, n - 1, 0, n - 1))).relu().amax(1)  # (B, Q, D)
        # Values are not negative, so a zero never displaces a match.
        return (strongest * document.unsqueeze(1)).topk(self.top, dim=2).values


class CedrDrmmHead(TokenHead, name="cedr-drmm"):
    """`sum_i network([log histogram of X[c, i, :] for every layer c; cls])` over query tokens i (CEDR-DRMM).

    Eleven bins, the last for a cosine of exactly 1; counts c enter as `log(c + 1e-5)`; the network has 5 hidden units.
    The histogram has no gradient: the encoder learns only through cls.

    Args:
        hidden_size: H.
        channels: C.
        bins: the number of bins.
        units: the number of hidden units.
    """

    needs = "all"

    def __init__(self, hidden_size: int, *, channels: int, bins: int = 11, units: int = 5) -> None:
        super().__init__(hidden_size, units)
        self.bins = bins
        self.hidden = nn.Sequential(nn.Linear(bins * channels + hidden_size, units), nn.ReLU())

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.query_contributions(encoded).sum(1)

    def query_contributions(self, encoded: Encoded) -> torch.Tensor:
        matches = encoded.matches
        counts = self.histogram(matches)  # (B, Q, bins, C)
        features = torch.log(counts + 1e-5).flatten(2)  # (B, Q, bins * C)
        cls = masked_mean(encoded.cls, encoded.mask).unsqueeze(1).expand(-1, features.shape[1], -1)
        terms = self.score(self.hidden(torch.cat([features, cls], 2)))  # (B, Q)
        return terms.masked_fill(~matches.query_mask, 0.0)

    @torch.no_grad()
    def histogram(self, matches: Matches) -> torch.Tensor:
        """Count the `(B, Q, bins, C)` real document tokens in each bin."""
        # 1.000001: rounding must not push a cosine of -1 below the first bin.
        index = ((matches.values + 1.000001) / 2.0 * (self.bins - 1)).long().clamp(0, self.bins - 1)  # (B, C, Q, D)
        real = matches.document_mask[:, None, None, :].expand_as(index).to(matches.values.dtype)
        counts = matches.values.new_zeros(*index.shape[:3], self.bins).scatter_add_(3, index, real)  # (B, C, Q, bins)
        return counts.permute(0, 2, 3, 1)
