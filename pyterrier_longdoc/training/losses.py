"""Losses as pure functions of scores; each returns a scalar, the sum over queries.

Shapes, with G queries, C candidates per query and n negatives: scores, labels and targets of a teacher are `(G, C)`.
Losses of pairs need the score of the positive first, `(G, 1 + n)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


def pairwise_margin(scores: torch.Tensor, *, margin: float = 1.0) -> torch.Tensor:
    """`sum max(0, margin - s+ + s-)` over queries and negatives (Boytsov et al. 2025, with one negative each)."""
    return (margin - _gaps(scores)).clamp(min=0).sum()


def multi_margin(scores: torch.Tensor, *, margin: float = 1.0) -> torch.Tensor:
    """`sum 1 / (1 + n) sum_- max(0, margin - s+ + s-)`: torch's multi-class margin loss, for several negatives.

    With one negative, it is half of `pairwise_margin`.
    """
    return pairwise_margin(scores, margin=margin) / scores.shape[1]


def pairwise_softmax(scores: torch.Tensor) -> torch.Tensor:
    """`sum mean_- (1 - sigmoid(s+ - s-))`: the softmax over each pair (MacAvaney et al. 2019, CEDR)."""
    return torch.sigmoid(-_gaps(scores)).mean(1).sum()


def ranknet(scores: torch.Tensor) -> torch.Tensor:
    """`sum mean_- -log sigmoid(s+ - s-)` (Burges et al. 2005); with one negative, equal to `cross_entropy`."""
    return functional.softplus(-_gaps(scores)).mean(1).sum()


def cross_entropy(scores: torch.Tensor) -> torch.Tensor:
    """`sum -log softmax(s)_0` over the positive and its negatives."""
    return -functional.log_softmax(scores, dim=1)[:, 0].sum()


def listwise_cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`sum_q -sum_d (y_d / sum y) log softmax(s)_d` (Bruch et al. 2019): graded labels as a distribution.

    Labels below 0 count as 0; a query without a label above 0 has no loss. With a single positive of any grade, equal
    to `cross_entropy`.
    """
    gains = labels.clamp(min=0).to(scores.dtype)
    targets = gains / gains.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return -(targets * functional.log_softmax(scores, dim=1)).sum()


