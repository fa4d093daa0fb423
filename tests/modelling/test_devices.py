"""Which precision is used: float32 on CPUs, whatever they are fast at, unless another one is asked for; and told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import devices

from ..support.systems import QRELS, QUIET, forget, make, reloaded, scores, told_of

pytestmark = QUIET
CPU = torch.device("cpu")


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """The precision of each matrix product of a BERT layer, on a machine with instructions for bfloat16."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)
    seen = []
    linear = torch.nn.Linear.forward

    def spy(self, inputs):
        out = linear(self, inputs)
        seen.append(str(out.dtype).removeprefix("torch."))
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", spy)
    return seen


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"])
def test_fastest_uses_bfloat16_where_it_is_fast(name, results, computed):
    model = make(name, dtype="fastest")
    forget(model)
    low = scores(model, results)
    assert "bfloat16" in computed
    assert model.coverage.dtype == "bfloat16"
    computed.clear()
    exact = make(name)
    high = scores(exact, results)
    assert set(computed) == {"float32"}
    assert exact.coverage.dtype == "float32"
    assert not np.array_equal(low, high)
    # 8 bits of mantissa, through two layers with weights that are large for the sake of other tests.
    np.testing.assert_allclose(low, high, atol=0.1 + 0.1 * np.abs(high).max())


def test_training_uses_float32_with_dtype_fastest(computed):
    scorer = make("MaxP", dtype="fastest").model
    scorer(["old dog"], ["the cat"]).sum().backward()
    assert set(computed) == {"float32"}


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"])
@pytest.mark.parametrize("flag", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_bfloat16_chosen_by_fastest_causes_a_warning_once(name, flag, results, monkeypatch):
    for function in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, function, lambda function=function: function == flag)
    model = make(name, dtype="fastest")
    [message] = told_of(ld.PrecisionWarning, lambda: (model(results), model(results)))
    assert "dtype='float32'" in message
    for dtype in (None, "bfloat16"):
        assert not told_of(ld.PrecisionWarning, lambda dtype=dtype: make(name, dtype=dtype)(results))


def test_the_precision_depends_on_device_and_dtype(monkeypatch):
    native = {"cpu": True, "cuda": True, "mps": False}
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: native[device.type])
    chosen = {
        dtype: [devices.resolve_dtype(dtype, torch.device(kind)) for kind in native] for dtype in (None, "fastest")
    }
    assert chosen == {
        None: [torch.float32, torch.bfloat16, torch.float32],
        "fastest": [torch.bfloat16, torch.bfloat16, torch.float32],
    }
    assert devices.resolve_dtype("float32", torch.device("cuda")) == torch.float32


def test_the_default_device_is_the_gpu_of_the_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve_device(None) == torch.device("cuda")
    assert devices.resolve_device("cpu") == CPU
    # Each of several processes has a GPU of its own.
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, gpu in (("0", 0), ("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert devices.resolve_device(None) == torch.device("cuda", gpu)
    assert devices.resolve_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.resolve_device(None) == CPU
    with pytest.raises(ValueError, match="device='cuda:1'"):
        devices.resolve_device("cuda:1")
    with pytest.raises(RuntimeError, match="gpu"):
        devices.resolve_device("gpu")


def computed_by(model, results, folder) -> list[np.ndarray]:
    """The scores of a new model and, if it can be trained, after loading it and after one step."""
    forget(model)
    found = [scores(model, results)]
    if isinstance(model, ld.CrossEncoder):
        found.append(scores(reloaded(model, folder), results))
        model.training = ld.TrainingArgs(max_steps=1, learning_rates={"": 1e-2})
        found.append(scores(model.fit(results, QRELS), results))
    return found


@pytest.mark.parametrize("name", ["PARADE-transformer", "CEDR-knrm", "LateIR", "MaxSim", "BiEncoder-max"])
def test_torchs_default_precision_changes_no_score(name, cross_encoder, results, tmp_path):
    expected = computed_by(make(name, cross_encoder), results, tmp_path / "float32")
    torch.set_default_dtype(torch.float64)
    try:
        found = computed_by(make(name, cross_encoder), results, tmp_path / "float64")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
