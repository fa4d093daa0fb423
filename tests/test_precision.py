"""The precision that is fastest on a device is used unless another one is asked for, and told."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc import devices
from pyterrier_longdoc.score_cache import ScoreCache

from .systems import make

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.frames.TruncationWarning")
CPU = torch.device("cpu")
MEASURED = devices.fastest_dtype
"""As it was when this module was imported: before it was replaced for the session."""


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """A machine on which bfloat16 is fastest."""
    monkeypatch.setattr(devices, "fastest_dtype", lambda device: "bfloat16")


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
def test_the_fastest_precision_is_the_default(name, cross_encoder, plain_encoder, results, computed):
    backbone = plain_encoder if name.startswith("Bi") else cross_encoder
    model = make(name, backbone)
    low = model(results)["score"]
    assert "bfloat16" in computed
    assert model.coverage.dtype == "bfloat16"
    assert "in bfloat16" in str(model.coverage)
    computed.clear()
    exact = make(name, backbone, dtype="float32")
    high = exact(results)["score"]
    assert set(computed) == {"float32"}
    assert exact.coverage.dtype == "float32"
    assert not np.array_equal(low, high)
    # 8 bits of mantissa, through two layers with weights that are large for the sake of other tests.
    np.testing.assert_allclose(low, high, atol=0.1 + 0.1 * np.abs(high).max())


def test_float32_where_it_is_fastest(cross_encoder, results, computed):
    model = make("MaxP", cross_encoder)
    model(results)
    assert set(computed) == {"float32"}
    assert model.coverage.dtype == "float32"


@pytest.mark.usefixtures("fast_bfloat16")
def test_training_stays_in_its_own_precision(cross_encoder, computed):
    scorer = make("MaxP", cross_encoder).load_scorer()
    scorer(["old dog"], ["the cat"]).sum().backward()
    assert set(computed) == {"float32"}


def test_cached_scores_are_of_one_precision(cross_encoder, results, tmp_path, monkeypatch):
    path = tmp_path / "scores.sqlite"
    model = make("MaxP", cross_encoder, score_cache=path)
    high = model(results)["score"]
    entries = len(ScoreCache(path))
    monkeypatch.setattr(devices, "fastest_dtype", lambda device: "bfloat16")
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
    model = make("MaxP", cross_encoder)
    table = ld.check_invariance(model, results, dtypes=("bfloat16",), verbose=False).set_index("check")
    assert table.loc["alone", "difference"] < 1e-5 < table.loc["dtype bfloat16", "difference"]
    assert model.dtype is None


@pytest.fixture
def measure(monkeypatch):
    """`fastest_dtype` itself, which the other tests go without, on a machine of given speeds."""
    MEASURED.cache_clear()
    yield lambda seconds: monkeypatch.setattr(devices, "_multiply_seconds", lambda size, dtype, device: seconds(dtype))
    MEASURED.cache_clear()


@pytest.mark.parametrize(("low", "expected"), [(1.0, "bfloat16"), (2.5, "float32"), (8.0, "float32")])
def test_bfloat16_must_be_clearly_faster(low, expected, measure, caplog):
    measure(lambda dtype: low if dtype == torch.bfloat16 else 3.0)
    with caplog.at_level(logging.INFO):
        assert [MEASURED(CPU), MEASURED(CPU)] == [expected] * 2
    [record] = caplog.records
    assert f"cpu: models compute in {expected}, unless dtype= says otherwise" in record.getMessage()


def test_devices_without_bfloat16(measure):
    def seconds(dtype):
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return 1.0

    measure(seconds)
    assert MEASURED(CPU) == "float32"


def test_measured_here():
    assert devices._multiply_seconds(8, torch.bfloat16, CPU) > 0
    assert devices.resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ValueError, match=r"dtype='float8' is unknown.*bfloat16"):
        devices.resolve_dtype("float8", CPU)
