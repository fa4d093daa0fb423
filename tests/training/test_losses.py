"""Every loss against its formula in numpy, and the identities between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyterrier_longdoc.training import LOSSES, TrainingArgs
from pyterrier_longdoc.training import losses as L  # noqa: N812

SHAPES = [(1, 2), (4, 2), (3, 6)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def twin_multi_margin(s, y, t):
    return sum(sum(max(0, 1 - row[0] + negative) for negative in row[1:]) / len(row) for row in s)


def twin_pairwise_softmax(s, y, t):
    return sum(np.mean([softmax(np.array([row[0], negative]))[1] for negative in row[1:]]) for row in s)


def twin_ranknet(s, y, t):
    return sum(np.mean([-np.log(sigmoid(row[0] - negative)) for negative in row[1:]]) for row in s)


def twin_cross_entropy(s, y, t):
    return sum(-np.log(softmax(row)[0]) for row in s)


def twin_listwise(s, y, t):
    total = 0.0
    for row, labels in zip(s, np.maximum(y, 0), strict=True):
        if labels.sum():
            total -= (labels / labels.sum() * np.log(softmax(row))).sum()
    return total


def twin_bce(s, y, t):
    return sum(-np.log(sigmoid(v if label > 0 else -v)) for v, label in zip(s.ravel(), y.ravel(), strict=True))


def twin_lambda(s, y, t, mu=10.0):
    total = 0.0
    for row, labels in zip(s, np.maximum(y, 0), strict=True):
        ideal = sum((2.0**g - 1) / np.log2(2 + i) for i, g in enumerate(sorted(labels, reverse=True)))
        rank = {i: r + 1 for r, i in enumerate(np.argsort(-row, kind="stable"))}
        for i in range(len(row)):
            for j in range(len(row)):
                if labels[i] > labels[j]:
                    gap = abs(2.0 ** labels[i] - 2.0 ** labels[j]) / ideal
                    rho = abs(1 / np.log2(1 + rank[i]) - 1 / np.log2(1 + rank[j]))
                    apart = abs(rank[i] - rank[j])
                    delta = abs(1 / np.log2(1 + apart) - 1 / np.log2(2 + apart))
                    total += (rho + mu * delta) * gap * np.log2(1 + np.exp(row[j] - row[i]))
    return total


def twin_margin_mse(s, y, t):
    rows = zip(s, t, strict=True)
    return sum(np.mean([((a[0] - x) - (b[0] - z)) ** 2 for x, z in zip(a[1:], b[1:], strict=True)]) for a, b in rows)


def twin_distillation(s, y, t):
    return 0.75 * twin_bce(s, y, t) + 0.25 * ((t - s) ** 2).sum()


TWINS = {
    "pairwise_margin": lambda s, y, t: sum(max(0, 1 - row[0] + v) for row in s for v in row[1:]),
    "multi_margin": twin_multi_margin,
    "pairwise_softmax": twin_pairwise_softmax,
    "ranknet": twin_ranknet,
    "cross_entropy": twin_cross_entropy,
    "listwise_cross_entropy": twin_listwise,
    "pointwise_bce": twin_bce,
    "lambda_loss": twin_lambda,
    "margin_mse": twin_margin_mse,
    "distillation": twin_distillation,
}


def data(shape):
    rng = np.random.default_rng(sum(shape))
    return 3 * rng.normal(size=shape), rng.integers(-2, 4, size=shape).astype(float), rng.normal(size=shape)


def compute(name, s, y, t):
    tensors = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in (s, y, t)]
    return LOSSES[name].compute(*tensors, TrainingArgs())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_formula(name, shape):
    assert compute(name, *data(shape)).item() == pytest.approx(TWINS[name](*data(shape)))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_formula(name):
    s, y, t = data((2, 4))
    scores = torch.tensor(s, requires_grad=True)
    LOSSES[name].compute(scores, torch.tensor(y), torch.tensor(t), TrainingArgs()).backward()
    numeric = np.zeros_like(s)
    for at in np.ndindex(s.shape):
        step = np.zeros_like(s)
        step[at] = 1e-6
        numeric[at] = (TWINS[name](s + step, y, t) - TWINS[name](s - step, y, t)) / 2e-6
    np.testing.assert_allclose(scores.grad.numpy(), numeric, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_scores_stay_finite(name):
    scores = torch.tensor([[-1e4, 1e4, 0.0]], requires_grad=True)
    loss = LOSSES[name].compute(scores, torch.tensor([[1.0, 0.0, 2.0]]), torch.zeros(1, 3), TrainingArgs())
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.isfinite().all()


def test_one_negative():
    s, *_ = data((5, 2))
    scores = torch.tensor(s)
    assert L.multi_margin(scores).item() == pytest.approx(L.pairwise_margin(scores).item() / 2)
    assert L.ranknet(scores).item() == pytest.approx(L.cross_entropy(scores).item())
    assert L.pairwise_softmax(torch.ones(3, 2)).item() == pytest.approx(3 * 0.5)
    binary = torch.tensor([[1.0, 0.0]] * 5)
    assert L.listwise_cross_entropy(scores, binary).item() == pytest.approx(L.cross_entropy(scores).item())


def test_torchs_own_multi_margin():
    s, *_ = data((3, 6))
    expected = torch.nn.functional.multi_margin_loss(torch.tensor(s), torch.zeros(3, dtype=torch.long), reduction="sum")
    assert L.multi_margin(torch.tensor(s)).item() == pytest.approx(expected.item())


def test_two_classes_are_one_logit():
    logits = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[1.0, 0.0, 3.0]] * 4)
    one = L.pointwise_bce(logits[..., 1] - logits[..., 0], labels)
    assert L.two_class(logits, labels).item() == pytest.approx(one.item())


def test_margin_of_the_recipe():
    s = np.array([[2.0, 0.0]])
    assert L.pairwise_margin(torch.tensor(s), margin=5.0).item() == 3.0
    args = TrainingArgs(margin=5.0)
    assert LOSSES["pairwise_margin"].compute(torch.tensor(s), None, None, args).item() == 3.0
    assert LOSSES["multi_margin"].compute(torch.tensor(s), None, None, args).item() == 1.5


def test_teacher_that_the_student_equals_costs_nothing():
    s, y, _ = data((2, 3))
    assert L.margin_mse(torch.tensor(s), torch.tensor(s) + 5).item() == pytest.approx(0)
    assert L.distillation(torch.tensor(s), torch.tensor(y), torch.tensor(s), alpha=0.0).item() == 0.0


def test_queries_without_relevant_documents_cost_nothing_listwise():
    for loss in (L.listwise_cross_entropy, L.lambda_loss):
        scores = torch.randn(2, 3, requires_grad=True)
        value = loss(scores, torch.tensor([[0.0, -1.0, 0.0]] * 2))
        value.backward()
        assert value.item() == 0.0
        assert scores.grad.abs().sum() == 0
