"""CEDR and Neural Model 1: un-chunking, matches, the heads once more in numpy, explanations, training order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.reader import specials_of_pair
from pyterrier_longdoc.modelling.windows import GreedyChunks

from ..support import scorers, tiny
from ..support.arithmetic import array, linear
from ..support.systems import QUIET, make
from .test_heads import CHANNELS, H, documents_of, encoded
from .test_model import QUERIES, TEXTS, text_of

pytestmark = QUIET

CHUNK = 20
QUERY = "snow in the city"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def scorer_of(backbone, name, options=None, **arguments):
    """A token head with random weights on a backbone, in evaluation mode."""
    torch.manual_seed(0)
    head = build_head(name, backbone.hidden_size, channels=backbone.channels, **(options or {}))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return scorers.scorer_of(backbone, GreedyChunks(CHUNK), head, **{"max_query_len": 8, **arguments})


@torch.no_grad()
def encode(scorer, queries, texts):
    return scorer.compute(scorer.read(queries, texts))[0]


@torch.no_grad()
def states_of(backbone, query, text):
    """All layers of one input: what `output_hidden_states` of transformers says, cut by hand."""
    inputs = backbone.tokenizer(query, text, return_tensors="pt")
    if specials_of_pair(backbone).types is None:
        inputs.pop("token_type_ids", None)
    output = backbone.model(**inputs, output_hidden_states=True)
    layers = torch.stack([*output.hidden_states[:-1], output.last_hidden_state])[:, 0]  # (C, T, H)
    words, inside = len(query.split()), len(text.split())
    return layers[:, 1 : 1 + words], layers[:, -1 - inside : -1]


def cosines(query, document):
    """`(C, Q, H)` and `(C, D, H)` to `(C, Q, D)`, in double precision."""
    q, d = array(query), array(document)
    norms = np.linalg.norm(q, axis=-1)[:, :, None] * np.linalg.norm(d, axis=-1)[:, None, :]
    return np.einsum("cqh,cdh->cqd", q, d) / norms


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_matches_of_a_document_are_those_of_its_chunks(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    text = text_of(2 * CHUNK + 5)
    words = text.split()
    chunks = [" ".join(words[i : i + CHUNK]) for i in range(0, len(words), CHUNK)]
    query = states_of(backbone, QUERY, chunks[0])[0]  # with the first chunk, in every chunk's matches
    expected = np.concatenate([cosines(query, states_of(backbone, QUERY, chunk)[1]) for chunk in chunks], 2)
    of_short = cosines(*states_of(backbone, "a", text_of(7)))
    assert min(np.abs(expected).max(), np.abs(of_short).max()) > 0.1
    for sizes in ({}, {"batch_size": 1}, {"max_batch_tokens": 30}, {"batch_size": 2}):
        matches = encode(scorer_of(backbone, "cedr-drmm", **sizes), [QUERY, "a"], [text, text_of(7)]).matches
        assert matches.values.shape == (2, 2 + 1, 4, 2 * CHUNK + 5)  # 2 layers and the embeddings
        np.testing.assert_allclose(matches.values[0], expected, atol=1e-5)
        np.testing.assert_allclose(matches.values[1, :, :1, :7], of_short, atol=1e-5)
        assert matches.window[0].tolist() == [0] * CHUNK + [1] * CHUNK + [2] * 5
        assert matches.window[1].tolist() == [0] * 7 + [-1] * (2 * CHUNK - 2)
    # The query's own states in the later chunks are others.
    second = cosines(*states_of(backbone, QUERY, chunks[1]))
    assert np.abs(second - expected[:, :, CHUNK : 2 * CHUNK]).max() > 1e-3


@pytest.mark.parametrize("layout", ["pair", "padded"])
def test_matches_are_zero_at_padding(backbone, layout):
    matches = encode(scorer_of(backbone, "cedr-knrm", layout=layout), QUERIES, TEXTS).matches
    assert matches.query_mask.sum(1).tolist() == [len(query.split()) for query in QUERIES]
    assert matches.document_mask.sum(1).tolist() == [len(text.split()) for text in TEXTS]
    real = matches.query_mask[:, None, :, None] & matches.document_mask[:, None, None, :]
    assert torch.equal(matches.values != 0, real.expand_as(matches.values))
    # A full query and a full window: nothing is padded, so that both layouts are the same input.
    query, text = [text_of(8, 9)], [text_of(CHUNK)]
    plain, fixed = (encode(scorer_of(backbone, "cedr-knrm", layout=x), query, text) for x in ("pair", "padded"))
    torch.testing.assert_close(plain.matches.values, fixed.matches.values, **CLOSE)


def test_cosines_are_fp32_in_low_precision(backbone):
    scorer = scorer_of(backbone, "cedr-knrm")
    seen = []
    match = scorer.head.match

    def spy(query, document, same):
        values = match(query, document, same)
        seen.append((query.dtype, document.dtype, values.dtype, torch.is_autocast_enabled("cpu")))
        real = array(query).any(-1)  # queries of other lengths are padded with zeros
        with np.errstate(invalid="ignore"):
            expected = cosines(query, document)
        np.testing.assert_allclose(values[real], expected[real], atol=1e-5)
        return values

    scorer.head.match = spy
    scorer.use(replace(scorer.settings, dtype_name="bfloat16"))
    scorer.score(QUERIES, TEXTS)
    assert set(seen) == {(torch.float32, torch.float32, torch.float32, False)}


def cosines_from(batch):
    """The same documents with matches from -1 to 1, where they had some from 0 to 1."""
    matches = batch.matches
    real = matches.query_mask[:, None, :, None] & matches.document_mask[:, None, None, :]
    return replace(batch, matches=replace(matches, values=torch.where(real, 2 * matches.values - 1, 0.0)))


def knrm(head, x, cls):
    features = []
    for mu, sigma in zip(array(head.means), array(head.widths), strict=True):
        for layer in x:
            features.append(
                sum(np.log(1e-6 + sum(np.exp(-((v - mu) ** 2) / (2 * sigma**2)) for v in row)) for row in layer)
            )
    return linear(np.concatenate([features, cls]), head.final)[0]


def pacrr(head, x, cls):
    _, queries, tokens = x.shape
    features = np.zeros((head.query_size, 3, head.top))
    for n, convolution in enumerate(head.ngrams, 1):
        weight, bias = array(convolution.weight), array(convolution.bias)
        padded = np.pad(x, ((0, 0), (0, n - 1), (0, n - 1)))
        for i in range(queries):
            best = [
                max(0.0, max((weight * padded[None, :, i : i + n, j : j + n]).sum((1, 2, 3)) + bias))
                for j in range(tokens)
            ]
            features[i, n - 1] = sorted([*best, *[0.0] * head.top], reverse=True)[: head.top]
    hidden = np.maximum(linear(np.concatenate([features.ravel(), cls]), head.hidden[0]), 0)
    return linear(np.maximum(linear(hidden, head.hidden[2]), 0), head.final)[0]


def drmm(head, x, cls):
    score = 0.0
    for i in range(x.shape[1]):
        # Ten bins of width 0.2 from -1 on, and one for exactly 1.
        counts = np.array([[np.sum(np.floor((row + 1) * 5) == b) for row in x[:, i]] for b in range(11)])
        features = np.concatenate([np.log(counts + 1e-5).ravel(), cls])
        score += linear(np.maximum(linear(features, head.hidden[0]), 0), head.final)[0]
    return score


def model1(head, x, cls):
    means = x[0].mean(1)
    return np.log((1 - head.smoothing) * means + head.smoothing * head.background).sum()


FORMULAS = {"cedr-knrm": knrm, "cedr-pacrr": pacrr, "cedr-drmm": drmm, "model1": model1}


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_of_token_heads_equal_their_formulas(name):
    batch = encoded() if name == "model1" else cosines_from(encoded())
    torch.manual_seed(0)
    head = build_head(name, H, channels=CHANNELS).eval()
    for _ in range(2):
        expected = [
            FORMULAS[name](head, array(document.matches.values[0]), array(document.cls[0]).mean(0))
            for document in documents_of(batch)
        ]
        np.testing.assert_allclose(array(head(batch)), expected, rtol=1e-4, atol=1e-4)
        assert np.std(expected) > 0.01
        for ngram in getattr(head, "ngrams", []):  # with these padding would be the best match of all
            ngram.bias.data.fill_(5.0)
            ngram.weight.data.abs_().neg_()


def test_translation_probabilities_equal_those_computed_in_numpy():
    torch.manual_seed(0)
    head = build_head("model1", 24, projection=6, units=8)
    for parameter in head.parameters():
        parameter.data.normal_()
    query, document = torch.randn(1, 3, 24), torch.randn(1, 5, 24)
    values = head.match(query, document, torch.zeros(1, 3, 5, dtype=torch.bool))[0]

    def project(e, norm, projection):
        e = (e - e.mean()) / np.sqrt(e.var() + norm.eps) * array(norm.weight) + array(norm.bias)
        return linear(np.tanh(e), projection)

    # F1 is one layer over [x_q; x_d; x_q * x_d].
    f1 = np.hstack([array(layer.weight) for layer in (head.from_query, head.from_document, head.from_product)])
    for i, e_q in enumerate(array(query)[0]):
        for j, e_d in enumerate(array(document)[0]):
            x_q = project(e_q, head.query_norm, head.query_projection)
            x_d = project(e_d, head.document_norm, head.document_projection)
            hidden = np.maximum(f1 @ np.concatenate([x_q, x_d, x_q * x_d]) + array(head.from_query.bias), 0)
            logit = linear(np.maximum(linear(hidden, head.hidden), 0), head.final)[0]
            assert values[i, j].item() == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-4)


def test_an_empty_document_has_the_background_probability(backbone):
    scorer = scorer_of(backbone, "model1", options={"smoothing": 0.2, "background": 1e-3})
    assert scorer.score([QUERY, ""], ["", "a cat"]).scores == pytest.approx([4 * np.log(0.2 * 1e-3), 0.0], rel=1e-5)


def test_self_translation_gives_equal_words_a_fixed_probability(backbone):
    plain, given = scorer_of(backbone, "model1"), scorer_of(backbone, "model1", options={"self_translation": 0.3})
    given.load_state_dict(plain.state_dict())
    text = "the cat in the snow"
    without, having = (encode(scorer, [QUERY], [text]).matches.values[0, 0] for scorer in (plain, given))
    same = torch.tensor([[q == d for d in text.split()] for q in QUERY.split()])
    assert same.sum() == 1 + 1 + 2  # snow, in, twice the
    torch.testing.assert_close(having, torch.where(same, torch.tensor(0.3), (1 - 0.3) * without))


@pytest.mark.parametrize("name", ["cedr-knrm", "cedr-drmm", "model1"])
def test_term_scores_add_up_to_the_score(backbone, name):
    scorer = scorer_of(backbone, name)
    scores, explanations = scorers.explained(scorer, QUERIES, TEXTS)
    rest = np.zeros(len(scores))
    if name == "cedr-knrm":
        encoded = encode(scorer, QUERIES, TEXTS)
        cls = array((encoded.cls * encoded.mask.unsqueeze(-1)).sum(1) / encoded.mask.sum(1, keepdim=True))
        rest = cls @ array(scorer.head.final.weight)[0, -32:] + scorer.head.final.bias.item()
    for query, score, other, explanation in zip(QUERIES, scores, rest, explanations, strict=True):
        assert [token for token, _ in explanation.term_scores] == query.split()
        assert sum(value for _, value in explanation.term_scores) == pytest.approx(score - other, rel=1e-4, abs=1e-4)


def test_knrm_starts_as_the_plain_ranker(cross_encoder, results, tmp_path):
    for other in (cross_encoder, tiny.checkpoint(tmp_path, seed=1)):
        plain = make("AvgP", other)
        started = make("CEDR-knrm", cross_encoder).start_from(plain)
        np.testing.assert_allclose(started(results)["score"], plain(results)["score"], atol=1e-5)
    plain, knrm = make("AvgP", cross_encoder), make("CEDR-knrm", cross_encoder)
    np.testing.assert_allclose(knrm(results)["score"], plain(results)["score"], atol=1e-5)
