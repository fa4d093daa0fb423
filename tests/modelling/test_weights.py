"""Weights in memory: changes and moves are noticed, also by optimizers that do not count; no file changes them."""

from __future__ import annotations

import pickle
import shutil
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
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


def share(weights: nn.Module) -> None:
    ForkingPickler.dumps(weights)


UNCOUNTED = {"inference mode": lambda weights: weights, "shared": share}


@pytest.mark.parametrize("kind", UNCOUNTED)
@pytest.mark.parametrize("write", [torch.neg_, swap_rows, next_number, lambda tensor: tensor.mul_(2)])
def test_a_watch_finds_writes_that_torch_does_not_count_by_the_contents(write, kind):
    with torch.inference_mode(kind == "inference mode"):
        watch, weights = WeightsWatch(), module()
        UNCOUNTED[kind](weights)
        assert watch.changed(weights)
        assert not watch.changed(weights)
        write(weights[0].weight.data)
        assert not watch.changed(weights, contents=False)
        assert watch.changed(weights)
        assert not watch.changed(weights)


@pytest.mark.parametrize("fused", [False, True])
def test_a_watch_finds_the_steps_of_optimizers_of_its_weights_only(fused):
    watch, weights, others = WeightsWatch(), module(), module()
    assert watch.changed(weights)
    for stepped in (others, weights):
        optimizer = torch.optim.AdamW(stepped.parameters(), lr=0.1, fused=fused)
        stepped(torch.ones(1, 6))[0, 0].backward()
        optimizer.step()
        assert watch.changed(weights) == (stepped is weights)
    assert not watch.changed(weights)


def test_a_watch_finds_counted_writes_and_replaced_tensors_without_reading_contents():
    watch, weights = WeightsWatch(), module()
    assert watch.changed(weights, contents=False)
    assert not watch.changed(weights, contents=False)
    weights.steps.add_(1)
    assert watch.changed(weights, contents=False)
    assert not watch.changed(weights)
    weights[0].bias = nn.Parameter(weights[0].bias.detach().clone())
    assert watch.changed(weights, contents=False)


def test_a_watch_finds_rounded_weights_and_the_third_of_three_files():
    """Whose memory would be where that of the first one was, if the watch did not keep it."""
    watch, weights = WeightsWatch(), nn.Linear(300, 300)
    assert watch.changed(weights)
    weights.half().float()
    assert watch.changed(weights)
    for _ in range(2):
        weights.load_state_dict(nn.Linear(300, 300).state_dict(), assign=True)
    assert watch.changed(weights)


@pytest.mark.parametrize("move", [share, nn.Module.share_memory])
def test_a_watch_finds_weights_that_moved(move):
    watch, weights = WeightsWatch(), module()
    assert watch.changed(weights)
    move(weights)
    assert watch.changed(weights, contents=False)
    assert pickle.loads(pickle.dumps(watch)).changed(weights)


def test_fingerprints_depend_on_the_values_of_every_dtype():
    for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]:
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


def test_weights_of_every_model_are_in_their_own_memory():
    for name in SYSTEMS:
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
