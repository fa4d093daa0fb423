"""Cross-encoders of sentence-transformers that consist of modules: its own scores, taken apart, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone

from ..support import tiny, tiny_answers
from ..support.systems import QUIET, scores, slow_but
from ..support.toy import toy_task

pytest.importorskip("sentence_transformers", minversion="5.7")

from sentence_transformers import CrossEncoder, __version__
from sentence_transformers.cross_encoder.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:.*default prompt.*:UserWarning")]

READING = {"max_query_len": 8, "device": "cpu"}
SLIDING = {"window_size": 20, "stride": 10, **READING}
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
    if kind == "residual" and Version(__version__).major < 6:
        pytest.skip(f"sentence-transformers {__version__} does not have use_residual")
    family, pooling, layers = KINDS[kind]
    if family == "qwen3":
        tiny_answers.checkpoint(folder / "base", family, tiny_answers.tokenizer())
    else:
        tiny.checkpoint(folder / "base", family, labels=None)
    torch.manual_seed(1)
    modules = [Transformer(str(folder / "base")), Pooling(32, pooling), *layers()]
    for module in modules[2:]:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model = CrossEncoder(modules=modules, device="cpu", **settings)
    model.save_pretrained(str(folder / "stored"))
    return model, str(folder / "stored")


def predicted(model, pairs=PAIRS, activation=torch.nn.Identity):
    values = model.predict(pairs, activation_fn=activation(), show_progress_bar=False)
    return values if values.ndim == 1 else values[:, 1] - values[:, 0]


@pytest.mark.parametrize("kind", slow_but(("ettin", "residual", "language model"), KINDS))
def test_scores_are_those_of_its_owner(kind, tmp_path):
    model, folder = stored(tmp_path, kind)
    expected = predicted(model)
    assert expected.std() > 1e-2
    first = ld.FirstP(folder, **READING)
    np.testing.assert_allclose(scores(first, FRAME), expected, rtol=1e-5, atol=1e-5)
    if kind != "two labels":
        # What predict gives by itself is the sigmoid of that.
        np.testing.assert_allclose(1 / (1 + np.exp(-scores(first, FRAME))), model.predict(PAIRS), atol=1e-6)
    one_window = {"window_size": 50, "stride": 50, **READING}
    for reranker in (first, ld.MaxP(folder, **one_window), ld.PARADE(folder, **one_window)):
        np.testing.assert_allclose(scores(reranker, FRAME), expected, rtol=1e-5, atol=1e-5)
        assert reranker.load_weights().ready
        reranker.save(tmp_path / "ours")
        again = type(reranker).load(tmp_path / "ours", device="cpu")
        np.testing.assert_allclose(scores(again, FRAME), expected, rtol=1e-5, atol=1e-5)
        assert again.load_weights().backbone.describe() == reranker.load_weights().backbone.describe()


def test_the_owner_itself_scores_windows_by_the_line_that_the_error_names(tmp_path):
    model, folder = stored(tmp_path)
    for given in (model, model.predict):
        with pytest.raises(ValueError, match="CrossEncoder of sentence-transformers takes pairs") as caught:
            ld.PairScorer(given)
    line = str(caught.value).partition("here one line: ")[2].partition(". Or give")[0]
    scorer = eval(line, {"ld": ld, "model": model})
    found = scores(ld.MaxP(scorer, window_size=50, stride=50, max_query_len=8), FRAME)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-scores(ld.FirstP(folder, **READING), FRAME))), atol=1e-5)


@pytest.mark.parametrize("kind", ["ettin", "residual"])
def test_every_window_has_the_owner_s_score(kind, tmp_path):
    model, folder = stored(tmp_path, kind)
    text = " ".join(tiny.WORDS[i * 7 % len(tiny.WORDS)] for i in range(60))
    [row] = ld.MaxP(folder, explain=True, **SLIDING)(tiny.frame(["old dog"], [text])).to_dict("records")
    slices = [text[start:end] for start, end in row["window_spans"]]
    assert slices == [" ".join(text.split()[i * 10 : i * 10 + 20]) for i in range(5)]
    expected = predicted(model, [("old dog", part) for part in slices])
    np.testing.assert_allclose(row["window_scores"], expected, atol=1e-5)
    assert row["score"] == pytest.approx(expected.max(), abs=1e-5)
    average = scores(ld.AvgP(folder, windows=ld.SlidingWindows(20, 10), **READING), tiny.frame(["old dog"], [text]))
    assert average[0] == pytest.approx(expected.mean(), abs=1e-5)


def test_nothing_but_query_and_text_decides(tmp_path):
    frame = tiny.frame(QUERIES, [*TEXTS, "", tiny.LONG])
    table = ld.check_invariance(ld.MaxP(stored(tmp_path)[1], **SLIDING), frame, dtypes=(), verbose=False)
    assert table["passed"].dropna().all(), table


def test_the_parts_of_it(tmp_path):
    model, folder = stored(tmp_path, "residual")
    backbone = load_backbone(folder)
    assert (backbone.hidden_size, backbone.state_size, backbone.pooling) == (40, 32, "cls")
    parts = (backbone.model, backbone.representation, backbone.final)
    own = sum(parameter.numel() for part in parts for parameter in part.parameters())
    pooler = sum(p.numel() for name, p in model.named_parameters() if "pooler" in name)
    assert own == sum(parameter.numel() for parameter in model.parameters()) - pooler
    with pytest.raises(ValueError, match="vectors of one width, but the checkpoint makes 40 of its 32 features"):
        ld.NeuralModel1(folder, **READING).load_scorer()
    assert np.isfinite(scores(ld.CEDR(folder, window_size=20, **READING), FRAME)).all()


def test_it_is_trained_like_any_other(tmp_path):
    run, judged = toy_task(0, queries=4)
    recipe = ld.TrainingArgs(epochs=1, queries_per_step=4, learning_rates={"": 1e-2})
    model = ld.PARADE(stored(tmp_path)[1], training=recipe, **SLIDING)
    before = scores(model, run)
    step = model.load_scorer().encoder.representation
    weights = [parameter.detach().clone() for parameter in step.parameters()]
    model.fit(run, judged)
    assert all(not torch.equal(old, new) for old, new in zip(weights, step.parameters(), strict=True))
    after = scores(model, run)
    assert np.abs(after - before).max() > 1e-3
    model.save(tmp_path / "ours")
    np.testing.assert_allclose(scores(ld.PARADE.load(tmp_path / "ours", device="cpu"), run), after, atol=1e-5)


# Prompts.


@pytest.mark.parametrize("kind", ["ettin", "mean", "language model"])
def test_the_default_prompt_is_put_before_the_query(kind, tmp_path):
    prompts = {"prompts": {"find": "find the old ", "other": "run "}}
    model, folder = stored(tmp_path / "default", kind, default_prompt_name="find", **prompts)
    expected = predicted(model)
    np.testing.assert_allclose(
        scores(ld.MaxP(folder, window_size=50, stride=50, **READING), FRAME), expected, atol=1e-5
    )
    model, folder = stored(tmp_path / "named", kind, **prompts)
    assert np.abs(predicted(model) - expected).max() > 1e-3
    np.testing.assert_allclose(scores(ld.FirstP(folder, **READING), FRAME), predicted(model), atol=1e-5)


def test_a_classifier_with_a_prompt(tmp_path):
    base = tiny.checkpoint(tmp_path / "base")
    model = CrossEncoder(base, device="cpu", prompts={"find": "find the "}, default_prompt_name="find")
    model.save_pretrained(str(tmp_path / "stored"))
    reranker = ld.FirstP(tmp_path / "stored", **READING)
    np.testing.assert_allclose(scores(reranker, FRAME), predicted(model), atol=1e-5)
    reranker.save(tmp_path / "ours")
    np.testing.assert_allclose(
        scores(ld.FirstP.load(tmp_path / "ours", device="cpu"), FRAME), predicted(model), atol=1e-5
    )
    with pytest.raises(ValueError, match="reads words around query and text: leave layout='pair'"):
        ld.FirstP(tmp_path / "stored", layout="padded", **READING).load_scorer()


# What cannot be followed.


def change(folder, file, **values):
    path = Path(folder) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


GENERAL = "config_sentence_transformers.json"
PROMPT = {"prompts": {"find": "find "}, "default_prompt_name": "find"}


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (GENERAL, {"activation_fn": "torch.nn.modules.activation.ReLU"}, r"activation_fn='torch.*ReLU' on its scores"),
        (GENERAL, {"activation_fn": "somebody.Sigmoid"}, "activation_fn='somebody.Sigmoid' on its scores"),
        (GENERAL, {"default_prompt_name": "find"}, "default_prompt_name='find', of which there is no prompt"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "has pooling_mode='max', which cannot be taken over"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"has pooling_mode='cls\+mean', which cannot"),
        (
            "2_Dense/config.json",
            {"activation_function": "my.Swish"},
            "activation_function='my.Swish' in 2_Dense, which",
        ),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Linear"}, "'Linear' is no activation of torch.nn"),
        (
            "2_Dense/config.json",
            {"module_input_name": "token_embeddings"},
            "module_input_name='token_embeddings' in 2_",
        ),
        ("2_Dense/config.json", {"out_features": 16}, "weights in 2_Dense of checkpoint .* do not fit its config.json"),
        ("2_Dense/config.json", {"module_output_name": "x"}, r"has module_output_name=\['x'\] in Dense modules before"),
        ("4_Dense/config.json", {"module_output_name": "x"}, "does not end in a Dense module that gives the scores"),
        ("4_Dense/config.json", {"activation_function": "torch.nn.Tanh"}, "has activation_function=Tanh and use_resid"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "fill-mask"},
            "with transformer_task='fill-mask'; known are",
        ),
    ],
)
def test_what_is_refused_by_name(file, values, message, tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, file, **values)
    with pytest.raises(ValueError, match=message):
        ld.MaxP(folder, **READING).load_scorer()


def test_a_prompt_that_is_left_out_of_the_pooling(tmp_path):
    folder = stored(tmp_path, **PROMPT)[1]
    change(folder, "1_Pooling/config.json", include_prompt=False)
    with pytest.raises(ValueError, match="leaves its prompt 'find ' out of the pooling"):
        ld.MaxP(folder, **READING).load_scorer()


def test_modules_that_are_not_known(tmp_path):
    folder = stored(tmp_path)[1]
    path = Path(folder) / "modules.json"
    modules = json.loads(path.read_text())
    modules[3]["type"] = "sentence_transformers.base.modules.normalize.Normalize"
    path.write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="has a Normalize module, which cannot be taken over"):
        ld.MaxP(folder, **READING).load_scorer()


def test_weights_that_are_missing(tmp_path):
    folder = Path(stored(tmp_path)[1])
    weights = load_file(folder / "4_Dense" / "model.safetensors")
    save_file({"linear.weight": weights["linear.weight"]}, folder / "4_Dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights in 4_Dense of checkpoint .* do not fit its config.json"):
        ld.FirstP(folder, **READING).load_scorer()
    (folder / "4_Dense" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no 4_Dense/model\.safetensors"):
        ld.FirstP(folder, **READING).load_scorer()


def test_with_a_pooling_of_one_s_own_the_head_is_left_out(tmp_path):
    model = ld.MaxP(stored(tmp_path)[1], pooling="mean", **SLIDING)
    assert np.isfinite(scores(model, FRAME)).all()
    assert not model.load_weights().ready
    assert model.load_weights().backbone.representation is None
