"""Changed weights are noticed, whether or not torch counts the writes to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyterrier_longdoc.modelling.weights import WeightsWatch, fingerprint


def module() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    made.register_buffer("steps", torch.tensor(3))
    return made


def swap_rows(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.flip(0))


def next_number(tensor: torch.Tensor) -> None:
    tensor[0, 0] = torch.nextafter(tensor[0, 0], torch.tensor(9.0))


@pytest.mark.parametrize("write", [torch.neg_, swap_rows, next_number, lambda tensor: tensor.mul_(2)])
def test_a_watch_finds_uncounted_writes_by_the_contents(write):
    watch, weights = WeightsWatch(), module()
    assert watch.changed(weights, contents=True)
    assert not watch.changed(weights, contents=True)
    write(weights[0].weight.data)
    assert not watch.changed(weights, contents=False)
    assert watch.changed(weights, contents=True)
    assert not watch.changed(weights, contents=True)


def test_a_watch_finds_counted_writes_and_replaced_tensors_without_reading_contents():
    watch, weights = WeightsWatch(), module()
    assert watch.changed(weights, contents=False)
    assert not watch.changed(weights, contents=False)
    weights.steps.add_(1)
    assert watch.changed(weights, contents=False)
    assert not watch.changed(weights, contents=True)
    weights[0].bias = nn.Parameter(weights[0].bias.detach().clone())
    assert watch.changed(weights, contents=False)
    watch.forget()
    assert watch.changed(weights, contents=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_fingerprints_depend_on_the_values_of_every_dtype(dtype):
    values = torch.arange(-6, 6).reshape(4, 3).to(dtype)
    before = fingerprint({"weight": values})
    assert fingerprint({"weight": values.clone()}) == before
    assert fingerprint({"weight": values.T.contiguous().T}) == before
    for other in (values.flip(0), ~values if dtype == torch.bool else -values, values[:0]):
        assert fingerprint({"weight": other}) != before


def test_fingerprints_depend_on_names_and_values_but_not_on_their_order():
    one, other = torch.ones(2, 3), torch.zeros(2)
    both = fingerprint({"a": one, "b": other})
    assert fingerprint({"b": other, "a": one}) == both  # in whatever order
    assert len({both, fingerprint({"a": one}), fingerprint({"b": one}), fingerprint({"b": one, "a": other})}) == 4
