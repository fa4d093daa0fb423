"""LateIR: what is encoded apart stays apart, is remembered rightly, and interacts as described."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.modelling.apart import load_late_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.training import TrainingArgs

from ..modelling.test_heads import gelu, layer_norm, linear, softmax, transformer
from ..support import tiny
from ..support.systems import SLIDING, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

W = tiny.WORDS
LONG = " ".join(W[(7 * i) % len(W)] for i in range(50))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def model(cross_encoder):
    return make("LateIR", cross_encoder)


@pytest.fixture
def scorer(model):
    return model.load_scorer()


@pytest.fixture
def encoded(monkeypatch):
    """Numbers of token sequences that encoders were given, one entry a call."""
    sizes = []
    original = WindowEncoder.token_states

    def counting(self, batch):
        sizes.append(len(batch.doc))
        return original(self, batch)

    monkeypatch.setattr(WindowEncoder, "token_states", counting)
    return sizes


# The formula, with the Hugging Face classes for the encoder and numpy for the rest.


def states(folder: str, text: str, *, segment: int) -> np.ndarray:
    """States of `[CLS] [SEP] text [SEP]`; the text is in `segment`."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", *tokenizer.tokenize(text), "[SEP]"])
    types = [0, 0, *[segment] * (len(ids) - 2)]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
        return encoder(**inputs).last_hidden_state[0].double().numpy()


def first(model, x: np.ndarray) -> np.ndarray:
    """The first state of a BERT over vectors, all of them in the first segment."""
    parts = model.embeddings
    x = x + parts.position_embeddings.weight.detach().double().numpy()[: len(x)]
    x = layer_norm(x + parts.token_type_embeddings.weight.detach().double().numpy()[0], parts.LayerNorm)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        q, k, v = (linear(x, m) for m in (attention.query, attention.key, attention.value))
        heads = np.split(np.arange(x.shape[1]), attention.num_attention_heads)
        mixed = [softmax((q[:, h] @ k[:, h].T / np.sqrt(len(h))).T).T @ v[:, h] for h in heads]
        x = layer_norm(x + linear(np.hstack(mixed), layer.attention.output.dense), layer.attention.output.LayerNorm)
        inner = linear(gelu(linear(x, layer.intermediate.dense)), layer.output.dense)
        x = layer_norm(x + inner, layer.output.LayerNorm)
    return x[0]


@pytest.mark.parametrize("text", ["the cat in the rain", LONG, ""])
def test_formula(scorer, cross_encoder, text):
    interaction, words = scorer.interaction, text.split()
    c, s = (v.detach().double().numpy() for v in (interaction.cls_vector, interaction.sep_vector))
    q = linear(states(cross_encoder, "old dog", segment=0), interaction.project)
    windows = [words[a : a + 20] for a in range(0, max(1, len(words) - 10), 10)]
    vectors = []
    for window in windows:
        d = linear(states(cross_encoder, " ".join(window), segment=1), interaction.project)
        vectors.append(first(interaction.model, np.vstack([c, s, q, s, d, s])))
    expected = transformer(scorer.head, np.array(vectors))
    assert len(q) == 2 + 3
    assert scorer.score(["old dog"], [text]).scores[0] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_wide_interaction_needs_no_projection(cross_encoder, results):
    model = ld.LateIR(cross_encoder, interaction=cross_encoder, aggregator=None, **SLIDING)
    scorer = model.load_scorer()
    assert not list(scorer.interaction.project.parameters())
    assert scorer.head.cls_vector.shape == (32,)
    assert np.isfinite(model(results)["score"]).all()


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_other_families(family, tmp_path, results):
    backbone = tiny.checkpoint(tmp_path, family)
    model = make("LateIR", backbone)
    expected = model(results)["score"].to_numpy()
    for i in range(len(results)):
        np.testing.assert_allclose(make("LateIR", backbone)(results.iloc[[i]])["score"], expected[[i]], **CLOSE)


