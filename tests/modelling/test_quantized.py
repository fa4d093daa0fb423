"""Int8 backbones: close to float32, fixed by one calibration, saved with their weights, and never trained."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import redirect_stdout

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import quantized

from ..support import tiny
from ..support.systems import reloaded, scores

pytest.importorskip("openvino")
pytest.importorskip("nncf")
pytestmark = pytest.mark.slow

SLIDING = {"window_size": 12, "stride": 8, "max_query_len": 8}


@pytest.fixture(scope="module", autouse=True)
def small_random_models_pass():
    """Random weights give scores that lie close together, so that int8 changes their order more."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(quantized, "LEAST_TAU", 0.5)
        yield


@pytest.fixture(scope="module")
def candidates() -> pd.DataFrame:
    """Twenty documents of random words for each of two queries."""
    random = np.random.default_rng(0)
    return tiny.frame(["old dog", "snow in the city"], [" ".join(random.choice(tiny.WORDS, 40)) for _ in range(20)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", num_hidden_layers=1)


@pytest.fixture(scope="module")
def original(folder):
    return ld.MaxP(folder, **SLIDING)


@pytest.fixture(scope="module")
def expected(original, candidates):
    """The scores of the model in float32, before its twin is made."""
    return scores(original, candidates)


@pytest.fixture(scope="module")
def quantized_quietly(original, expected, candidates):
    """The int8 twin, and what was printed while it was made."""
    with redirect_stdout(io.StringIO()) as printed:
        return original.quantize(candidates), printed.getvalue()


@pytest.fixture(scope="module")
def int8(quantized_quietly):
    return quantized_quietly[0]


def test_scores_are_close_to_those_in_float32_but_not_the_same(int8, expected, candidates):
    found = scores(int8, candidates)
    assert np.corrcoef(found, expected)[0, 1] > 0.8
    assert np.abs(found - expected).max() > 1e-4
    assert (int8.coverage.dtype, int8.coverage.runtime) == ("int8", "openvino")


def test_a_score_only_depends_on_query_and_text(int8, candidates):
    together = scores(int8, candidates)
    alone = np.concatenate([scores(int8, candidates.iloc[[row]]) for row in range(5)])
    np.testing.assert_allclose(alone, together[:5], atol=1e-4)


def test_quantizing_again_gives_the_same_scores_and_with_verbose_a_progress_bar(
    quantized_quietly, folder, candidates, capsys
):
    int8, printed = quantized_quietly
    verbose = ld.MaxP(folder, **SLIDING, verbose=True).quantize(candidates)
    assert ["Statistics collection" in text for text in (printed, capsys.readouterr().out)] == [False, True]
    np.testing.assert_allclose(scores(verbose, candidates), scores(int8, candidates), atol=1e-5)
    assert verbose.describe() == int8.describe()


def test_a_quantized_model_has_another_key_and_repr_than_its_original(int8, folder):
    model = ld.MaxP(folder, device="cpu", **SLIDING)
    assert int8.describe() != model.describe()
    assert "int8" in repr(int8)


def test_quantizing_does_not_change_the_original_model(int8, original, expected, candidates):
    np.testing.assert_array_equal(scores(original, candidates), expected)
    assert original.coverage.dtype == "float32"


def test_int8_that_ranks_windows_differently_is_refused(original, candidates, monkeypatch):
    monkeypatch.setattr(quantized, "LEAST_TAU", 1.01)
    with pytest.raises(ValueError, match="Kendall's tau"):
        original.quantize(candidates)


def test_a_quantized_model_is_saved_and_loaded_with_the_same_scores(int8, candidates, tmp_path):
    loaded = reloaded(int8, tmp_path)
    np.testing.assert_allclose(scores(loaded, candidates), scores(int8, candidates), atol=1e-5)
    assert loaded.coverage.dtype == "int8"
    assert "int8" in repr(loaded)


def test_a_model_that_is_saved_in_its_place_removes_its_files(int8, folder, tmp_path):
    int8.save(tmp_path)
    assert reloaded(ld.MaxP(folder, **SLIDING), tmp_path).model.encoder.quantized is None
    assert not [name for name in quantized.FILES if (tmp_path / name).exists()]


def test_files_of_another_model_are_refused(int8, tmp_path):
    int8.save(tmp_path)
    file = tmp_path / quantized.FILES[0]
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"int8\.xml"):
        ld.MaxP.load(tmp_path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_quantized_too(copied, int8, candidates):
    twin = copied(int8)
    np.testing.assert_allclose(scores(twin, candidates), scores(int8, candidates), atol=1e-5)
    assert twin.coverage.dtype == "int8"


def test_a_quantized_model_cannot_be_trained(int8, candidates):
    with pytest.raises(ValueError, match="quantized"):
        int8.fit(candidates, candidates[["qid", "docno"]].assign(label=1))


def test_changed_weights_are_noticed(int8, candidates):
    twin = copy.deepcopy(int8)
    with torch.no_grad():
        next(twin.model.encoder.backbone.parameters()).mul_(2)
    with pytest.raises(ValueError, match="quantize it again"):
        twin(candidates)


def test_modernbert_is_quantized_with_the_shortest_next_to_the_longest_windows(tmp_path):
    sizes = {"num_hidden_layers": 3, "initializer_range": 0.08}
    backbone = tiny.checkpoint(tmp_path, "modernbert", **sizes)
    rows = tiny.frame(["old dog", "rain"], [" ".join(tiny.WORDS[: 1 + 3 * i] * 2) for i in range(16)])
    original = ld.MaxP(backbone, window_size=90, stride=90, max_query_len=8, runtime="torch")
    expected, int8 = scores(original, rows), original.quantize(rows)
    assert np.corrcoef(scores(int8, rows), expected)[0, 1] > 0.8
    np.testing.assert_allclose(scores(int8.apply_attributes(batch_size=1), rows), scores(int8, rows), atol=1e-3)


def test_hooks_are_refused_and_changed_attributes_have_no_effect(int8, candidates):
    twin, expected = copy.deepcopy(int8), scores(int8, candidates)
    twin.model.encoder.backbone.embeddings.LayerNorm.eps = 10.0
    np.testing.assert_allclose(scores(twin, candidates), expected, atol=1e-5)
    twin.model.encoder.backbone.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(ValueError, match="hooks"):
        twin(candidates)


@pytest.mark.parametrize("arguments", [{"runtime": "torch"}, {"dtype": "bfloat16"}])
def test_other_runtimes_and_precisions_are_refused(arguments, int8, candidates):
    with pytest.raises(ValueError, match="int8 with OpenVINO"):
        int8.apply_attributes(**arguments)(candidates)


def test_too_few_windows_are_refused(original, candidates):
    with pytest.raises(ValueError, match="too few"):
        original.quantize(candidates.head(1))