def pointwise_bce(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`sum -log sigmoid(s)` over relevant documents (labels above 0) plus `sum -log sigmoid(-s)` over the others.

    If the score is the difference of two logits, this is the cross entropy of the classes "not relevant" and "relevant"
    (Li et al., PARADE). The models of this package have a single logit.
    """
    return functional.binary_cross_entropy_with_logits(scores, (labels > 0).to(scores.dtype), reduction="sum")


def lambda_loss(scores: torch.Tensor, labels: torch.Tensor, *, mu: float = 10.0) -> torch.Tensor:
    """NDCG-Loss2++ of the LambdaLoss framework (Wang et al. 2018, section 6.2).

    `sum_{y_i > y_j} (rho_ij + mu delta_ij) |G_i - G_j| log2(1 + exp(s_j - s_i))` with gains
    `G = (2^y - 1) / maxDCG`, discounts `D_r = log2(1 + r)` at the current ranks, `rho_ij = |1 / D_i - 1 / D_j|` and
    `delta_ij = |1 / D_|i-j| - 1 / D_|i-j|+1|`. Labels below 0 count as 0; `mu` is 10 in the paper, and 0 gives
    LambdaRank's weights.
    """
    order = scores.detach().argsort(dim=1, descending=True, stable=True)
    s, y = scores.gather(1, order), labels.clamp(min=0).to(scores.dtype).gather(1, order)  # (G, C) by rank
    ranks = torch.arange(1, s.shape[1] + 1, device=s.device, dtype=s.dtype)
    inverse = 1 / torch.log2(1 + ranks)  # (C,) 1 / D
    ideal = ((torch.exp2(y.sort(dim=1, descending=True).values) - 1) * inverse).sum(1)
    gains = (torch.exp2(y) - 1) / ideal.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(1)  # (G, C)
    distance = (ranks[:, None] - ranks[None, :]).abs()  # (C, C)
    rho = (inverse[:, None] - inverse[None, :]).abs()
    delta = (1 / torch.log2(1 + distance.clamp(min=1)) - 1 / torch.log2(2 + distance)).abs()
    weights = (rho + mu * delta) * (gains[:, :, None] - gains[:, None, :]).abs()  # (G, C, C)
    better = y[:, :, None] > y[:, None, :]
    costs = functional.softplus(s[:, None, :] - s[:, :, None]) / torch.log(torch.tensor(2.0, dtype=s.dtype))
    return (weights * costs)[better].sum()


def margin_mse(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`sum mean_- ((s+ - s-) - (t+ - t-))^2` (Hofstätter et al. 2020)."""
    return (_gaps(scores) - _gaps(targets.to(scores.dtype))).square().mean(1).sum()


def listwise_kl(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`sum KL(softmax(t) || softmax(s))`: the teacher's distribution over the candidates of a query (Ren et al. 2021).

    Only score differences matter, so scores of the teacher can be shifted. Labels are not used.
    """
    teacher = functional.log_softmax(targets.to(scores.dtype), dim=1)
    return functional.kl_div(functional.log_softmax(scores, dim=1), teacher, reduction="sum", log_target=True)


def distillation(
    scores: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, *, alpha: float = 0.75
) -> torch.Tensor:
    """`alpha CE(student, label) + (1 - alpha) / 2 (z_teacher - z_student)^2`, summed over documents (PARADE, Eq. 8).

    The paper has two logits per document, `(1 - alpha) ||z_teacher - z_student||^2`; the single logit of this package's
    models is their difference. For logits `-z / 2, z / 2`, the squared distance is half of that of the differences z,
    and the cross entropy is `pointwise_bce`. Differs from the authors' code, which averages over the two logits and so
    halves the teacher's part again. `alpha`, the weight of the labels, is 0.75 in the paper.
    """
    distance = (targets.to(scores.dtype) - scores).square().sum() / 2
    return alpha * pointwise_bce(scores, labels) + (1 - alpha) * distance


def _gaps(scores: torch.Tensor) -> torch.Tensor:
    """Return the `(G, n)` differences between the scores of the positive and each negative."""
    return scores[:, :1] - scores[:, 1:]


@dataclass(frozen=True)
class Loss:
    """A loss for the training loop.

    Attributes:
        compute: takes scores `(1, C)`, labels `(1, C)`, the teacher's scores `(1, C)` or None, and the recipe.
        pairs: whether column 0 must be a positive and all others negatives.
        teacher: whether scores of a teacher are needed.
        papers: keys of `references.bib`.
    """

    compute: Callable[[torch.Tensor, torch.Tensor, Any, Any], torch.Tensor]
    pairs: bool = False
    teacher: bool = False
    papers: tuple[str, ...] = ()


LOSSES: dict[str, Loss] = {
    "pairwise_margin": Loss(lambda s, y, t, args: pairwise_margin(s, margin=args.margin), pairs=True),
    "multi_margin": Loss(lambda s, y, t, args: multi_margin(s, margin=args.margin), pairs=True),
    "pairwise_softmax": Loss(lambda s, y, t, args: pairwise_softmax(s), pairs=True, papers=("macavaney-2019-cedr",)),
    "ranknet": Loss(lambda s, y, t, args: ranknet(s), pairs=True, papers=("burges-2005-learning",)),
    "cross_entropy": Loss(lambda s, y, t, args: cross_entropy(s), pairs=True),
    "listwise_cross_entropy": Loss(lambda s, y, t, args: listwise_cross_entropy(s, y), papers=("bruch-2019-analysis",)),
    "pointwise_bce": Loss(lambda s, y, t, args: pointwise_bce(s, y)),
    "lambda_loss": Loss(lambda s, y, t, args: lambda_loss(s, y), papers=("wang-2018-lambdaloss",)),
    "margin_mse": Loss(
        lambda s, y, t, args: margin_mse(s, t), pairs=True, teacher=True, papers=("hofstatter-2020-improving",)
    ),
    "listwise_kl": Loss(lambda s, y, t, args: listwise_kl(s, t), teacher=True, papers=("ren-2021-rocketqav2",)),
    "distillation": Loss(
        lambda s, y, t, args: distillation(s, y, t, alpha=args.alpha), teacher=True, papers=("li-2024-parade",)
    ),
}
"""The losses by name; add your own with `LOSSES["focal"] = Loss(compute)`."""
