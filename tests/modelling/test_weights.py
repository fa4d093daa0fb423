"""Weights in memory: changes and moves give another version, also steps that torch does not count; no file does."""

from __future__ import annotations

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
from pyterrier_longdoc.modelling.weights import copy_inference_tensors, fingerprint, version_of
from pyterrier_longdoc.training.schedule import make_optimizer

from ..support import tiny, tiny_long
from ..support.memory import misplaced
from ..support.systems import BI_ENCODERS, QUIET, SYSTEMS, make, scores

pytestmark = QUIET


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    made.register_buffer("steps", torch.tensor(3))
    return made


def share(weights: nn.Module) -> None:
    ForkingPickler.dumps(weights)


def rewritten(weights: nn.Module) -> None:
    """Another parameter in the same memory, with as many writes."""
    weights[0].weight = nn.Parameter(weights[0].weight.data)


CHANGES = {
    "a write": lambda weights: weights.steps.add_(1),
    "a write in inference mode": torch.inference_mode()(lambda weights: weights[0].weight.mul_(2)),
    "a replaced tensor": lambda weights: setattr(weights[0], "bias", nn.Parameter(weights[0].bias.detach().clone())),
    "another tensor of the same memory": rewritten,
    "rounding": lambda weights: weights.half().float(),
    "another part": lambda weights: weights.append(nn.Linear(1, 1)),
    "pickling for another process": share,
    "shared memory": nn.Module.share_memory,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_and_moved_weights_have_another_version(change):
    weights, other = module(), module()
    before, of_other = version_of(weights), version_of(other)
    assert before not in (of_other, None)
    weights(torch.ones(1, 6)).sum().backward()
    assert version_of(weights) == before
    with torch.no_grad():
        CHANGES[change](weights)
    assert version_of(weights) == version_of(weights) != before
    assert version_of(other) == of_other


def test_steps_of_a_training_give_its_weights_another_version():
    weights, others = module(), module()
    before = version_of(weights)
    for stepped in (others, weights):
        optimizer = make_optimizer(stepped, ld.TrainingArgs(learning_rates={"": 0.1}))
        stepped(torch.ones(1, 6))[0, 0].backward()
        optimizer.step()
        assert (version_of(weights) != before) == (stepped is weights)


def test_the_third_of_three_files_has_another_version_than_the_first_one():
    """Whose memory would be where that of the first one was, if the version did not keep it."""
    weights = nn.Linear(300, 300)
    before = version_of(weights)
    for _ in range(2):
        weights.load_state_dict(nn.Linear(300, 300).state_dict(), assign=True)
    assert version_of(weights) != before


def test_modules_without_weights_have_no_version_and_buffers_of_inference_mode_are_no_obstacle():
    assert version_of(nn.Identity()) is None
    weights = module()
    with torch.inference_mode():
        weights.register_buffer("made", torch.ones(3))
    assert version_of(weights) == version_of(weights)


def test_weights_of_inference_mode_are_copied_so_that_they_can_be_trained_and_stay_tied():
    with torch.inference_mode():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("steps", torch.tensor(3))
        copy_inference_tensors(model)
    assert model[1].weight is model[0].weight
    model(torch.tensor([1])).sum().backward()
    before = version_of(model)
    model.steps.add_(1)
    assert version_of(model) != before


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
