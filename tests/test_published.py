"""The paper's configurations by name: they build, say what was published, and run."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.published import FIGURES

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.frames.TruncationWarning"),
]


@pytest.mark.parametrize("name", ld.presets)
def test_every_preset_is_a_model(name):
    preset = ld.presets[name]
    llm = [lambda messages: ""] if preset.model == "RankGPT" else []
    model = preset(*llm)
    assert type(model) is getattr(ld, preset.model)
    for argument, value in preset.arguments.items():
        assert getattr(model, argument) == value
    if preset.epochs not in (None, 1):
        assert model.training.epochs == preset.epochs
    assert len(preset.figures) == len(FIGURES)
    assert all(figure is None or 0 < figure < 1 for figure in preset.figures)


def test_firstp_and_longp_of_a_backbone_differ_in_what_they_read():
    for name in ("longformer", "bigbird", "jina", "mosaic", "tinyllama"):
        first, long = ld.presets[f"firstp-{name}"], ld.presets[f"longp-{name}"]
        assert first.model == long.model == "LongP"
        differing = {key for key in long.arguments if first.arguments[key] != long.arguments[key]}
        assert differing == {"max_doc_len"}
        assert (first.arguments["max_doc_len"], long.arguments["max_doc_len"]) == (477, 1431)


def test_table():
    table = ld.presets.table()
    assert len(table) == len(ld.presets) >= 30
    assert not table["name"].duplicated().any()
    assert not table["row"].duplicated().any()
    best = table.loc[table["MS MARCO dev"].idxmax()]
    assert (best["name"], best["MS MARCO dev"]) == ("parade-rand-l2-electra", 0.433)
    assert isinstance(table, pd.DataFrame)


def test_arguments_may_change(cross_encoder, results):
    model = ld.presets["maxp"](backbone=cross_encoder, window_size=20, stride=10, max_query_len=8, device="cpu")
    assert np.isfinite(model(results)["score"]).all()
    assert model.max_doc_len == 1431
    assert model.coverage.windows_per_document > 1
    assert ld.presets["parade-rand-l2"](training=ld.TrainingArgs(epochs=5)).training.epochs == 5


def test_unknown_preset():
    with pytest.raises(KeyError, match=r"no preset 'bert'; known are firstp-bert, firstp-longformer"):
        ld.presets["bert"]


def test_looking_at_presets_loads_neither_torch_nor_transformers():
    code = (
        "import sys, pyterrier_longdoc as ld; ld.presets.table(); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
