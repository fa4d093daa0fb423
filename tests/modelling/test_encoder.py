"""How windows become passes: like lengths without padding, bounded memory, and what heads see of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.inputs import Settings
from pyterrier_longdoc.modelling.windows import SlidingWindows

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QUIET, forget, make, scores
from .test_model import CLOSE, QUERIES, TEXTS
from .test_model import make as make_scorer

pytestmark = QUIET
READING = Settings(SlidingWindows(20, 10), batch_size=6)


@pytest.fixture(scope="module")
def encoder(backbone) -> WindowEncoder:
    encoder = WindowEncoder(backbone).eval()
    encoder.use(READING, "cls")
    return encoder


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60).map(sorted),
    limit=st.integers(1, 60),
    exact_run=st.sampled_from([None, 1, 4]),
)
def test_passes_are_all_rows_in_order_and_within_the_limits(encoder, lengths, limit, exact_run):
    encoder.settings = replace(READING, max_batch_tokens=limit)
    rows = encoder.divide(lengths, range(len(lengths)), exact_run=exact_run)
    passes = [[lengths[i] for i in numbers] for numbers in rows]
    encoder.settings = READING
    assert [length for rows in passes for length in rows] == lengths
    assert all(len(rows) <= 6 and (len(rows) == 1 or len(rows) * max(rows) <= limit) for rows in passes)
    if exact_run:
        mixed = [rows for rows in passes if len(set(rows)) > 1]
        assert all(lengths.count(length) < exact_run for rows in mixed for length in rows)


def test_running_out_of_memory_names_the_arguments_to_lower(monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    jina, short = tiny_long.list_encoder(tmp_path), ["snow"]
    for model, texts, message in [
        (make("MaxP"), ["a", "cat", "dog", "sun"], r"2 windows .* lower max_batch_tokens or batch_size"),
        (make("MaxP"), short, r"one window of 5 tokens: .*window_size="),
        (make("AvgP", windows=ld.Truncate(9), window_size=None), short, r"one window of 5 tokens: .*windows="),
        (make("LongP"), short, r"one window of 5 tokens: .*max_doc_len="),
        (ld.ListReranker(jina, max_doc_len=64, max_query_len=8, device="cpu"), short, r"one list .*block_size"),
    ]:
        monkeypatch.setattr(model.model.encoder.backbone, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError, match=message):
            model(tiny.frame(["cat"], texts))


def test_a_pass_that_does_not_fit_into_memory_is_halved_once(backbone, monkeypatch):
    model = make_scorer(backbone)
    queries, texts = ["cat"] * 4, ["snow", "cat snow", "the cat", "a snow cat sat"]
    expected = model.score(queries, texts).scores
    forward, sizes = model.encoder.backbone.forward, []

    def small(*args, **kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.encoder.backbone, "forward", small)
    fits = 2
    np.testing.assert_allclose(model.score(queries, texts).scores, expected, atol=1e-6)
    assert sizes == [4, 2, 2]
    fits = 1
    with pytest.raises(torch.OutOfMemoryError, match="happened with 2 windows"):
        model.score(queries, texts)


def test_equal_windows_are_encoded_once(encoder, backbone):
    coverage = Coverage()
    queries = [np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)]
    windows = [np.arange(8, 8 + size, dtype=np.int32) for size in (3, 9, 3, 5)]
    inputs = [encoder.reader.assemble(query, window) for query in queries for window in windows]
    with torch.inference_mode():
        vectors = encoder.vectors(inputs, coverage)
        alone = [encoder.vectors([one]) for one in inputs]
    once = sum(3 + len(q) + size for q in queries for size in (3, 9, 5))
    assert coverage.tokens_encoded == once
    torch.testing.assert_close(vectors, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert torch.equal(vectors[0], vectors[2])
    encoder.vectors(inputs[:4], coverage)  # with gradients, for dropout
    assert coverage.tokens_encoded - once == sum(3 + 2 + size for size in (3, 9, 3, 5))


@pytest.mark.parametrize(
    ("name", "size", "stride"), [("MaxP", 150, 100), ("BiEncoder-max", None, None), ("MaxSim", None, None)]
)
def test_one_long_sentence_does_not_make_all_windows_long(name, size, stride):
    words = tiny.WORDS
    model = make(name, windows=ld.SentenceWindows(max_sentences=1), window_size=size, stride=stride)
    short = " ".join(f"{words[i % 47]} {words[i // 47]}." for i in range(90))
    text = short + " " + " ".join(words[:40]) + ". " + short.replace(".", " cat.")
    frame = tiny.frame(["old dog"], [text, "a cat."])
    expected = scores(model, frame)
    forget(model)
    model.max_batch_tokens = 500
    passes = Passes(model.model)
    np.testing.assert_allclose(scores(model, frame), expected, rtol=1e-5)
    assert model.coverage.windows > 180
    tokens = [windows * length for windows, length in passes.shapes]
    assert sum(tokens) > 1000
    assert max(tokens) <= 500


@pytest.mark.parametrize(("labels", "batch_size"), [(None, 1), (1, 64)], ids=["encoder", "cross-encoder"])
def test_query_states_are_those_of_the_first_window(labels, batch_size):
    loaded = load_backbone(tiny.encoder(labels))
    scorer = make_scorer(loaded, "parade-transformer-query", batch_size=batch_size)
    with torch.no_grad():
        encoded, _ = scorer.compute(scorer.read(QUERIES, TEXTS))
        for i, (query, text) in enumerate(zip(QUERIES, TEXTS, strict=True)):
            pair = [(query, " ".join(text.split()[:20]))]  # in a list, or an empty text would count as none
            inputs = scorer.tokenizer(pair, return_tensors="pt")
            states = loaded.model(**inputs).last_hidden_state[0, 1 : 1 + len(query.split())]
            if labels is not None:
                states = loaded.representation(states)
            assert encoded.query.mask[i].sum() == len(query.split())
            torch.testing.assert_close(encoded.query.states[i, : len(states)], states, **CLOSE)
            assert (encoded.query.states[i, len(states) :] == 0).all()


def test_coverage_counts_computed_tokens_and_padding():
    model = make("MaxP", stride=20)
    frame = tiny.frame(["old dog"], ["the cat and dog", " ".join(tiny.WORDS[:10]), " ".join(tiny.WORDS[:45])])
    model(frame)
    # Query and special tokens are 2 + 3; windows have 4, 5, 10, 20 and 20 tokens: one pass of 25 by 5.
    assert model.coverage.tokens_encoded == 5 * (2 + 3) + 4 + 5 + 10 + 20 + 20
    assert model.coverage.tokens_computed == 5 * 25
    assert model.coverage.padding == pytest.approx(1 - 84 / 125)
    assert "125 tokens computed in float32, 32.8% of them padding" in str(model.coverage)
    model.batch_size = 1
    model(frame)
    assert (model.coverage.tokens_computed, model.coverage.padding) == (84, 0.0)
    model.layout = "padded"  # the fixed layout's padding counts, too
    model(frame.head(1))
    assert (model.coverage.tokens_encoded, model.coverage.tokens_computed) == (2 + 4 + 3, 8 + 20 + 3)
