"""Weights in memory: changes are noticed, whether or not torch counts the writes; no file changes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.devices import in_own_memory
from pyterrier_longdoc.modelling.weights import WeightsWatch, fingerprint

from ..support import tiny, tiny_long
from ..support.memory import misplaced
from ..support.systems import BI_ENCODERS, QUIET, SYSTEMS, make, scores

pytestmark = QUIET


def module() -> nn.Module:
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


# Weights lie in memory of their own: no file that is overwritten changes them, and kernels find them aligned.


@pytest.mark.parametrize("name", SYSTEMS)
def test_weights_of_every_model_are_in_their_own_memory(name):
    assert misplaced(make(name, device="cpu").model) == []


@pytest.mark.parametrize("kind", tiny_long.LONG)
def test_weights_of_every_kind_of_checkpoint_are_in_their_own_memory(kind, tmp_path):
    template = {"template": "plain"} if "llama" in kind or "qwen3" in kind else {}
    assert misplaced(ld.LongP(tiny_long.make(kind, tmp_path), device="cpu", **template).model) == []


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.data_ptr()
    in_own_memory(model)
    assert model[1].weight is model[0].weight
    assert before != model[0].weight.data_ptr()


@pytest.mark.parametrize("name", ["MaxP", "LateIR", *BI_ENCODERS])
def test_a_file_that_is_overwritten_changes_no_loaded_model(name, tmp_path):
    backbone = tiny.encoder(None if name in BI_ENCODERS else 1)
    folder = shutil.copytree(backbone, tmp_path / "checkpoint")
    model = make(name, str(folder), device="cpu")
    model(tiny.results().assign(query="another", text="a"))  # loads it
    file = Path(folder) / "model.safetensors"
    with file.open("r+b") as weights:  # in place: a new file would leave the mapped one as it is
        weights.seek(file.stat().st_size // 2)
        weights.write(bytes(file.stat().st_size // 2))
    expected = scores(make(name, backbone, device="cpu"), tiny.results())
    np.testing.assert_allclose(scores(model, tiny.results()), expected, rtol=1e-5)
