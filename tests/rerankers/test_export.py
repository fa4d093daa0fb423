"""Exported models: other libraries compute the same scores, and what a format cannot express is refused."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.families import FAMILIES
from pyterrier_longdoc.rerankers import export

from ..support import tiny, tiny_long
from ..support.systems import QRELS, QUIET, make, scores

pytestmark = QUIET

QUERIES = ["old dog", "snow in the city", "walk"]
TEXTS = ["the cat and the dog walk", "snow", "the old tree in the rain of the city and the river"]
PAIRS = pd.DataFrame([(str(i), q, f"d{j}", t) for i, q in enumerate(QUERIES) for j, t in enumerate(TEXTS)])
PAIRS.columns = ["qid", "query", "docno", "text"]
LATE_INTERACTION = Path(__file__).parents[1] / "support" / "late_interaction"
FIXTURES = sorted(path.parent.name for path in LATE_INTERACTION.glob("*/scores.json"))
EXPORTABLE = [name for name, family in FAMILIES.items() if family.supports_export]


def maxp(backbone: str, **changes) -> ld.MaxP:
    """A model that reads every text of `PAIRS` in one window."""
    return ld.MaxP(backbone, **{"window_size": 60, "stride": 60, "max_query_len": 20, "device": "cpu", **changes})


def logits(folder: Path) -> np.ndarray:
    """What transformers alone computes for the pairs."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    with torch.no_grad():
        for query, text in zip(PAIRS["query"], PAIRS["text"], strict=True):
            found = model(**tokenizer(query, text, return_tensors="pt")).logits
            assert found.shape == (1, 1)
            rows.append(float(found))
    return np.array(rows)


def trained(backbone: str, **changes) -> ld.MaxP:
    training = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-2})
    return maxp(backbone, training=training, **changes).fit(tiny.results(), QRELS)


EXPORTED = {
    **{family: lambda folder, family=family: maxp(tiny.checkpoint(folder, family)) for family in EXPORTABLE},
    **{
        name: lambda _, name=name: make(name, device="cpu", max_query_len=None)
        for name in ("FirstP", "SumP", "AvgP", "KMaxP", "SoftMaxP")
    },
    "two labels": lambda folder: maxp(tiny.checkpoint(folder, labels=2)),
    "trained": lambda _: trained(tiny.encoder()),
    **{
        f"trained encoder, {family}": lambda folder, family=family: trained(
            tiny.checkpoint(folder, family, labels=None), pooling="cls"
        )
        for family in ("bert", "roberta", "nomic_bert")
    },
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_transformers_computes_the_same_scores(kind, tmp_path):
    model = EXPORTED[kind](tmp_path / "backbone")
    model.export(tmp_path / "export")
    np.testing.assert_allclose(logits(tmp_path / "export"), scores(model, PAIRS), rtol=1e-5, atol=1e-5)


def test_trained_weights_are_exported(cross_encoder, tmp_path):
    trained(cross_encoder).export(tmp_path / "export")
    assert np.abs(logits(tmp_path / "export") - scores(maxp(cross_encoder), PAIRS)).max() > 0.01


def test_an_export_can_be_a_backbone(cross_encoder, tmp_path):
    model = maxp(cross_encoder)
    model.export(tmp_path / "export")
    again = maxp(str(tmp_path / "export"))
    np.testing.assert_allclose(scores(again, PAIRS), scores(model, PAIRS), rtol=1e-6)


@pytest.mark.slow
def test_a_cross_encoder_of_sentence_transformers_computes_the_same_scores(cross_encoder, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    model = maxp(cross_encoder)
    model.export(tmp_path / "export")
    pairs = list(zip(PAIRS["query"], PAIRS["text"], strict=True))
    found = library.CrossEncoder(str(tmp_path / "export"), device="cpu").predict(pairs)
    np.testing.assert_allclose(found, scores(model, PAIRS), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_multi_vector_encoder_computes_the_same_scores(fixture, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    model = ld.MaxSim(str(LATE_INTERACTION / fixture), device="cpu")
    model.export(tmp_path / "export")
    encoder = library.MultiVectorEncoder(str(tmp_path / "export"), device="cpu")
    found = encoder.similarity(encoder.encode_query(QUERIES), encoder.encode_document(TEXTS))
    np.testing.assert_allclose(found.numpy().ravel(), scores(model, PAIRS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{"model_max_length": 16}, {"padding_side": "left"}], ids=str)
def test_settings_of_a_tokenizer_that_this_package_ignores_are_not_exported(change, tmp_path):
    backbone = Path(tiny.checkpoint(tmp_path / "backbone"))
    settings = backbone / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **change}))
    model = maxp(str(backbone))
    model.export(tmp_path / "export")
    folder, texts = tmp_path / "export", ["dog", "cat the snow " * 18]
    classifier, tokenizer = (c.from_pretrained(folder) for c in (AutoModelForSequenceClassification, AutoTokenizer))
    with torch.no_grad():
        inputs = tokenizer(["old dog"] * 2, texts, padding=True, truncation=True, return_tensors="pt")
        found = classifier(**inputs).logits[:, 0].numpy()
    np.testing.assert_allclose(found, scores(model, tiny.frame(["old dog"], texts)), rtol=1e-5, atol=1e-5)


def test_an_export_with_other_scores_is_refused_and_can_be_repeated(cross_encoder, tmp_path, monkeypatch):
    model = maxp(cross_encoder)
    with monkeypatch.context() as patch:
        patch.setattr(export, "_logits", lambda folder, queries, texts: np.zeros(len(texts)))
        with pytest.raises(ValueError, match="instead of"):
            model.export(tmp_path)
        patch.setattr(export, "_logits", Mock(side_effect=OSError("No space left on device")))
        with pytest.raises(OSError, match="No space"):
            model.export(tmp_path)
    assert not list(tmp_path.glob("[!.]*"))
    model.export(tmp_path)
    np.testing.assert_allclose(logits(tmp_path), scores(model, PAIRS), rtol=1e-5, atol=1e-5)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match="other files"):
        model.save(tmp_path)


