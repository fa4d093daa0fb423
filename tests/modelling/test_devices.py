"""Which precision is used: float32 on CPUs, whatever they are fast at, unless another one is asked for; and told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import devices
from pyterrier_longdoc.rerankers.score_cache import ScoreCache

from ..support.systems import make

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning")
CPU = torch.device("cpu")


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """A machine with instructions for bfloat16."""
    monkeypatch.setattr(devices, "_has_bfloat16", lambda device: True)


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """The precision of each matrix product of a BERT layer."""
    seen = []
    linear = torch.nn.Linear.forward

    def spy(self, inputs):
        out = linear(self, inputs)
        seen.append(devices.dtype_name(out.dtype))
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", spy)
    return seen


@pytest.mark.usefixtures("fast_bfloat16")
@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max"])
def test_the_fastest_precision(name, cross_encoder, plain_encoder, results, computed):
    backbone = plain_encoder if name.startswith("Bi") else cross_encoder
    model = make(name, backbone, dtype="fastest")
    low = model(results)["score"]
    assert "bfloat16" in computed
    assert model.coverage.dtype == "bfloat16"
    assert "in bfloat16" in str(model.coverage)
    computed.clear()
    exact = make(name, backbone)
    high = exact(results)["score"]
    assert set(computed) == {"float32"}
    assert exact.coverage.dtype == "float32"
    assert not np.array_equal(low, high)
    # 8 bits of mantissa, through two layers with weights that are large for the sake of other tests.
    np.testing.assert_allclose(low, high, atol=0.1 + 0.1 * np.abs(high).max())


@pytest.mark.usefixtures("fast_bfloat16")
def test_float32_is_the_default_on_every_cpu(cross_encoder, results, computed):
    model = make("MaxP", cross_encoder)
    model(results)
    assert set(computed) == {"float32"}
    assert model.coverage.dtype == "float32"


@pytest.mark.usefixtures("fast_bfloat16")
def test_training_stays_in_its_own_precision(cross_encoder, computed):
    scorer = make("MaxP", cross_encoder, dtype="fastest").load_scorer()
    scorer(["old dog"], ["the cat"]).sum().backward()
    assert set(computed) == {"float32"}


def test_cached_scores_are_of_one_precision(cross_encoder, results, tmp_path, monkeypatch):
    path = tmp_path / "scores.sqlite"
    model = make("MaxP", cross_encoder, score_cache=path)
    high = model(results)["score"]
    entries = len(ScoreCache(path))
    monkeypatch.setattr(devices, "_has_bfloat16", lambda device: True)
    model.dtype = "fastest"
    low = model(results)["score"]
    assert len(ScoreCache(path)) == 2 * entries
    assert model.coverage.dtype == "bfloat16"
    assert not np.array_equal(low, high)
    model.dtype = "float32"
    np.testing.assert_array_equal(model(results)["score"], high)
    assert model.coverage.dtype == "float32"
    assert (model.coverage.tokens_computed, model.coverage.padding) == (0, 0.0)


@pytest.mark.usefixtures("fast_bfloat16")
def test_invariance_is_checked_in_float32(cross_encoder, results):
    model = make("MaxP", cross_encoder, dtype="fastest")
    table = ld.check_invariance(model, results, dtypes=("bfloat16",), verbose=False).set_index("check")
    assert table.loc["alone", "difference"] < 1e-5 < table.loc["dtype bfloat16", "difference"]
    assert model.dtype == "fastest"


def test_the_rule(monkeypatch):
    native = {"cpu": True, "cuda": True, "mps": False}
    monkeypatch.setattr(devices, "_has_bfloat16", lambda device: native[device.type])
    chosen = {
        (dtype, kind): devices.resolve_dtype(dtype, torch.device(kind))
        for dtype in (None, "fastest")
        for kind in native
    }
    assert chosen == {
        (None, "cpu"): torch.float32,
        (None, "cuda"): torch.bfloat16,
        (None, "mps"): torch.float32,
        ("fastest", "cpu"): torch.bfloat16,
        ("fastest", "cuda"): torch.bfloat16,
        ("fastest", "mps"): torch.float32,
    }
    assert devices.resolve_dtype("float32", torch.device("cuda")) == torch.float32
    with pytest.raises(ValueError, match=r"dtype='float8' is unknown.*bfloat16"):
        devices.resolve_dtype("float8", CPU)


@pytest.mark.parametrize("flag", ["_is_amx_tile_supported", "_is_avx512_bf16_supported", None])
def test_a_cpu_is_asked_for_its_instructions(flag, monkeypatch):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == flag)
    expected = torch.float32 if flag is None else torch.bfloat16
    assert devices.resolve_dtype("fastest", CPU) == expected
    assert devices.resolve_dtype(None, CPU) == torch.float32
