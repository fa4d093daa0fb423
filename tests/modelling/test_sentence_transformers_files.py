"""Cross-encoders of sentence-transformers that consist of modules: its own scores, taken apart, or refused by name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import packaged_models
from pyterrier_longdoc.modelling.backbones import modules
from pyterrier_longdoc.modelling.backbones.load import load_backbone

from ..support import tiny, tiny_answers
from ..support.systems import QUIET, reloaded, scores, slow_but

pytest.importorskip("sentence_transformers")

from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:.*default prompt.*:UserWarning")]

READING = {"max_query_len": 8, "device": "cpu"}
QUERIES = ["old dog", "snow in the city", "a"]
TEXTS = ["the cat and the dog walk to the river. ", "a red fish", "tree, mountain! (rain) 1234 unbelievable"]
FRAME = tiny.frame(QUERIES, TEXTS)
PAIRS = list(FRAME[["query", "text"]].itertuples(index=False, name=None))


def linear(outputs, inputs=32, activation=torch.nn.Identity, **options):
    return Dense(inputs, outputs, activation_function=activation(), **options)


def scored(inputs=32, labels=1, **options):
    return linear(labels, inputs, module_output_name="scores", **options)


KINDS = {
    # The shape of cross-encoder/ettin-reranker-17m-v1 and its larger relatives.
    "ettin": ("modernbert", "cls", lambda: [linear(32, activation=torch.nn.GELU), LayerNorm(32), scored()]),
    "mean": ("bert", "mean", lambda: [linear(24, activation=torch.nn.Tanh, bias=False), Dropout(0.3), scored(24)]),
    "residual": (
        "xlm-roberta",
        "cls",
        lambda: [LayerNorm(32), linear(40, use_residual=True), linear(40, 40, use_residual=True), scored(40)],
    ),
    "no steps": ("electra", "cls", lambda: [scored(bias=False)]),
    "language model": ("qwen3", "lasttoken", lambda: [linear(32, activation=torch.nn.SiLU), scored()]),
    "two labels": ("bert", "cls", lambda: [LayerNorm(32), scored(labels=2)]),
}


def stored(folder, kind="ettin", **settings):
    """Saves a random cross-encoder with sentence-transformers, and returns it and its folder."""
    family, pooling, layers = KINDS[kind]
    if family == "qwen3":
        tiny_answers.checkpoint(folder / "base", family, tiny_answers.tokenizer())
    else:
        tiny.checkpoint(folder / "base", family, labels=None)
    torch.manual_seed(1)
    chain = [Transformer(str(folder / "base")), Pooling(32, pooling), *layers()]
    for module in chain[2:]:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model = CrossEncoder(modules=chain, device="cpu", **settings)
    model.save_pretrained(str(folder / "stored"))
    return model, str(folder / "stored")


def predicted(model, pairs=PAIRS):
    values = model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    return values if values.ndim == 1 else values[:, 1] - values[:, 0]


@pytest.mark.parametrize("kind", slow_but(("ettin", "residual", "language model"), KINDS))
def test_scores_equal_those_of_sentence_transformers_and_are_saved(kind, tmp_path):
    model, folder = stored(tmp_path, kind)
    expected = predicted(model)
    assert expected.std() > 1e-2
    one_window = {"window_size": 50, "stride": 50, **READING}
    for reranker in (ld.FirstP(folder, **READING), ld.MaxP(folder, **one_window), ld.PARADE(folder, **one_window)):
        np.testing.assert_allclose(scores(reranker, FRAME), expected, rtol=1e-5, atol=1e-5)
        assert reranker.model.origin != "random"
        again = reloaded(reranker, tmp_path / "ours")
        np.testing.assert_allclose(scores(again, FRAME), expected, rtol=1e-5, atol=1e-5)
        assert again.model.backbone.describe() == reranker.model.backbone.describe()
    if kind != "two labels":
        np.testing.assert_allclose(1 / (1 + np.exp(-scores(again, FRAME))), model.predict(PAIRS), atol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "language model"])
def test_the_default_prompt_is_put_before_the_query(kind, tmp_path):
    prompts = {"prompts": {"find": "find the old ", "other": "run "}}
    model, folder = stored(tmp_path / "default", kind, default_prompt_name="find", **prompts)
    expected = predicted(model)
    np.testing.assert_allclose(scores(ld.FirstP(folder, **READING), FRAME), expected, atol=1e-5)
    model, folder = stored(tmp_path / "named", kind, **prompts)
    assert np.abs(predicted(model) - expected).max() > 1e-3
    np.testing.assert_allclose(scores(ld.FirstP(folder, **READING), FRAME), predicted(model), atol=1e-5)


def test_a_classifier_with_a_prompt_has_the_scores_of_sentence_transformers(tmp_path):
    base = tiny.checkpoint(tmp_path / "base")
    model = CrossEncoder(base, device="cpu", prompts={"find": "find the "}, default_prompt_name="find")
    model.save_pretrained(str(tmp_path / "stored"))
    reranker = ld.FirstP(tmp_path / "stored", **READING)
    for each in (reranker, reloaded(reranker, tmp_path / "ours")):
        np.testing.assert_allclose(scores(each, FRAME), predicted(model), atol=1e-5)


def change(folder, file, **values):
    path = Path(folder) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


GENERAL = "config_sentence_transformers.json"
PROMPT = {"prompts": {"find": "find "}, "default_prompt_name": "find"}


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (GENERAL, {"activation_fn": "torch.nn.modules.activation.ReLU"}),
        (GENERAL, {"activation_fn": "somebody.Sigmoid"}),
        ("1_Pooling/config.json", {"pooling_mode": "max"}),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}),
        ("1_Pooling/config.json", {"include_prompt": False}),
        ("2_Dense/config.json", {"activation_function": "my.Swish"}),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}),
        ("2_Dense/config.json", {"module_output_name": "x"}),
        ("4_Dense/config.json", {"module_output_name": "x"}),
        ("4_Dense/config.json", {"activation_function": "torch.nn.Tanh"}),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
        ("sentence_bert_config.json", {"config_kwargs": {"num_hidden_layers": 1}}),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"add_special_tokens": False}}}),
    ],
)
def test_unsupported_settings_are_refused_by_name(file, values, tmp_path):
    folder = stored(tmp_path, **PROMPT)[1]
    change(folder, file, **values)
    [name] = values
    with pytest.raises(ValueError, match=name):
        load_backbone(folder)


@pytest.mark.parametrize("kind", ["classifier", "modules"])
def test_lower_case_that_the_tokenizer_does_not_make_is_refused(kind, tmp_path):
    folder = str(tmp_path / "stored")
    if kind == "classifier":
        CrossEncoder(tiny.checkpoint(tmp_path / "base"), device="cpu").save_pretrained(folder)
    else:
        stored(tmp_path)
    change(folder, "sentence_bert_config.json", do_lower_case=True)
    ld.FirstP(folder, **READING).model  # noqa: B018 - this tokenizer makes it
    tiny.cased(folder)
    with pytest.raises(ValueError, match="do_lower_case"):
        load_backbone(folder)


def test_settings_of_a_processor_that_change_no_score_are_accepted(tmp_path):
    model, folder = stored(tmp_path, "mean")
    change(folder, "sentence_bert_config.json", processing_kwargs={"text": {"padding": "longest", "max_length": 100}})
    np.testing.assert_allclose(scores(ld.FirstP(folder, **READING), FRAME), predicted(model), atol=1e-5)


def test_the_longest_input_is_that_of_the_backbone(tmp_path):
    base = tiny.checkpoint(tmp_path / "base")
    CrossEncoder(base, device="cpu", max_length=32).save_pretrained(str(tmp_path / "stored"))
    found = scores(ld.FirstP(tmp_path / "stored", **READING), tiny.frame(["old dog"], [tiny.LONG]))
    whole, short = (CrossEncoder(str(tmp_path / name), device="cpu") for name in ("base", "stored"))
    pairs = [("old dog", tiny.LONG)]
    np.testing.assert_allclose(found, predicted(whole, pairs), atol=1e-5)
    assert np.abs(found - predicted(short, pairs)).max() > 1e-3


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_a_function_of_the_scores_in_an_older_checkpoint_must_be_the_identity(key, tmp_path):
    folder = tiny.checkpoint(tmp_path)
    for name in ("linear.Identity", "activation.ReLU"):
        function = f"torch.nn.modules.{name}"
        change(folder, "config.json", **{key: {"activation_fn": function} if key[1] == "e" else function})
        with pytest.raises(ValueError, match="ReLU") if "ReLU" in name else nullcontext():
            load_backbone(folder)


@pytest.mark.parametrize("missing", ["linear.bias", "model.safetensors"])
def test_missing_weights_of_a_layer_are_refused(missing, tmp_path):
    folder = stored(tmp_path)[1]
    file = Path(folder, "4_Dense", "model.safetensors")
    weight = load_file(file)["linear.weight"]
    file.unlink()
    if missing == "linear.bias":
        save_file({"linear.weight": weight}, file)
    with pytest.raises(ValueError, match=missing):
        load_backbone(folder)


def test_a_module_that_cannot_be_taken_over_is_named(tmp_path):
    folder = Path(stored(tmp_path)[1])
    listed = json.loads((folder / "modules.json").read_text())
    listed[3]["type"] = "sentence_transformers.base.modules.normalize.Normalize"
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="Normalize"):
        load_backbone(str(folder))


@pytest.mark.parametrize("name", packaged_models())
def test_packaged_models_are_loaded_without_the_library(name, monkeypatch):
    monkeypatch.setattr(modules, "library", None)
    assert ld.CrossEncoder.load(name, device="cpu").is_trained


def test_with_a_pooling_of_one_s_own_the_head_is_left_out(tmp_path):
    model = ld.FirstP(stored(tmp_path)[1], pooling="mean", **READING)
    assert np.isfinite(scores(model, FRAME)).all()
    assert model.model.origin == "random"
    assert model.model.backbone.representation is None