def test_nothing_of_a_cross_encoder_s_last_steps(cross_encoder):
    backbone = load_late_backbone(cross_encoder, cross_encoder)
    assert backbone.representation is None
    assert backbone.final is None
    names = list(make("LateIR", cross_encoder).load_scorer().state_dict())
    assert not [name for name in names if "pooler" in name or "classifier" in name]
    words = [name for name in names if "word_embeddings" in name]
    assert words == ["encoder.backbone.embeddings.word_embeddings.weight"]


def test_fixed_layout(cross_encoder):
    fixed = make("LateIR", cross_encoder, pad_query=True).load_scorer()
    queries, texts = ["old dog", "snow in the city"], [LONG, "a short dog"]
    alone = [fixed.score([q], [t]).scores[0] for q, t in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(fixed.score(queries, texts).scores, alone, **CLOSE)
    assert not np.isclose(
        make("LateIR", cross_encoder).load_scorer().score(queries, texts).scores, alone, **CLOSE
    ).any()


# What is encoded, and when.


def test_windows_are_encoded_once_for_all_queries(scorer, encoded):
    queries, texts = ["old dog", "snow", "river"], [LONG, "a short dog"]
    pairs = [(query, text) for query in queries for text in texts]
    expected = scorer.score(*zip(*pairs, strict=True)).scores
    assert sum(encoded) == 3 + 4 + 1  # queries, windows
    encoded.clear()
    np.testing.assert_array_equal(scorer.score(*zip(*pairs, strict=True)).scores, expected)
    assert not encoded
    scorer.score(["a new query"], [LONG]).scores
    assert encoded == [1]
    forget_embeddings()
    encoded.clear()
    np.testing.assert_allclose(scorer.score(*zip(*pairs, strict=True)).scores, expected, **CLOSE)
    assert sum(encoded) == 3 + 4 + 1


@pytest.mark.parametrize("name", ["LateIR", "MORESPlus"])
def test_a_small_memory_gives_the_same_scores(name, cross_encoder, encoded):
    queries, texts = ["old dog", "snow"], [LONG, LONG]
    expected = make(name, cross_encoder).load_scorer().score(queries, texts).scores
    scorer = make(name, cross_encoder, cached_bytes=2000).load_scorer()
    np.testing.assert_allclose(scorer.score(queries, texts).scores, expected, **CLOSE)
    assert scorer.states.cache._bytes <= 2000
    encoded.clear()
    scorer.score(queries, texts).scores
    assert sum(encoded) > 0
    with pytest.raises(ValueError, match="cached_bytes=0 must be at least 1"):
        make(name, cross_encoder, cached_bytes=0)


def test_training_forgets(model, encoded):
    run = pd.DataFrame(
        [("1", "old dog", f"d{i}", text, 1.0) for i, text in enumerate(["snow", "an old dog", LONG])],
        columns=["qid", "query", "docno", "text", "score"],
    )
    qrels = pd.DataFrame({"qid": ["1"], "docno": ["d1"], "label": [1]})
    before = model(run)["score"].to_numpy()
    model.set_parameter("training", TrainingArgs(learning_rates={"": 1e-2}))
    model.fit(run, qrels)
    encoded.clear()
    after = model(run)["score"].to_numpy()
    assert sum(encoded) == 1 + 1 + 1 + 4
    assert not np.isclose(before, after, **CLOSE).any()
    scorer = model.load_scorer()
    fresh = copy.deepcopy(scorer)
    assert not len(fresh.states.cache)
    np.testing.assert_allclose(fresh.score(run["query"].tolist(), run["text"].tolist()).scores, after, **CLOSE)


def test_loaded_weights_forget(scorer, cross_encoder):
    other = make("LateIR", cross_encoder, seed=3).load_scorer()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    pair = ["old dog"], [LONG]
    scorer.score(*pair).scores
    scorer.load_state_dict(other.state_dict())
    np.testing.assert_allclose(scorer.score(*pair).scores, other.score(*pair).scores, **CLOSE)


def test_weights_whose_changes_leave_no_trace(cross_encoder):
    pair = ["old dog"], [LONG]
    with torch.inference_mode():
        scorer = make("LateIR", cross_encoder).load_scorer()
        before = scorer.score(*pair).scores
        for parameter in scorer.encoder.parameters():
            parameter.mul_(1.1)
        after, fresh = scorer.score(*pair).scores, copy.deepcopy(scorer).score(*pair).scores
    assert not np.isclose(before, after, **CLOSE).any()
    np.testing.assert_allclose(after, fresh, **CLOSE)


@pytest.mark.parametrize("name", ["LateIR", "MORESPlus"])
@pytest.mark.parametrize("forward", [False, True])
def test_writes_that_torch_does_not_count(name, forward, cross_encoder):
    pair = ["old dog"], [LONG]
    scorer = make(name, cross_encoder).load_scorer()

    def score(model) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(*pair)) if forward else model.score(*pair).scores

    before = score(scorer)
    for parameter in scorer.encoder.parameters():
        parameter.data.mul_(1.1)
    after = score(scorer)
    assert not np.isclose(before, after, **CLOSE).any()
    np.testing.assert_allclose(after, score(copy.deepcopy(scorer)), **CLOSE)


