"""Encoders of queries and windows apart: the formula of LateIR, and what all of them cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pyterrier_longdoc.common.caches import EmbeddingCache
from pyterrier_longdoc.modelling.reader import Reader

from ..support import tiny
from ..support.arithmetic import array, bert, linear
from ..support.scorers import Passes
from ..support.systems import QUIET, make
from ..support.threads import Interleaved
from ..support.tiny import LONG

pytestmark = QUIET

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PAIR = ["old dog"], [LONG]
PAIRS = ["old dog", "old dog", "snow", "snow", "river"], [LONG, "a short dog", LONG, "a short dog", LONG]
WINDOWS = 4 + 1
"""Of both texts."""


def windows_of(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[a : a + 20]) for a in range(0, max(1, len(words) - 10), 10)]


def states(folder: str, text: str, *, segment: int) -> np.ndarray:
    """States of `[CLS] [SEP] text [SEP]`; the text is in `segment`."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", *tokenizer.tokenize(text), "[SEP]"])
    types = [0, 0, *[segment] * (len(ids) - 2)]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
        return array(encoder(**inputs).last_hidden_state[0])


@pytest.mark.parametrize("text", ["the cat in the rain", LONG, ""])
def test_scores_of_late_interaction_equal_the_formula(cross_encoder, text):
    scorer = make("LateIR").model
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


@pytest.mark.parametrize("name", ["LateIR", "MaxSim", "BiEncoder-max"])
def test_queries_and_windows_are_encoded_once(name):
    scorer = make(name).model
    passes = Passes(scorer)
    expected = scorer.score(*PAIRS).scores
    assert passes.windows == 3 + WINDOWS
    np.testing.assert_array_equal(scorer.score(*PAIRS).scores, expected)
    assert passes.windows == 3 + WINDOWS
    scorer.score(["a new query"], [LONG])
    assert passes.windows == 3 + WINDOWS + 1
    scorer.reader.cache.clear()
    np.testing.assert_allclose(scorer.score(*PAIRS).scores, expected, **CLOSE)
    assert passes.windows == 2 * (3 + WINDOWS) + 1


@pytest.mark.parametrize("name", ["LateIR", "MaxSim", "BiEncoder-max"])
def test_texts_are_tokenized_once_while_they_are_cached(name, monkeypatch):
    scorer, tokenized = make(name).model, []
    own = Reader.tokenize
    monkeypatch.setattr(Reader, "tokenize", lambda self, texts, **kw: tokenized.extend(texts) or own(self, texts, **kw))
    for query in ("old dog", "snow"):
        scorer.score([query] * 2, [LONG, "a short dog"])
    assert sorted(text.text for text in tokenized) == sorted([LONG, "a short dog"])
    scorer.score(["snow"], [LONG], explain=True)  # needs characters
    scorer.reader.cache.clear()
    scorer.score(["snow"], [LONG])
    assert [text.text for text in tokenized[2:]] == [LONG] * 2


@pytest.mark.parametrize("name", ["LateIR", "MaxSim", "BiEncoder-max"])
def test_other_settings_tokenize_cached_texts_anew(name):
    scorer, other = make(name).model, make(name).model
    text = LONG.upper()
    scorer.score(["snow"], [text])
    for settings in (replace(scorer.settings, max_doc_len=9), scorer.settings):
        scorer.use(settings)
        other.use(settings)
        scorer.reader.cache.clear()
        other.reader.cache.clear()
        expected = other.score(["old dog"], [text]).scores
        np.testing.assert_array_equal(scorer.score(["old dog"], [text]).scores, expected)
        assert scorer.coverage_of(["snow"], [text]).tokens_read == other.coverage_of(["snow"], [text]).tokens_read


@pytest.mark.parametrize(("name", "limit"), [("LateIR", 2000), ("MaxSim", 15_000)])
def test_a_small_cache_keeps_its_limit_and_the_scores(name, limit):
    expected = make(name).model.score(*PAIRS).scores
    scorer = make(name, cached_bytes=limit).model
    for _ in range(2):
        np.testing.assert_allclose(scorer.score(*PAIRS).scores, expected, **CLOSE)
        assert 0 < len(scorer.encoder.cache) < 3 + WINDOWS
        assert sum(array.nbytes for array in scorer.encoder.cache._values.values()) <= limit


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in ("LateIR", "MaxSim") for way in ("score", "forward", "all in inference mode")),
        ("BiEncoder-max", "score"),
    ],
)
def test_changed_weights_invalidate_cached_vectors(name, way, tmp_path):
    """Also those of a model that was made in inference mode, where torch would not count the writes."""

    def score(model) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(*PAIR)) if way == "forward" else model.score(*PAIR).scores

    with torch.inference_mode(way == "all in inference mode"):
        scorer = make(name, tiny.checkpoint(tmp_path, labels=None)).model
        before = score(scorer)
        with torch.no_grad():
            for parameter in scorer.encoder.parameters():
                parameter.mul_(1.1)
        after = score(scorer)
        scorer.reader.cache.clear()
        np.testing.assert_allclose(after, score(scorer), **CLOSE)
    assert not np.isclose(before, after, **CLOSE).any()


@pytest.mark.parametrize("name", ["LateIR", "MaxSim", "BiEncoder-max"])
def test_states_of_a_thread_are_not_cached_for_weights_that_changed_meanwhile(name, tmp_path, monkeypatch):
    scorer = make(name, tiny.checkpoint(tmp_path, labels=None)).model
    threads = Interleaved().before(monkeypatch, EmbeddingCache, "put")  # the states are computed

    def change() -> None:
        with torch.no_grad():
            scorer.encoder.backbone.embeddings.word_embeddings.weight.mul_(1.5)
        scorer.score(["snow"], ["a short dog"])

    threads.run(lambda: scorer.score(*PAIR), change)
    after = scorer.score(*PAIR).scores
    scorer.reader.cache.clear()
    np.testing.assert_allclose(after, scorer.score(*PAIR).scores, **CLOSE)


@pytest.mark.parametrize("name", ["LateIR", "MaxSim"])
def test_gradients_reach_every_parameter(name):
    scorer = make(name).model
    queries, texts = ["old dog", "old dog", "snow"], [LONG, "a short dog", LONG]
    found = scorer(queries, texts)
    np.testing.assert_allclose(found.detach(), scorer.score(queries, texts).scores, **CLOSE)
    found.square().sum().backward()
    without = {name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert without == set()
