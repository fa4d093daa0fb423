"""How windows become passes: like lengths without padding, bounded memory, and what of it is reported."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.modelling import encoder as microbatches
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, WindowEncoder, micro_batches

from ..support import tiny
from ..support.systems import SLIDING, SMALL, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]


@pytest.fixture(scope="module")
def encoder(cross_encoder) -> WindowEncoder:
    return WindowEncoder(load_backbone(cross_encoder), batch_size=6)


def divided(encoder, lengths, **options) -> list[list[int]]:
    """The lengths in each pass."""
    return [
        [lengths[i] for i in rows.tolist()] for rows in encoder.passes(lengths, torch.arange(len(lengths)), **options)
    ]


def test_long_runs_of_one_length_are_not_padded(encoder):
    lengths = [3, 5, 5, 5, 7, 7, 7, 7, 7, 7, 7, 9, 11, 11, 11, 11, 12]
    assert divided(encoder, lengths, exact_run=4) == [[3, 5, 5, 5], [7] * 6, [7], [9], [11] * 4, [12]]
    assert divided(encoder, lengths) == [[3, 5, 5, 5, 7, 7], [7, 7, 7, 7, 7, 9], [11, 11, 11, 11, 12]]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60).map(sorted),
    limit=st.integers(1, 60),
    exact_run=st.sampled_from([None, 1, 4]),
)
@settings(max_examples=100, deadline=None)
def test_passes_are_all_rows_in_order_and_within_the_limits(encoder, lengths, limit, exact_run):
    encoder.max_batch_tokens = limit
    try:
        passes = divided(encoder, lengths, exact_run=exact_run)
    finally:
        encoder.max_batch_tokens = None
    assert [length for rows in passes for length in rows] == lengths
    assert all(len(rows) <= 6 and (len(rows) == 1 or len(rows) * max(rows) <= limit) for rows in passes)
    if exact_run:
        mixed = [rows for rows in passes if len(set(rows)) > 1]
        assert all(lengths.count(length) < exact_run for rows in mixed for length in rows)


def test_default_limits(encoder):
    assert encoder.batch_tokens == CPU_BATCH_TOKENS == 2048
    elsewhere = WindowEncoder(load_backbone(tiny.aggregator())).to("meta")
    assert elsewhere.batch_tokens == GPU_BATCH_TOKENS == 16384
    elsewhere.affordable_tokens = 100
    assert elsewhere.batch_tokens == 100
    elsewhere.max_batch_tokens = 50
    assert elsewhere.batch_tokens == 50


def test_models_of_earlier_versions_keep_their_limit(cross_encoder, results, tmp_path):
    folder = tmp_path / "saved"
    model = ld.MaxP(cross_encoder, max_batch_tokens=16384, **SLIDING)
    expected = model(results)["score"]
    model.save(folder)
    loaded = ld.MaxP.load(folder)
    assert loaded.max_batch_tokens == 16384
    assert ld.MaxP.load(folder, max_batch_tokens=None).load_scorer().encoder.batch_tokens == 2048
    np.testing.assert_allclose(loaded(results)["score"], expected, rtol=1e-6)


def test_full_windows_need_no_mask(cross_encoder):
    model = make("MaxP", cross_encoder)
    masks = []
    model.load_scorer().encoder.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    # Full windows of 20 tokens, and one of 15, 15 and 17 each.
    texts = [" ".join(tiny.WORDS[i * (n + 1) % 47] for i in range(n)) for n in (95, 75, 57)]
    model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": list("abc"), "text": texts}))
    assert [mask is not None for mask in masks] == [True, False]
    masks.clear()
    model.dtype = "bfloat16"  # in which a mask costs more than a pass of one window
    model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": list("abc"), "text": texts}))
    assert masks == [None, None, None]


# Equal windows, and long documents beside short ones.


def encode(encoder, layout, pairs):
    with torch.inference_mode():
        return microbatches.encode_distinct(encoder, layout, *map(list, zip(*pairs, strict=True)))


def test_equal_windows_are_encoded_once(cross_encoder):
    backbone = load_backbone(cross_encoder)
    encoder, layout = WindowEncoder(backbone).eval(), backbone.pair_layout()
    queries = [np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)]
    windows = [np.arange(8, 8 + size, dtype=np.int32) for size in (3, 9, 3, 5)]
    pairs = [(query, window) for query in queries for window in windows]
    vectors = encode(encoder, layout, pairs)
    assert encoder.take_counts()[0] == sum(3 + len(q) + size for q in queries for size in (3, 9, 5))
    alone = torch.cat([encode(encoder, layout, [pair]) for pair in pairs])
    torch.testing.assert_close(vectors, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(vectors[0], vectors[2])
    encoder.take_counts()
    microbatches.encode_distinct(encoder, layout, [queries[0]] * 4, windows)  # with gradients, for dropout
    assert encoder.take_counts()[0] == sum(3 + 2 + size for size in (3, 9, 3, 5))


def test_scores_do_not_depend_on_micro_batches(cross_encoder, results, monkeypatch):
    expected = make("PARADE-attn", cross_encoder)(results)["score"]
    for tokens in (1, 70):
        monkeypatch.setattr(microbatches, "MICRO_TOKENS", tokens)
        np.testing.assert_allclose(make("PARADE-attn", cross_encoder)(results)["score"], expected, rtol=1e-5)


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=80), most=st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_micro_batches_are_bounded(lengths, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatches, "MICRO_TOKENS", most)
        parts = list(micro_batches(lengths))
    order = [i for part in parts for i in part]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths)
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= most for part in parts)


@pytest.fixture
def cells(monkeypatch) -> list[int]:
    """The tokens, padding included, of each batch that is laid out."""
    counts = []
    collate = microbatches.PairLayout.collate

    def spy(layout, queries, windows, device="cpu"):
        batch = collate(layout, queries, windows, device)
        counts.append(batch.input_ids.numel())
        return batch

    monkeypatch.setattr(microbatches.PairLayout, "collate", spy)
    return counts


@pytest.mark.parametrize("name", ["MaxP", "PARADE-attn"])
def test_a_document_of_20_000_words_among_others(name, cross_encoder, results, cells, monkeypatch):
    monkeypatch.setattr(microbatches, "MICRO_TOKENS", 2000)
    words = np.random.default_rng(0).choice(tiny.WORDS, 20_000)
    huge = pd.DataFrame({"qid": "1", "query": "old dog", "docno": "huge", "text": [" ".join(words)]})
    model = make(name, cross_encoder, stride=20)
    without, alone = model(results)["score"], model(huge)["score"]
    cells.clear()
    scores = model(pd.concat([results[:2], huge, results[2:]]))["score"].to_numpy()
    np.testing.assert_allclose(np.delete(scores, 2), without, rtol=1e-5)
    np.testing.assert_allclose(scores[2], alone, rtol=1e-5)
    assert sum(cells) > 20_000
    assert max(cells) <= 2000


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder", "MORESPlus"])
def test_one_long_sentence_does_not_make_all_windows_long(name, cross_encoder, plain_encoder, cells, monkeypatch):
    monkeypatch.setattr(microbatches, "MICRO_TOKENS", 500)
    backbone = {"MaxP": cross_encoder, "BiEncoder": plain_encoder, "MORESPlus": tiny.bart()}[name]
    model = getattr(ld, name)(backbone, windows=ld.SentenceWindows(max_sentences=1), **SMALL)
    words = tiny.WORDS
    short = " ".join(f"{words[i % 47]} {words[i // 47]}." for i in range(90))
    text = short + " " + " ".join(words[:40]) + ". " + short.replace(".", " cat.")
    model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": ["d1", "d2"], "text": [text, "a cat."]}))
    assert model.coverage.windows > 180
    assert max(cells) <= 500


def test_memory_grows_with_the_tokens_alone(cross_encoder):
    """Peak of numpy and Python objects for one long document beside short ones, all of them cut into sentences."""
    backbone = load_backbone(cross_encoder)
    layout = backbone.pair_layout()
    encoder = WindowEncoder(backbone).eval()
    encoder._encode = lambda batch, rows, all_layers: ((torch.zeros(len(rows), 1, 32),), batch.attention_mask[rows])
    encoder.representation = torch.nn.Identity()
    query = np.array([5], dtype=np.int32)

    def peak(sentences: int) -> int:
        windows = [np.arange(i % 97, i % 97 + 9, dtype=np.int32) * 31 % 1000 + i // 97 for i in range(sentences)]
        windows.append(np.arange(110, dtype=np.int32))
        tracemalloc.start()
        try:
            with torch.inference_mode():
                microbatches.encode_distinct(encoder, layout, [query] * len(windows), windows)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatches, "MICRO_TOKENS", 2000)
        small, large = peak(300), peak(3000)
    # Padded to the longest, 3,000 windows of 114 tokens take 17 bytes a token, 5.8 MB.
    assert large < 3000 * 114 * 17 / 2
    assert large < 11 * small


# What is reported.


def test_padding_with_known_numbers(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=20, stride=20, **SMALL)
    texts = ["the cat and dog", " ".join(tiny.WORDS[:10]), " ".join(tiny.WORDS[:45])]
    model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": list("abc"), "text": texts}))
    # Query and special tokens are 2 + 3; windows have 4, 5, 10, 20 and 20 tokens: one pass of 25 by 5.
    assert model.coverage.tokens_encoded == 5 * (2 + 3) + 4 + 5 + 10 + 20 + 20
    assert model.coverage.tokens_computed == 5 * 25
    assert model.coverage.padding == pytest.approx(1 - 84 / 125)
    assert str(model.coverage).endswith("; 125 tokens computed in float32, 32.8% of them padding")
    assert model.coverage.as_dict()["padding"] == model.coverage.padding
    model.batch_size = 1
    model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": list("abc"), "text": texts}))
    assert (model.coverage.tokens_computed, model.coverage.padding) == (84, 0.0)


def test_the_fixed_layouts_padding_counts(cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=20, stride=20, pad_query=True, **SMALL)
    model(pd.DataFrame({"qid": ["1"], "query": ["old dog"], "docno": ["a"], "text": ["the cat and dog"]}))
    assert (model.coverage.tokens_encoded, model.coverage.tokens_computed) == (2 + 4 + 3, 8 + 20 + 3)


def test_padding_of_bi_encoders_and_of_what_they_remember(tmp_path):
    model = ld.BiEncoder(tiny.checkpoint(tmp_path, labels=None), window_size=20, stride=20, **SMALL)
    frame = pd.DataFrame({"qid": "1", "query": "old dog", "docno": ["a", "b"], "text": ["the cat", "snow in the city"]})
    model(frame)
    assert (model.coverage.tokens_encoded, model.coverage.tokens_computed) == (4 + 4 + 6, 4 + 2 * 6)
    assert model.coverage.padding == pytest.approx(1 - 14 / 16)
    model(frame)
    assert (model.coverage.tokens_computed, model.coverage.padding) == (0, 0.0)


def test_coverage_of_nothing():
    assert Coverage().padding == 0.0
    assert Coverage().as_dict()["dtype"] is None
    assert "padding" not in str(Coverage())