def pooled(pooling: str, family: str):
    return lambda folder: maxp(tiny.checkpoint(folder, family, labels=None), pooling=pooling)


REFUSED = {
    "PARADE": (lambda _: make("PARADE-attn"), "vectors of several windows"),
    "layout": (lambda _: maxp(tiny.encoder(), layout="padded"), "layout="),
    "template": (lambda _: maxp(tiny.encoder(), template="query: {query} text: {text}"), "template"),
    "Longformer": (
        lambda folder: ld.LongP(tiny.checkpoint(folder, "longformer", **tiny_long.FAMILIES["longformer"])),
        "longformer",
    ),
    "mean pooling": (pooled("mean", "bert"), "pooling="),
    **{f"{family} without its head": (pooled("cls", family), "pooling=") for family in ("electra", "modernbert")},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_a_classifier_cannot_express_are_not_exported(kind, tmp_path):
    make_it, reason = REFUSED[kind]
    model = make_it(tmp_path / "backbone")
    model.model.origin = "fit"
    with pytest.raises(ValueError, match=reason):
        model.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_random_weights_are_refused(plain_encoder, tmp_path):
    with pytest.raises(ValueError, match="random weights"):
        maxp(plain_encoder).export(tmp_path / "export")


def test_a_function_is_refused(tmp_path):
    with pytest.raises(TypeError, match="exported"):
        ld.MaxP(ld.PairScorer(zip)).export(tmp_path / "export")


def test_a_folder_with_files_is_refused(cross_encoder, tmp_path):
    model = maxp(cross_encoder)
    model.save(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="not empty"):
        model.export(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_the_card_shows_both_ways_to_load_it(cross_encoder, tmp_path):
    ld.MaxP(cross_encoder, window_size=40, stride=30, max_query_len=8, device="cpu").export(tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    assert 'CrossEncoder("this-folder-or-hub-id")' in card
    assert 'ld.MaxP("this-folder-or-hub-id", window_size=40, stride=30)' in card


def test_the_card_has_training_data_and_validation(cross_encoder, tmp_path, results):
    training = ld.TrainingArgs(max_steps=1, metric="RR@10")
    model = maxp(cross_encoder, training=training).fit(results, QRELS, results, QRELS)
    model.export(tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    assert f"Training data: {model.trained_on}" in card
    assert "Validation: RR@10" in card


def test_no_sigmoid_is_applied_by_sentence_transformers(cross_encoder, tmp_path):
    maxp(cross_encoder).export(tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text(encoding="utf-8"))
    assert config["sentence_transformers"]["activation_fn"].endswith("Identity")


def test_an_export_is_uploaded_under_its_address(cross_encoder, loopback):
    assert maxp(cross_encoder).push_to_hub("me/maxp", license="mit", format="standard") == "https://hub/me/maxp"
    folder = loopback.folder("me/maxp")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card
    assert 'CrossEncoder("me/maxp")' in card
    assert "format" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_an_unknown_format_is_refused(cross_encoder):
    with pytest.raises(ValueError, match="format="):
        maxp(cross_encoder).push_to_hub("me/maxp", format="onnx")
