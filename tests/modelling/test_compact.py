"""The compact format: weights as changes since the pre-trained ones, possibly those of another packaged model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common import packaged
from pyterrier_longdoc.modelling.compact import compress, pack, restore

from ..support import tiny
from ..support.systems import QRELS, QUIET, make, scores

pytestmark = QUIET
FULL = ld.TrainingArgs(queries_per_step=2, learning_rates={"": 1e-2})


def test_compress_stores_the_changed_weights():
    rng = torch.Generator().manual_seed(0)
    base = {"matrix": torch.randn(20, 12, generator=rng), "same": torch.randn(8, 8), "bias": torch.zeros(4)}
    change = torch.randn(20, 2, generator=rng) @ torch.randn(2, 12, generator=rng)
    state = {**base, "matrix": base["matrix"] + change, "bias": torch.ones(4), "head": torch.randn(3)}
    stored = compress(state, base)
    shapes = {name: tuple(value.shape) for name, value in stored.items()}
    assert shapes == {"matrix::B": (20, 2), "matrix::A": (2, 12), "bias": (4,), "head": (3,)}
    torch.testing.assert_close(restore(stored, base), state, rtol=1e-3, atol=0.02)


def test_compress_stores_changes_of_full_rank_in_int8():
    rng = torch.Generator().manual_seed(0)
    base, change = ({"matrix": torch.randn(20, 12, generator=rng)} for _ in range(2))
    stored = compress({"matrix": base["matrix"] + change["matrix"]}, base)
    assert [stored[f"matrix::{part}"].dtype for part in ("rows", "scales")] == [torch.int8, torch.float32]
    error = restore(stored, base)["matrix"] - base["matrix"] - change["matrix"]
    assert (error.abs() <= change["matrix"].abs().amax(1, keepdim=True) / 254 + 1e-6).all()


@pytest.fixture
def first(results, tmp_path, monkeypatch):
    """A MaxP that is packaged as "longdoc:first"."""
    monkeypatch.setattr(packaged, "_MODELS", tmp_path)
    model = make("MaxP", training=FULL).fit(results, QRELS)
    model.save(tmp_path / "first")
    pack(tmp_path / "first", make("MaxP", device="cpu").model)
    return model


def test_a_packed_model_scores_as_before(first, results, tmp_path):
    assert not (tmp_path / "first" / "model.safetensors").exists()
    found, expected = scores(ld.CrossEncoder.load("longdoc:first"), results), scores(first, results)
    np.testing.assert_allclose(found, expected, atol=0.02 * max(1.0, np.abs(expected).max()))


def test_a_packed_model_can_refer_to_the_encoder_of_another(first, results, tmp_path):
    second = make("PARADE-attn").start_from(ld.MaxP.load("longdoc:first"))
    expected = scores(second, results)
    second.save(tmp_path / "second")
    pack(tmp_path / "second", make("PARADE-attn", device="cpu").model, encoder_of="longdoc:first")
    np.testing.assert_allclose(scores(ld.PARADE.load("longdoc:second"), results), expected, rtol=1e-2, atol=1e-2)
    small, large = ((tmp_path / name / "changes.safetensors").stat().st_size for name in ("second", "first"))
    assert small < large / 2
    make("MaxP", seed=1).save(tmp_path / "other")
    pack(tmp_path / "other", make("MaxP", device="cpu").model)
    (tmp_path / "other" / "changes.safetensors").replace(tmp_path / "first" / "changes.safetensors")
    with pytest.raises(ValueError, match="longdoc:first"):
        ld.PARADE.load("longdoc:second")


def test_a_packed_model_is_refused_with_other_weights_of_the_backbone(first, tmp_path):
    path = tmp_path / "first" / "config.json"
    other = tiny.checkpoint(tmp_path / "checkpoint", seed=5)
    config = json.loads(path.read_text())
    config["parameters"]["backbone"] = other
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="other weights"):
        ld.MaxP.load("longdoc:first")
