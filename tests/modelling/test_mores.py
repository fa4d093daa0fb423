"""MORES+: a document's own windows and no other's, a decoder that looks both ways, what is remembered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.batching import Encoded
from pyterrier_longdoc.training import TrainingArgs

from ..modelling.test_heads import gelu, layer_norm, linear, softmax
from ..modelling.test_late_interaction import CLOSE, LONG, encoded  # noqa: F401 - a fixture
from ..support import tiny
from ..support.systems import SLIDING, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]


@pytest.fixture
def scorer():
    return make("MORESPlus", "").load_scorer()


# The formula, in numpy.


def array(parameter) -> np.ndarray:
    return parameter.detach().double().numpy()


def attend(attention, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """BART's attention of every row of `x` over every row of `memory`."""
    q, k, v = linear(x, attention.q_proj), linear(memory, attention.k_proj), linear(memory, attention.v_proj)
    heads = np.split(np.arange(x.shape[1]), attention.num_heads)
    mixed = [softmax((q[:, h] @ k[:, h].T / np.sqrt(len(h))).T).T @ v[:, h] for h in heads]
    return linear(np.hstack(mixed), attention.out_proj)


def embed(part, words, ids: list[int]) -> np.ndarray:
    positions = array(part.embed_positions.weight)[np.arange(len(ids)) + 2]
    return layer_norm(array(words)[ids] + positions, part.layernorm_embedding)


def by_hand(scorer, query: str, windows: list[str]) -> float:
    encoder, decoder, tokenizer = scorer.encoder.backbone, scorer.decoder, scorer.tokenizer
    words = encoder.embed_tokens.weight
    memory = []
    for window in windows:
        x = embed(encoder, words, tokenizer(window)["input_ids"])
        for layer in encoder.layers:
            x = layer_norm(x + attend(layer.self_attn, x, x), layer.self_attn_layer_norm)
            x = layer_norm(x + linear(gelu(linear(x, layer.fc1)), layer.fc2), layer.final_layer_norm)
        memory.append(x)
    memory = np.vstack(memory)
    x = embed(decoder, words, tokenizer(query)["input_ids"])
    for layer in decoder.layers:
        x = layer_norm(x + attend(layer.self_attn, x, x), layer.self_attn_layer_norm)
        x = layer_norm(x + attend(layer.encoder_attn, x, memory), layer.encoder_attn_layer_norm)
        x = layer_norm(x + linear(gelu(linear(x, layer.fc1)), layer.fc2), layer.final_layer_norm)
    vector = np.tanh(linear(x[-1], scorer.representation.dense))
    return float(linear(vector, scorer.head.final)[0])


def windows_of(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[a : a + 20]) for a in range(0, max(1, len(words) - 10), 10)]


def test_formula(scorer):
    queries = ["old dog", "", "snow in the city by the river", "old dog"]
    texts = [LONG, LONG, "a short dog", ""]
    expected = [by_hand(scorer, query, windows_of(text)) for query, text in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(scorer.score(queries, texts).scores, expected, **CLOSE)
    np.testing.assert_allclose(scorer(queries, texts).detach(), expected, **CLOSE)


def test_documents_do_not_mix(scorer):
    # Several windows each, and several documents in a batch: where the papers' code went wrong.
    query, texts = "old dog", [LONG, "a short dog", " ".join(reversed(LONG.split())), "snow " * 33]
    alone = [scorer.score([query], [text]).scores[0] for text in texts]
    np.testing.assert_allclose(scorer.score([query] * 4, texts).scores, alone, **CLOSE)
    for i in range(4):
        others = [text if i == j else "rain" for j, text in enumerate(texts)]
        np.testing.assert_allclose(scorer([query] * 4, others)[i].item(), alone[i], **CLOSE)
    assert len(set(np.round(alone, 4))) == 4


def test_the_decoder_looks_both_ways(scorer):
    seen = []
    hook = scorer.decoder.layers[0].self_attn.register_forward_hook(lambda _, __, out: seen.append(out[0][0, 0]))
    scorer.score(["old dog"], ["snow"]).scores
    scorer.score(["old fish"], ["snow"]).scores
    hook.remove()
    assert (seen[0] - seen[1]).abs().max() > 1e-3  # the first token's state changes with a later token


def test_windows_are_encoded_once_for_all_queries(scorer, encoded):  # noqa: F811
    pairs = [(query, text) for query in ("old dog", "snow", "river") for text in (LONG, "a short dog")]
    expected = scorer.score(*zip(*pairs, strict=True)).scores
    assert encoded == [4 + 1]
    np.testing.assert_array_equal(scorer.score(*zip(*pairs, strict=True)).scores, expected)
    assert encoded == [5]


def test_explanation_scores_each_window_alone(scorer):
    _, explanations = explained(scorer, ["old dog"] * 2, [LONG, "a short dog"])
    for text, explanation in zip((LONG, "a short dog"), explanations, strict=True):
        expected = [scorer.score(["old dog"], [window]).scores[0] for window in windows_of(text)]
        np.testing.assert_allclose(explanation.scores, expected, **CLOSE)
    with pytest.raises(TypeError, match="only documents that this scorer has encoded"):
        scorer._explain(Encoded(torch.zeros(1, 1, 32), torch.ones(1, 1, dtype=torch.bool)))


def test_gradients_reach_every_parameter(scorer):
    scorer(["old dog", "snow in the city"], [LONG, "a short dog"]).square().sum().backward()
    without = {name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert {name for name in without if not name.endswith("k_proj.bias")} == set()


def test_fixed_layout():
    scorer = make("MORESPlus", "", pad_query=True).load_scorer()
    queries, texts = ["old dog", "snow in the city"], [LONG, "a short dog"]
    alone = [scorer.score([q], [t]).scores[0] for q, t in zip(queries, texts, strict=True)]
    np.testing.assert_allclose(scorer.score(queries, texts).scores, alone, **CLOSE)


def test_start_from_takes_over_the_decoder(results):
    trained, model = make("MORESPlus", ""), make("MORESPlus", "", seed=9)
    weights = trained.load_scorer()
    with torch.no_grad():
        for parameter in weights.decoder.parameters():
            parameter.mul_(1.1)
    assert not np.isclose(model(results)["score"], trained(results)["score"], **CLOSE).any()
    np.testing.assert_allclose(model.start_from(trained)(results)["score"], trained(results)["score"], **CLOSE)


def test_learning_rates(scorer):
    recipe = make("MORESPlus", "")._default_training()
    assert recipe == TrainingArgs(learning_rates={"encoder.": 1e-5, "decoder.": 1e-5, "": 1e-4})
    assert {name.split(".")[0] for name, _ in scorer.named_parameters()} == {
        "encoder",
        "decoder",
        "representation",
        "head",
    }


def test_it_says_that_it_is_experimental(results, tmp_path):
    model = make("MORESPlus", "")
    with pytest.warns(ld.ExperimentalWarning, match="MORESPlus is experimental"):
        model(results)
    model.save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * 4 * sum(
        p.numel() for p in model.load_scorer().parameters()
    )


def test_other_checkpoints_are_refused(cross_encoder, results):
    with pytest.raises(ValueError, match=r"is of type 'bert'; MORES\+ needs 'bart'"):
        ld.MORESPlus(cross_encoder, **SLIDING)(results)
    with pytest.raises(ValueError, match="trust_remote_code would have no effect"):
        ld.MORESPlus(tiny.bart(), trust_remote_code=True, **SLIDING)(results)
    with pytest.raises(ValueError, match="max_query_len=127 leaves no room"):
        ld.MORESPlus(tiny.bart(), max_query_len=127)(results)
