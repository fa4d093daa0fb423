"""LateIR and MaxSim: what is encoded apart stays apart, is remembered rightly, and meets as described."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pyterrier_longdoc.common.caches import forget_embeddings

from ..support.arithmetic import array, bert, linear
from ..support.systems import QUIET, make, scores
from ..support.tiny import LONG

pytestmark = QUIET

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PAIR = ["old dog"], [LONG]
BOTH = pytest.mark.parametrize("name", ["LateIR", "MaxSim"])


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


@pytest.mark.parametrize(("name", "queries"), [("LateIR", 3), ("MaxSim", 3)])
def test_windows_are_encoded_once_for_all_queries(name, queries, encoded):
    scorer = make(name).model
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
    expected = make(name).model.score(queries, texts).scores
    scorer = make(name, cached_bytes=2000).model
    assert scorer.encoder.cache.max_bytes == 2000
    np.testing.assert_allclose(scorer.score(queries, texts).scores, expected, **CLOSE)
    encoded.clear()
    scorer.score(queries, texts)
    assert sum(encoded) > 0
    with pytest.raises(ValueError, match="cached_bytes=0"):
        make(name, cached_bytes=0)


@BOTH
@pytest.mark.parametrize("way", ["score", "forward", "all in inference mode"])
def test_changed_weights_invalidate_cached_vectors(name, way):
    """Even if torch does not count the writes, as for `.data` and for tensors created in inference mode."""

    def score(model) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(*PAIR)) if way == "forward" else model.score(*PAIR).scores

    with torch.inference_mode(way == "all in inference mode"):
        scorer = make(name).model
        before = score(scorer)
        for parameter in scorer.encoder.parameters():
            parameter.data.mul_(1.1)
        after = score(scorer)
        np.testing.assert_allclose(after, score(copy.deepcopy(scorer)), **CLOSE)
    assert not np.isclose(before, after, **CLOSE).any()


def test_copies_have_an_empty_cache_and_the_same_scores(results):
    model = make("LateIR")
    expected = scores(model, results)
    # Two queries, the long text's 13 windows, of which two are equal, and two short texts.
    assert len(model.model.encoder.cache) == 2 + 12 + 1 + 1
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not len(other.model.encoder.cache)
        np.testing.assert_allclose(scores(other, results), expected, **CLOSE)


@BOTH
def test_gradients_reach_every_parameter(name):
    scorer = make(name).model
    queries, texts = ["old dog", "old dog", "snow"], [LONG, "a short dog", LONG]
    found = scorer(queries, texts)
    np.testing.assert_allclose(found.detach(), scorer.score(queries, texts).scores, **CLOSE)
    found.square().sum().backward()
    without = {name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert without == set()


def test_the_padded_layout_gives_the_same_scores_in_any_batch():
    fixed = make("LateIR", layout="padded").model
    queries, texts = ["old dog", "snow in the city"], [LONG, "a short dog"]
    alone = [fixed.score([q], [t]).scores[0] for q, t in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(fixed.score(queries, texts).scores, alone, **CLOSE)
    assert not np.isclose(make("LateIR").model.score(queries, texts).scores[1], alone[1], **CLOSE)