def test_precisions_are_remembered_apart(scorer):
    pair = ["old dog"], [LONG]
    exact = scorer.score(*pair).scores
    low = scorer.score(*pair, dtype=torch.bfloat16).scores
    assert low != exact
    np.testing.assert_array_equal(scorer.score(*pair).scores, exact)


def test_copies_remember_nothing(model, results):
    expected = model(results)["score"].to_numpy()
    # Two queries, the long text's 13 windows, of which two are equal, and two short texts.
    assert len(model.load_scorer().states.cache) == 2 + 12 + 1 + 1
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not len(other._loaded.scorer.states.cache)
        np.testing.assert_allclose(other(results)["score"], expected, **CLOSE)


# Training.


def test_training_agrees_with_scoring(scorer):
    queries, texts = ["old dog", "old dog", "snow"], [LONG, "a short dog", LONG]
    scores = scorer(queries, texts)
    np.testing.assert_allclose(scores.detach(), scorer.score(queries, texts).scores, **CLOSE)
    scores.square().sum().backward()
    without = [name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


def test_default_recipe(model):
    rates = model._default_training().learning_rates
    names = dict(model.load_scorer().named_parameters())

    def rate(name):
        return rates[max((prefix for prefix in rates if name.startswith(prefix)), key=len)]

    assert {rate(name) for name in names if name.startswith(("encoder.", "head.aggregator."))} == {1e-5}
    assert {rate(name) for name in names if name.startswith(("interaction.", "head.final", "head.project"))} == {1e-4}
    assert model._default_training().epochs == 3


def test_start_from(cross_encoder, results):
    trained, model = make("LateIR", cross_encoder, seed=5), make("LateIR", cross_encoder)
    expected = trained(results)["score"].to_numpy()
    assert not np.isclose(model(results)["score"], expected, **CLOSE).any()
    np.testing.assert_allclose(model.start_from(trained)(results)["score"], expected, **CLOSE)


# Limits.


def test_a_change_of_the_interaction_would_lose_training(model, results, cross_encoder):
    model(results)
    model._loaded.trained = True
    model.set_parameter("interaction", cross_encoder)
    with pytest.raises(ValueError, match="a change of backbone, interaction, trust_remote_code or seed"):
        model(results)


def test_windows_that_the_interaction_cannot_take(cross_encoder, results, tmp_path):
    short = tiny.checkpoint(tmp_path, hidden_size=16, max_position_embeddings=40)
    arguments = {"interaction": short, "aggregator": None, "max_query_len": 8, "stride": 10}
    room = 40 - 4 - (8 + 3) - 3
    assert np.isfinite(ld.LateIR(cross_encoder, window_size=room, **arguments)(results)["score"]).all()
    with pytest.raises(ValueError, match=f"takes {room} document tokens"):
        ld.LateIR(cross_encoder, window_size=room + 1, **arguments)(results)


def test_arguments_may_be_paths(cross_encoder, results, tmp_path):
    from pathlib import Path

    folder = Path(tiny.aggregator())
    model = ld.LateIR(Path(cross_encoder), interaction=folder, aggregator=folder, **SLIDING)
    expected = model(results)["score"].to_numpy()
    model.save(tmp_path)
    np.testing.assert_array_equal(ld.LateIR.load(tmp_path)(results)["score"], expected)
