"""LateIR and MORES+: what is encoded apart stays apart, is remembered rightly, and meets as described."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

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

from ..support import tiny
from ..support.arithmetic import array, bart, bert, linear
from ..support.scorers import explained
from ..support.systems import QRELS, QUIET, SLIDING, make, scores
from ..support.tiny import LONG

pytestmark = QUIET

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PAIR = ["old dog"], [LONG]
BOTH = pytest.mark.parametrize("name", ["LateIR", "MORESPlus"])


@pytest.fixture
def scorer():
    return make("LateIR").load_scorer()


@pytest.fixture
def mores():
    return make("MORESPlus").load_scorer()


@pytest.fixture
def encoded(monkeypatch):
    """Numbers of token sequences that encoders were given, one entry a call."""
    sizes = []
    original = WindowEncoder.token_states

    def counting(self, batch, *args):
        sizes.append(len(batch.doc))
        return original(self, batch, *args)

    monkeypatch.setattr(WindowEncoder, "token_states", counting)
    return sizes


def windows_of(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[a : a + 20]) for a in range(0, max(1, len(words) - 10), 10)]


# LateIR's formula, with the Hugging Face classes for the encoder and numpy for the rest.


def states(folder: str, text: str, *, segment: int) -> np.ndarray:
    """States of `[CLS] [SEP] text [SEP]`; the text is in `segment`."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", *tokenizer.tokenize(text), "[SEP]"])
    types = [0, 0, *[segment] * (len(ids) - 2)]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
        return array(encoder(**inputs).last_hidden_state[0])


@pytest.mark.parametrize("text", ["the cat in the rain", LONG, ""])
def test_formula_of_late_interaction(scorer, cross_encoder, text):
    interaction, head = scorer.encoder.interaction, scorer.head
    c, s = array(interaction.cls_vector), array(interaction.sep_vector)
    q = linear(states(cross_encoder, "old dog", segment=0), interaction.project)
    vectors = []
    for window in windows_of(text):
        d = linear(states(cross_encoder, window, segment=1), interaction.project)
        sequence = np.vstack([c, s, q, s, d, s])
        vectors.append(bert(interaction.model, sequence, [0] * len(sequence)))
    sequence = np.vstack([array(head.cls_vector), array(head.sep_vector), *vectors, array(head.sep_vector)])
    expected = linear(bert(head.aggregator, sequence, [0, 0, *[1] * len(vectors), 0]), head.final)
    assert len(q) == 2 + 3
    assert scorer.score(["old dog"], [text]).scores == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_wide_interaction_needs_no_projection(cross_encoder, results):
    model = ld.LateIR(cross_encoder, interaction=cross_encoder, aggregator=None, **SLIDING)
    scorer = model.load_scorer()
    assert not list(scorer.encoder.interaction.project.parameters())
    assert scorer.head.cls_vector.shape == (32,)
    assert np.isfinite(scores(model, results)).all()


def test_nothing_of_a_cross_encoder_s_last_steps(cross_encoder, scorer):
    backbone = load_late_backbone(cross_encoder, cross_encoder)
    assert backbone.representation is backbone.final is None
    names = list(scorer.state_dict())
    assert not [name for name in names if "pooler" in name or "classifier" in name]
    words = [name for name in names if "word_embeddings" in name]
    assert words == ["encoder.backbone.embeddings.word_embeddings.weight"]


# MORES+'s formula.


def by_hand(scorer, query: str, windows: list[str]) -> float:
    encoder, tokenizer = scorer.encoder.backbone, scorer.tokenizer
    words = encoder.embed_tokens.weight
    memory = [bart(encoder, words, tokenizer(window)["input_ids"]) for window in windows]
    states = bart(scorer.encoder.decoder, words, tokenizer(query)["input_ids"], np.vstack(memory))
    vector = np.tanh(linear(states[-1], scorer.encoder.represent.dense))
    return float(linear(vector, scorer.head.final)[0])


