"""Score aggregation: the same layer scores every window, and the scores are combined.

Shapes: B documents, N windows, H hidden size. `s` are the window scores, `m` the mask of real windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..inputs import Encoded
from .base import Head, masked_mean


class FirstPHead(Head, name="firstp"):
    """`s_1`: only the first window (FirstP; with one long window, LongP)."""

    from_scores = True

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score(encoded.cls[:, 0])


class MaxPHead(Head, name="maxp"):
    """`max_i s_i` (Dai & Callan 2019; Boytsov et al. 2025, section 3)."""

    from_scores = True

    def forward(self, encoded: Encoded) -> torch.Tensor:
        scores = self.score(encoded.cls)  # (B, N)
        return scores.masked_fill(~encoded.mask, float("-inf")).amax(1)


class SumPHead(Head, name="sump"):
    """`sum_i s_i` (Dai & Callan 2019; Boytsov et al. 2025, section 3).

    Differs from FlexNeuART: windows of padding are ignored.
    """

    from_scores = True

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score(encoded.cls).masked_fill(~encoded.mask, 0.0).sum(1)


class AvgPHead(Head, name="avgp"):
    """`final(mean_i x_i)`, which without dropout is `mean_i s_i` (Boytsov et al. 2025, section 3).

    Differs from FlexNeuART: windows of padding are not part of the mean.
    """

    from_scores = True

    def forward(self, encoded: Encoded) -> torch.Tensor:
        return self.score(masked_mean(encoded.cls, encoded.mask))


class KMaxPHead(Head, name="kmaxp"):
    """The best `min(k, n)` of `n` window scores, averaged or weighted.

    With `k=1`, this is MaxP; with `k >= n` and no weights, AvgP over the same windows. Birch (Yilmaz et al. 2019)
    uses the weighted sum `sum_i w_i s_(i)` of the best sentences.

    Args:
        hidden_size: H.
        k: the number of scores.
        weights: `w_1 ... w_k`, of the best score, the second best and so on; None averages.
    """

    from_scores = True
    tunable = ("k", "weights")

    def __init__(self, hidden_size: int, *, k: int = 3, weights: Sequence[float] | None = None, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        numbers = None if weights is None else np.asarray(weights, dtype=float)
        if numbers is not None and not (numbers.shape == (k,) and np.isfinite(numbers).all()):
            raise ValueError(f"weights={weights} must be k={k} finite numbers")
        self.k = k
        self.weights = None if numbers is None else numbers.tolist()

    def forward(self, encoded: Encoded) -> torch.Tensor:
        scores = self.score(encoded.cls).masked_fill(~encoded.mask, float("-inf"))  # (B, N)
        best = scores.topk(min(self.k, scores.shape[1]), dim=1).values  # (B, k')
        real = torch.arange(best.shape[1], device=best.device) < encoded.mask.sum(1, keepdim=True)
        best = best.masked_fill(~real, 0.0)
        if self.weights is None:
            return best.sum(1) / real.sum(1)
        return best @ best.new_tensor(self.weights[: best.shape[1]])


class SoftMaxPHead(Head, name="softmaxp"):
    """`t log(mean_i exp(s_i / t))`: the maximum for a temperature t near 0, the mean for a large one.

    Source: the log-mean-exp of Pinheiro & Collobert 2015, whose `r` is `1 / t`.

    Args:
        hidden_size: H.
        temperature: t, in logits.
    """

    from_scores = True
    tunable = ("temperature",)

    def __init__(self, hidden_size: int, *, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.temperature = temperature

    def forward(self, encoded: Encoded) -> torch.Tensor:
        scores = self.score(encoded.cls).masked_fill(~encoded.mask, float("-inf"))  # (B, N)
        best = scores.max(1, keepdim=True).values
        # Minus 1, because 1 would absorb small differences at a large temperature.
        exponentials = torch.expm1((scores - best) / self.temperature).masked_fill(~encoded.mask, 0.0)
        mean = exponentials.sum(1) / encoded.mask.sum(1)
        return best.squeeze(1) + self.temperature * torch.log1p(mean)
