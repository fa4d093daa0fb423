"""How windows become passes: like lengths without padding, bounded memory, and what heads see of them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.common.coverage import Coverage, Work
from pyterrier_longdoc.modelling import encoder as encoder_module
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.batching import PairLayout
from pyterrier_longdoc.modelling.encoder import WindowEncoder, micro_batches
from pyterrier_longdoc.modelling.settings import Settings
from pyterrier_longdoc.modelling.windows import SlidingWindows

from ..support import tiny
from ..support.scorers import Passes
from ..support.systems import QUIET, make, scores
from .test_scorer import CLOSE, QUERIES, TEXTS, text_of
from .test_scorer import make as make_scorer

pytestmark = QUIET
READING = Settings(SlidingWindows(20, 10), batch_size=6)


@pytest.fixture(scope="module")
def encoder(backbone) -> WindowEncoder:
    return WindowEncoder(backbone).eval()


# Passes.


def divided(encoder, lengths, reading=READING, **options) -> list[list[int]]:
    """The lengths in each pass."""
    passes = encoder.divided(lengths, torch.arange(len(lengths)), reading, **options)
    return [[lengths[i] for i in rows.tolist()] for rows in passes]


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
    passes = divided(encoder, lengths, replace(READING, max_batch_tokens=limit), exact_run=exact_run)
    assert [length for rows in passes for length in rows] == lengths
    assert all(len(rows) <= 6 and (len(rows) == 1 or len(rows) * max(rows) <= limit) for rows in passes)
    if exact_run:
        mixed = [rows for rows in passes if len(set(rows)) > 1]
        assert all(lengths.count(length) < exact_run for rows in mixed for length in rows)


def test_default_limits(encoder):
    def largest(affordable=10**9, **changes) -> int:
        encoder.affordable_tokens = affordable
        try:
            return max(map(sum, divided(encoder, [8] * 5000, replace(READING, batch_size=5000, **changes))))
        finally:
            encoder.affordable_tokens = 10**9

    elsewhere = torch.device("meta")
    assert largest() == 2048
    assert largest(device=elsewhere) == 16384
    assert largest(device=elsewhere, affordable=104) == 104
    assert largest(device=elsewhere, affordable=104, max_batch_tokens=56) == 56


def test_full_windows_need_no_mask():
    model = make("MaxP")
    passes = Passes(model.load_scorer())
    # Full windows of 20 tokens, and one of 15, 15 and 17 each.
    texts = [" ".join(tiny.WORDS[i * (n + 1) % 47] for i in range(n)) for n in (95, 75, 57)]
    frame = tiny.frame(["old dog"], texts)
    model(frame)
    assert ["attention_mask" in inputs for inputs in passes.inputs] == [True, False]
    passes.inputs.clear()
    model.dtype = "bfloat16"  # in which a mask costs more than a pass of one window
    model(frame)
    assert ["attention_mask" in inputs for inputs in passes.inputs] == [False, False, False]


# Where memory runs out.


def out_of_memory_beyond(limit, model, monkeypatch, error) -> list[int]:
    """Lets the backbone run out of memory in passes of more than so many tokens; the sizes of those that succeed."""
    sizes, forward = [], model.encoder.backbone.forward

    def spy(*args, **kwargs):
        if kwargs["input_ids"].numel() > limit:
            raise error
        sizes.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.encoder.backbone, "forward", spy)
    return sizes


MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize(("head", "error"), zip(["maxp", "cedr-knrm"], MEMORY_ERRORS, strict=True))
def test_smaller_passes_where_memory_runs_out(backbone, head, error, monkeypatch, caplog):
    queries, texts = ["cat tree", "snow"] * 10, [text_of(5 + 7 * i, i) for i in range(20)]
    expected = make_scorer(backbone, head).score(queries, texts).scores
    model = make_scorer(backbone, head)
    sizes = out_of_memory_beyond(200, model, monkeypatch, error)
    np.testing.assert_allclose(model.score(queries, texts).scores, expected, atol=1e-5)
    assert max(sizes) <= 200
    limit = model.encoder.affordable_tokens
    assert f"from now on a pass has at most {limit} tokens; max_batch_tokens={limit}" in caplog.text
    caplog.clear()
    model.score(queries, texts)
    assert "memory ran out" not in caplog.text


def test_what_smaller_passes_cannot_help_is_an_error(backbone, monkeypatch):
    model = make_scorer(backbone)
    texts = [text_of(40, i) for i in range(3)]
    out_of_memory_beyond(5, model, monkeypatch, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        model.score(["cat"] * 3, texts)
    out_of_memory_beyond(5, model, monkeypatch, MEMORY_ERRORS[0])
    with pytest.raises(torch.OutOfMemoryError):
        model(["cat"] * 3, texts)  # a training's graph stays
    with pytest.raises(torch.OutOfMemoryError):
        model.score(["cat"], texts[:1])  # a single window


# Equal windows, and long documents beside short ones.


def encode(encoder, layout, pairs, work=None):
    with torch.inference_mode():
        return encoder.vectors(*map(list, zip(*pairs, strict=True)), layout, READING, work)


def test_equal_windows_are_encoded_once(encoder, backbone):
    layout, work = backbone.pair_layout(), Work(Coverage())
    queries = [np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)]
    windows = [np.arange(8, 8 + size, dtype=np.int32) for size in (3, 9, 3, 5)]
    pairs = [(query, window) for query in queries for window in windows]
    vectors = encode(encoder, layout, pairs, work)
    once = sum(3 + len(q) + size for q in queries for size in (3, 9, 5))
    assert work.coverage.tokens_encoded == once
    alone = torch.cat([encode(encoder, layout, [pair]) for pair in pairs])
    torch.testing.assert_close(vectors, alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(vectors[0], vectors[2])
    encoder.vectors([queries[0]] * 4, windows, layout, READING, work)  # with gradients, for dropout
    assert work.coverage.tokens_encoded - once == sum(3 + 2 + size for size in (3, 9, 3, 5))


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=80), most=st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_micro_batches_are_bounded(lengths, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "MICRO_TOKENS", most)
        parts = list(micro_batches(lengths))
    order = [i for part in parts for i in part]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths)
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= most for part in parts)


@pytest.fixture
def cells(monkeypatch) -> list[int]:
    """The tokens, padding included, of each batch that is laid out."""
    counts = []
    collate = PairLayout.collate

    def spy(layout, queries, windows, device="cpu"):
        batch = collate(layout, queries, windows, device)
        counts.append(batch.input_ids.numel())
        return batch

    monkeypatch.setattr(PairLayout, "collate", spy)
    return counts


@pytest.mark.parametrize("name", ["MaxP", "BiEncoder-max", "MORESPlus"])
def test_one_long_sentence_does_not_make_all_windows_long(name, cells, monkeypatch):
    words, size = tiny.WORDS, None if name.startswith("Bi") else 150
    model = make(name, windows=ld.SentenceWindows(max_sentences=1), window_size=size, stride=100)
    short = " ".join(f"{words[i % 47]} {words[i // 47]}." for i in range(90))
    text = short + " " + " ".join(words[:40]) + ". " + short.replace(".", " cat.")
    frame = tiny.frame(["old dog"], [text, "a cat."])
    expected = scores(model, frame)
    cells.clear()
    forget_embeddings()
    monkeypatch.setattr(encoder_module, "MICRO_TOKENS", 500)
    np.testing.assert_allclose(scores(model, frame), expected, rtol=1e-5)
    assert model.coverage.windows > 180
    assert sum(cells) > 1000
    assert max(cells) <= 500


def test_memory_grows_with_the_tokens_alone(backbone, monkeypatch):
    """Peak of numpy and Python objects for one long document beside short ones, all of them cut into sentences."""

    def nothing(encoder, batch, rows, all_layers):
        return (torch.zeros(len(rows), 1, 32),), batch.attention_mask[rows], 0

    monkeypatch.setattr(WindowEncoder, "_encode", nothing)
    monkeypatch.setattr(encoder_module, "MICRO_TOKENS", 2000)
    encoder, query = WindowEncoder(backbone).eval(), np.array([5], dtype=np.int32)

    def peak(sentences: int) -> int:
        windows = [np.arange(i % 97, i % 97 + 9, dtype=np.int32) * 31 % 1000 + i // 97 for i in range(sentences)]
        windows.append(np.arange(110, dtype=np.int32))
        tracemalloc.start()
        try:
            encode(encoder, backbone.pair_layout(), [(query, window) for window in windows])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(300), peak(3000)
    # Padded to the longest, 3,000 windows of 114 tokens take 17 bytes a token, 5.8 MB.
    assert large < 3000 * 114 * 17 / 2
    assert large < 11 * small


# What heads see.


@pytest.mark.parametrize(("labels", "batch_size"), [(None, 1), (1, 64)], ids=["encoder", "cross-encoder"])
def test_query_states_are_those_of_the_first_window(labels, batch_size):
    loaded = load_backbone(tiny.encoder(labels))
    scorer = make_scorer(loaded, "parade-transformer-query", batch_size=batch_size)
    with torch.no_grad():
        encoded = scorer.encode(scorer.read(QUERIES, scorer.read_queries(QUERIES), scorer.tokenize(TEXTS)))
        for i, (query, text) in enumerate(zip(QUERIES, TEXTS, strict=True)):
            pair = [(query, " ".join(text.split()[:20]))]  # in a list, or an empty text would count as none
            inputs = scorer.tokenizer(pair, return_tensors="pt")
            states = loaded.model(**inputs).last_hidden_state[0, 1 : 1 + len(query.split())]
            if labels is not None:
                states = loaded.representation(states)
            assert encoded.query.mask[i].sum() == len(query.split())
            torch.testing.assert_close(encoded.query.states[i, : len(states)], states, **CLOSE)
            assert (encoded.query.states[i, len(states) :] == 0).all()


def test_pooling_takes_the_real_tokens(backbone):
    encoder = WindowEncoder(backbone)
    states = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    for pooling, expected in {
        "cls": [states[0, 0], states[1, 0]],
        "last": [states[0, 1], states[1, 2]],
        "mean": [states[0, :2].mean(0), states[1, [0, 2]].mean(0)],
    }.items():
        encoder.pooling = pooling
        assert torch.equal(encoder._pool(states, mask), torch.stack(expected))
    # bfloat16 cannot count beyond 256 tokens.
    states = torch.tensor([1.0, 3.0, 1.0] * 167 + [100.0] * 9, dtype=torch.bfloat16).view(1, -1, 1)
    mask = torch.arange(510).unsqueeze(0) < 501
    assert encoder._pool(states, mask).item() == pytest.approx((1 + 3 + 1) / 3, rel=1e-5)


# What is reported.


def test_padding_with_known_numbers():
    model = make("MaxP", stride=20)
    frame = tiny.frame(["old dog"], ["the cat and dog", " ".join(tiny.WORDS[:10]), " ".join(tiny.WORDS[:45])])
    model(frame)
    # Query and special tokens are 2 + 3; windows have 4, 5, 10, 20 and 20 tokens: one pass of 25 by 5.
    assert model.coverage.tokens_encoded == 5 * (2 + 3) + 4 + 5 + 10 + 20 + 20
    assert model.coverage.tokens_computed == 5 * 25
    assert model.coverage.padding == pytest.approx(1 - 84 / 125)
    assert str(model.coverage).endswith("; 125 tokens computed in float32, 32.8% of them padding")
    assert model.coverage.as_dict()["padding"] == model.coverage.padding
    model.batch_size = 1
    model(frame)
    assert (model.coverage.tokens_computed, model.coverage.padding) == (84, 0.0)
    model.layout = "padded"  # the fixed layout's padding counts, too
    model(frame.head(1))
    assert (model.coverage.tokens_encoded, model.coverage.tokens_computed) == (2 + 4 + 3, 8 + 20 + 3)


def test_padding_of_bi_encoders_and_of_what_they_remember():
    model, frame = make("BiEncoder-max"), tiny.frame(["old dog"], ["the cat", "snow in the city"])
    forget_embeddings()
    model(frame)
    assert (model.coverage.tokens_encoded, model.coverage.tokens_computed) == (4 + 4 + 6, 4 + 2 * 6)
    assert model.coverage.padding == pytest.approx(1 - 14 / 16)
    model(frame)
    assert (model.coverage.tokens_computed, model.coverage.padding) == (0, 0.0)
