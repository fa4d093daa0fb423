"""Every loss against its formula in numpy, and the identities between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pyterrier_longdoc.training import LOSSES, Example, Loss, TrainingArgs
from pyterrier_longdoc.training import losses as L  # noqa: N812
from pyterrier_longdoc.training.loop import ranking_loss


def log_sigmoid(x):
    return -np.log(1 + np.exp(-x))


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


def listwise(s, y, t):
    gains = np.maximum(y, 0)
    return -(gains / gains.sum() * log_softmax(s)).sum() if gains.sum() else 0.0


def bce(s, y, t):
    return -log_sigmoid(np.where(y > 0, s, -s)).sum()


def lambda_loss(s, y, t, mu=10.0):
    total, labels = 0.0, np.maximum(y, 0)
    ideal = sum((2.0**g - 1) / np.log2(2 + i) for i, g in enumerate(sorted(labels, reverse=True)))
    rank = {i: r + 1 for r, i in enumerate(np.argsort(-s, kind="stable"))}
    for i, j in itertools.product(range(len(s)), repeat=2):
        if labels[i] > labels[j]:
            gap = abs(2.0 ** labels[i] - 2.0 ** labels[j]) / ideal
            rho = abs(1 / np.log2(1 + rank[i]) - 1 / np.log2(1 + rank[j]))
            apart = abs(rank[i] - rank[j])
            delta = abs(1 / np.log2(1 + apart) - 1 / np.log2(2 + apart))
            total += (rho + mu * delta) * gap * np.log2(1 + np.exp(s[j] - s[i]))
    return total


TWINS = {
    "pairwise_margin": lambda s, y, t: np.maximum(0, 1 - s[0] + s[1:]).sum(),
    "multi_margin": lambda s, y, t: torch.nn.functional.multi_margin_loss(torch.tensor(s), torch.tensor(0)).item(),
    "pairwise_softmax": lambda s, y, t: np.mean([np.exp(log_softmax(np.array([s[0], x])))[1] for x in s[1:]]),
    "ranknet": lambda s, y, t: -log_sigmoid(s[0] - s[1:]).mean(),
    "cross_entropy": lambda s, y, t: -log_softmax(s)[0],
    "listwise_cross_entropy": listwise,
    "pointwise_bce": bce,
    "lambda_loss": lambda_loss,
    "margin_mse": lambda s, y, t: np.mean(((s[0] - s[1:]) - (t[0] - t[1:])) ** 2),
    "listwise_kl": lambda s, y, t: (np.exp(log_softmax(t)) * (log_softmax(t) - log_softmax(s))).sum(),
    "distillation": lambda s, y, t: 0.75 * bce(s, y, t) + 0.25 / 2 * ((t - s) ** 2).sum(),
}
"""The loss of one query."""


def twin(name, s, y, t):
    return sum(TWINS[name](*row) for row in zip(s, y, t, strict=True))


def data(shape):
    rng = np.random.default_rng(sum(shape))
    return 3 * rng.normal(size=shape), rng.integers(-2, 4, size=shape).astype(float), rng.normal(size=shape)


def compute(name, s, y, t):
    tensors = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in (s, y, t)]
    return LOSSES[name].compute(*tensors, TrainingArgs())


def test_losses_and_gradients_equal_their_formulas():
    for name in LOSSES:
        for shape in ((1, 2), (4, 2), (3, 6)):
            assert compute(name, *data(shape)).item() == pytest.approx(twin(name, *data(shape)))
        s, y, t = data((2, 4))
        scores = torch.tensor(s, requires_grad=True)
        LOSSES[name].compute(scores, torch.tensor(y), torch.tensor(t), TrainingArgs()).backward()
        numeric = np.zeros_like(s)
        for at in np.ndindex(s.shape):
            step = np.zeros_like(s)
            step[at] = 1e-6
            numeric[at] = (twin(name, s + step, y, t) - twin(name, s - step, y, t)) / 2e-6
        np.testing.assert_allclose(scores.grad.numpy(), numeric, atol=1e-5)
        # Extreme scores stay finite.
        scores = torch.tensor([[-1e4, 1e4, 0.0]], requires_grad=True)
        loss = LOSSES[name].compute(scores, torch.tensor([[1.0, 0.0, 2.0]]), torch.zeros(1, 3), TrainingArgs())
        loss.backward()
        assert loss.isfinite()
        assert scores.grad.isfinite().all()


def test_listwise_kl_does_not_change_if_teacher_scores_are_shifted():
    s, y, t = data((3, 4))
    assert compute("listwise_kl", t + 7, y, t).item() == pytest.approx(0.0, abs=1e-9)
    assert compute("listwise_kl", s, y, t + 5).item() == pytest.approx(compute("listwise_kl", s, -y, t).item())


@pytest.mark.parametrize("alpha", [0.75, 0.25, 0.0])
def test_distillation_is_equation_8_with_two_logits(alpha):
    """With logits "not relevant" and "relevant" at -z/2 and z/2, each written out as the paper does."""
    s, y, t = data((3, 4))
    total = 0.0
    for score, label, target in zip(s.flat, y.flat, t.flat, strict=True):
        student, teacher = np.array([-score / 2, score / 2]), np.array([-target / 2, target / 2])
        cross_entropy = -log_softmax(student)[int(label > 0)]
        total += alpha * cross_entropy + (1 - alpha) * np.linalg.norm(teacher - student) ** 2
    found = L.distillation(*map(torch.tensor, (s, y, t)), alpha=alpha)
    assert found.item() == pytest.approx(total)


def test_losses_use_margin_and_alpha_of_the_recipe():
    args, scores = TrainingArgs(margin=5.0, alpha=0.0), torch.tensor([[2.0, 0.0]])
    assert LOSSES["pairwise_margin"].compute(scores, None, None, args).item() == 3.0
    assert LOSSES["multi_margin"].compute(scores, None, None, args).item() == 1.5
    assert LOSSES["distillation"].compute(scores, torch.ones(1, 2), scores + 2.0, args).item() == 4.0


def test_a_custom_loss_can_be_registered(monkeypatch):
    focal = Loss(lambda s, y, t, args: (torch.sigmoid(s[:, 1:] - s[:, :1]) ** 2).sum(), pairs=True)
    monkeypatch.setitem(LOSSES, "focal", focal)
    example = Example("1", "query", ("relevant", "not"), (1.0, 0.0))
    loss = ranking_loss(lambda queries, texts: torch.tensor([2.0, 0.5]), [example], TrainingArgs(loss="focal"))
    assert loss.item() == pytest.approx(1 / (1 + np.exp(1.5)) ** 2)
    with pytest.raises(ValueError, match="loss='focal'"):
        TrainingArgs(loss="focal", sampling="listwise")


def test_listwise_losses_are_zero_for_queries_without_relevant_documents():
    for loss in (L.listwise_cross_entropy, L.lambda_loss):
        scores = torch.randn(2, 3, requires_grad=True)
        value = loss(scores, torch.tensor([[0.0, -1.0, 0.0]] * 2))
        value.backward()
        assert value.item() == 0.0
        assert scores.grad.abs().sum() == 0