def test_formula_of_mores(mores):
    queries = ["old dog", "", "snow in the city by the river", "old dog"]
    texts = [LONG, LONG, "a short dog", ""]
    expected = [by_hand(mores, query, windows_of(text)) for query, text in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(mores.score(queries, texts).scores, expected, **CLOSE)
    np.testing.assert_allclose(mores(queries, texts).detach(), expected, **CLOSE)


def test_explanation_scores_each_window_alone(mores):
    _, explanations = explained(mores, ["old dog"] * 2, [LONG, "a short dog"])
    for text, explanation in zip((LONG, "a short dog"), explanations, strict=True):
        expected = [mores.score(["old dog"], [window]).scores[0] for window in windows_of(text)]
        np.testing.assert_allclose(explanation.scores, expected, **CLOSE)


def test_it_says_that_it_is_experimental(results, tmp_path):
    model = make("MORESPlus")
    with pytest.warns(ld.ExperimentalWarning, match="MORESPlus is experimental"):
        model(results)
    model.save(tmp_path)
    parameters = sum(parameter.numel() for parameter in model.load_scorer().parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * 4 * parameters  # the words' table once


def test_other_checkpoints_are_refused(cross_encoder, results):
    for backbone, arguments, message in (
        (cross_encoder, {}, r"is of type 'bert'; MORES\+ needs 'bart'"),
        (tiny.bart(), {"trust_remote_code": True}, "trust_remote_code would have no effect"),
        (tiny.bart(), {"max_query_len": 127, "window_size": 150, "stride": 100}, "max_query_len=127 leaves no room"),
    ):
        with pytest.raises(ValueError, match=message):
            ld.MORESPlus(backbone, **{**SLIDING, **arguments})(results)


# What is encoded, and when.


@pytest.mark.parametrize(("name", "queries"), [("LateIR", 3), ("MORESPlus", 0)])
def test_windows_are_encoded_once_for_all_queries(name, queries, encoded):
    scorer = make(name).load_scorer()
    pairs = list(zip(*[(q, t) for q in ("old dog", "snow", "river") for t in (LONG, "a short dog")], strict=True))
    expected = scorer.score(*pairs).scores
    assert sum(encoded) == queries + 4 + 1
    encoded.clear()
    np.testing.assert_array_equal(scorer.score(*pairs).scores, expected)
    assert not encoded
    scorer.score(["a new query"], [LONG])
    assert sum(encoded) == bool(queries)
    forget_embeddings()
    encoded.clear()
    np.testing.assert_allclose(scorer.score(*pairs).scores, expected, **CLOSE)
    assert sum(encoded) == queries + 4 + 1


@BOTH
def test_a_small_memory_gives_the_same_scores(name, encoded):
    queries, texts = ["old dog", "snow"], [LONG, LONG]
    expected = make(name).load_scorer().score(queries, texts).scores
    scorer = make(name, cached_bytes=2000).load_scorer()
    assert scorer.encoder.cache.max_bytes == 2000
    np.testing.assert_allclose(scorer.score(queries, texts).scores, expected, **CLOSE)
    encoded.clear()
    scorer.score(queries, texts)
    assert sum(encoded) > 0
    with pytest.raises(ValueError, match="cached_bytes=0 must be at least 1"):
        make(name, cached_bytes=0)


def test_training_forgets(encoded):
    run = pd.DataFrame({"qid": "1", "query": "old dog", "docno": ["d0", "d2", "d3"], "score": 1.0})
    run["text"] = ["snow", "an old dog", LONG]
    model = make("LateIR", training=TrainingArgs(learning_rates={"": 1e-2}))
    before = scores(model, run)
    model.fit(run, QRELS)
    encoded.clear()
    after = scores(model, run)
    assert sum(encoded) == 1 + 1 + 1 + 4
    assert not np.isclose(before, after, **CLOSE).any()
    fresh = copy.deepcopy(model.load_scorer())
    assert not len(fresh.encoder.cache)
    np.testing.assert_allclose(fresh.score(run["query"].tolist(), run["text"].tolist()).scores, after, **CLOSE)


def loaded(scorer, name) -> None:
    other = make(name, seed=3).load_scorer()
    other.load_state_dict({key: 1.1 * value for key, value in other.state_dict().items()})
    scorer.load_state_dict(other.state_dict())


def uncounted(scorer, name) -> None:
    for parameter in scorer.encoder.parameters():
        parameter.data.mul_(1.1)


@BOTH
@pytest.mark.parametrize("change", [loaded, uncounted])
@pytest.mark.parametrize("way", ["score", "forward", "all in inference mode"])
def test_other_weights_forget(name, change, way):
    """Also where torch does not count the writes, and where nothing that is made in inference mode has a count."""

    def score(model) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(*PAIR)) if way == "forward" else model.score(*PAIR).scores

    with torch.inference_mode(way == "all in inference mode"):
        scorer = make(name).load_scorer()
        before = score(scorer)
        change(scorer, name)
        after = score(scorer)
        np.testing.assert_allclose(after, score(copy.deepcopy(scorer)), **CLOSE)
    assert not np.isclose(before, after, **CLOSE).any()


def test_precisions_are_remembered_apart(scorer):
    exact, settings = scorer.score(*PAIR).scores, scorer.settings
    scorer.use(replace(settings, dtype=torch.bfloat16))
    assert scorer.score(*PAIR).scores != exact
    scorer.use(settings)
    np.testing.assert_array_equal(scorer.score(*PAIR).scores, exact)


def test_copies_remember_nothing(results):
    model = make("LateIR")
    expected = scores(model, results)
    # Two queries, the long text's 13 windows, of which two are equal, and two short texts.
    assert len(model.load_scorer().encoder.cache) == 2 + 12 + 1 + 1
    assert len(model.load_scorer().tokens.cache) == 2 + 3
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not len(other.load_scorer().encoder.cache)
        assert not len(other.load_scorer().tokens.cache)
        np.testing.assert_allclose(scores(other, results), expected, **CLOSE)


# Training, layouts, limits.


@BOTH
def test_gradients_reach_every_parameter(name):
    scorer = make(name).load_scorer()
    queries, texts = ["old dog", "old dog", "snow"], [LONG, "a short dog", LONG]
    found = scorer(queries, texts)
    np.testing.assert_allclose(found.detach(), scorer.score(queries, texts).scores, **CLOSE)
    found.square().sum().backward()
    without = {name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    # The softmax of attention does not see the bias of the keys, of which BART has one of its own.
    assert {name for name in without if not name.endswith("k_proj.bias")} == set()


def test_default_recipes(scorer, mores):
    for name, made, rates in (
        ("LateIR", scorer, {"encoder.": 1e-5, "encoder.interaction.": 1e-4, "head.aggregator.": 1e-5, "": 1e-4}),
        ("MORESPlus", mores, {"encoder.": 1e-5, "encoder.represent.": 1e-4, "": 1e-4}),
    ):
        recipe = make(name).recipe
        assert (recipe.learning_rates, recipe.epochs) == (rates, 3 if name == "LateIR" else 1)
        weights = [name for name, _ in made.named_parameters()]
        assert all(any(weight.startswith(prefix) for weight in weights) for prefix in rates)


@BOTH
def test_fixed_layout(name):
    fixed = make(name, layout="padded").load_scorer()
    queries, texts = ["old dog", "snow in the city"], [LONG, "a short dog"]
    alone = [fixed.score([q], [t]).scores[0] for q, t in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(fixed.score(queries, texts).scores, alone, **CLOSE)
    assert not np.isclose(make(name).load_scorer().score(queries, texts).scores[1], alone[1], **CLOSE)


def test_windows_that_the_interaction_cannot_take(cross_encoder, results, tmp_path):
    short = tiny.checkpoint(tmp_path, hidden_size=16, max_position_embeddings=40)
    arguments = {"interaction": short, "aggregator": None, "max_query_len": 8, "stride": 10}
    room = 40 - 4 - (8 + 3) - 3
    assert np.isfinite(scores(ld.LateIR(cross_encoder, window_size=room, **arguments), results)).all()
    with pytest.raises(ValueError, match=f"takes {room} document tokens"):
        ld.LateIR(cross_encoder, window_size=room + 1, **arguments)(results)
