"""Checkpoints of sentence-transformers in BiEncoder and MaxSim: the library's scores, or an error that says why."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld

from ..support import tiny
from ..support.sentence_transformers import LATE_INTERACTION, stored, theirs
from ..support.systems import QUIET, scores
from ..support.tiny import LONG, change, frame

sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

pytestmark = QUIET

MODELS = {ld.BiEncoder: sentence_transformers.SentenceTransformer, ld.MaxSim: sentence_transformers.MultiVectorEncoder}
QUERIES, TEXTS = ["Old DOG", "snow in the city", LONG], ["A Cat and the dog", "a red fish", LONG]
FRAME = frame(QUERIES, TEXTS)
TRANSFORMER, TOKENIZER, DENSE = "sentence_bert_config.json", "tokenizer_config.json", "2_Dense/config.json"
PLACES = ["model.safetensors", "2_Dense/model.safetensors"]


@pytest.fixture(params=MODELS, ids=lambda model: model.__name__)
def model(request):
    return request.param


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A checkpoint of an encoder and more modules, which a test may change."""
    if model is ld.MaxSim:
        return Path(shutil.copytree(LATE_INTERACTION / "st-plain", tmp_path / "copy"))
    return stored(tmp_path, modules.Dense(32, 24))[1]


def found(model, folder) -> np.ndarray:
    return scores(model(folder, max_windows=1, max_query_len=None), FRAME)


def assert_scores_are_theirs(model, folder) -> None:
    expected = theirs(MODELS[model](str(folder), device="cpu"), QUERIES, TEXTS)
    np.testing.assert_allclose(found(model, folder), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "values", "matters"),
    [
        (TRANSFORMER, {"config_kwargs": {"num_hidden_layers": 1}}, True),
        (TRANSFORMER, {"query_length": 20, "document_length": 20}, True),
        (TRANSFORMER, {"max_seq_length": 20}, True),
        (TRANSFORMER, {"processor_kwargs": {"model_max_length": 20}}, True),
        (TOKENIZER, {"model_max_length": 20}, True),
        (TRANSFORMER, {"do_lower_case": True}, False),  # its tokenizer does
        (TRANSFORMER, {"model_args": {"trust_remote_code": True, "dtype": "float32"}, "unpad_inputs": False}, False),
    ],
)
def test_settings_of_a_checkpoint_are_applied(model, folder, file, values, matters):
    before = found(model, folder)
    change(folder / file, **values)
    assert_scores_are_theirs(model, folder)
    assert np.allclose(found(model, folder), before) != matters


def test_do_lower_case_is_applied_with_a_cased_tokenizer(model, folder):
    tiny.cased(str(folder))
    before = found(model, folder)
    change(folder / TRANSFORMER, do_lower_case=True)
    assert_scores_are_theirs(model, folder)
    assert not np.allclose(found(model, folder), before)


def test_a_given_window_size_may_exceed_the_length_in_the_checkpoint(model, folder):
    change(folder / TRANSFORMER, document_length=20)
    reader = model(folder).model.reader
    assert reader.windows.largest == 20 - reader.special_tokens()
    assert model(folder, window_size=40).model.reader.windows.largest == 40


OF_BOTH = [
    (TRANSFORMER, {"processing_kwargs": {"text": {"add_special_tokens": False}}}),
    (TRANSFORMER, {"transformer_task": "fill-mask"}),
    (TRANSFORMER, {"modality_config": {"message": {"method": "forward"}}}),
    (TRANSFORMER, {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}),
    (TOKENIZER, {"truncation_side": "left"}),
    (DENSE, {"activation_function": "somebody.Swish"}),
]
OF_ONE = [
    (ld.BiEncoder, TRANSFORMER, {"query_expansion": {"strategy": "fixed", "length": 20}}, "query_expansion"),
    (ld.BiEncoder, "config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}, "'euclidean'"),
    (ld.MaxSim, TRANSFORMER, {"query_expansion": {"strategy": "fixed", "length": 200, "attend": True}}, "200 tokens"),
    (ld.MaxSim, "3_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
    (ld.MaxSim, DENSE, {"module_input_name": "sentence_embedding"}, "sentence_embedding"),
]


@pytest.mark.parametrize(
    ("model", "file", "values", "word"),
    # One reader reads the modules of both.
    [*((list(MODELS)[i % 2], *case, next(iter(case[1]))) for i, case in enumerate(OF_BOTH)), *OF_ONE],
    indirect=["model"],
)
def test_settings_that_cannot_be_applied_are_refused_by_name(model, folder, file, values, word):
    change(folder / file, **values)
    with pytest.raises(ValueError, match=word):
        model(folder)(FRAME)


@pytest.mark.parametrize(
    ("model", "place", "values", "word"),
    [
        *((each, 0, {"type": "custom_st.Transformer"}, r"custom_st\.Transformer") for each in MODELS),
        *((each, 2, {"path": "../elsewhere"}, r"'\.\./elsewhere'") for each in MODELS),
        (ld.MaxSim, 3, {"type": "sentence_transformers.models.WordWeights"}, "WordWeights"),
        (ld.MaxSim, 1, {"type": "sentence_transformers.models.Normalize", "path": "4_Normalize"}, "does not support"),
    ],
    indirect=["model"],
)
def test_modules_that_cannot_be_applied_are_refused(model, folder, place, values, word):
    listed = json.loads((folder / "modules.json").read_text())
    listed[place].update(values)
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder.parent / "elsewhere").mkdir()
    with pytest.raises(ValueError, match=word):
        model(folder)(FRAME)


@pytest.mark.parametrize("file", PLACES)
def test_missing_weights_are_refused(model, folder, file):
    weights = load_file(folder / file)
    name = next(name for name in weights if name.endswith("dense.weight") or name == "linear.weight")
    del weights[name]
    save_file(weights, folder / file, {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        model(folder)(FRAME)


@pytest.mark.parametrize("file", PLACES)
def test_pickles_are_not_read(model, folder, file):
    torch.save(load_file(folder / file), (folder / file).with_name("pytorch_model.bin"))
    (folder / file).unlink()
    with pytest.raises(ValueError, match="pickle"):
        model(folder)(FRAME)


@pytest.mark.parametrize("file", PLACES)
def test_weights_that_git_lfs_has_not_fetched_are_named(model, folder, file):
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\nsize 3200\n")
    with pytest.raises(ValueError, match=file):
        model(folder)(FRAME)


def test_without_the_library_the_error_says_what_to_install(model, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers.multi_vector_encoder", None)
    with pytest.raises(ImportError, match="sentence-transformers"):
        model(folder)(FRAME)
