"""Weights lie in memory of their own: a file that is overwritten changes no model, and kernels find them aligned."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.devices import in_own_memory

from ..support import tiny, tiny_long
from ..support.memory import misplaced
from ..support.systems import BI_ENCODERS, QUIET, SYSTEMS, make, scores

pytestmark = QUIET


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
