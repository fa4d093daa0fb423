"""Inputs of the backbone against inputs assembled by hand, room for queries and windows, and back to documents."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.inputs import InputFormat, Settings, to_dense
from pyterrier_longdoc.modelling.layout import LAYOUTS
from pyterrier_longdoc.modelling.windows import GreedyChunks, SentenceWindows, SlidingWindows, Truncate, WholeText

from ..support import tiny
from ..support.scorers import padded
from ..support.systems import slow_but

CLS, SEP, PAD = 101, 102, 9
BERT = InputFormat(prefix=(CLS,), middle=(SEP,), suffix=(SEP,), types=(0, 0, 0, 1, 1), pad_id=PAD)
ROBERTA = InputFormat(prefix=(0,), middle=(2, 2), suffix=(2,), types=None, pad_id=1, position_offset=2)


def ids(*values):
    return np.array(values, dtype=np.int32)


# Two documents: two windows for the query (11, 12), one for the query (13,).
QUERIES = [ids(11, 12), ids(13)]
WINDOWS = [[ids(21, 22, 23), ids(24)], [ids(31, 32)]]


def test_fixed_layout():
    """The papers': query and window of a fixed size, as their padding is inside the input."""
    full, empty = ids(14, 15, 16, 17), ids()
    batch = padded(BERT, 4, 3).collate([*QUERIES, full, empty], [*WINDOWS, [empty], [ids(41, 42, 43)]])
    _ = PAD
    assert batch.input_ids.tolist() == [
        [CLS, 11, 12, _, _, SEP, 21, 22, 23, SEP],
        [CLS, 11, 12, _, _, SEP, 24, _, _, SEP],
        [CLS, 13, _, _, _, SEP, 31, 32, _, SEP],
        [CLS, 14, 15, 16, 17, SEP, _, _, _, SEP],
        [CLS, _, _, _, _, SEP, 41, 42, 43, SEP],
    ]
    assert batch.attention_mask.tolist() == [[token != PAD for token in row] for row in batch.input_ids.tolist()]
    assert batch.token_type_ids.tolist() == [[0] * (4 + 2) + [1] * (3 + 1)] * 5
    assert batch.lengths.tolist() == [padded(BERT, 4, 3).length(0, 0)] * 5 == [4 + 3 + 3] * 5


def test_fixed_query_with_windows_of_their_own_length():
    batch = padded(BERT, 3, None).collate(QUERIES, WINDOWS)
    assert batch.input_ids.tolist() == [
        [CLS, 11, 12, PAD, SEP, 21, 22, 23, SEP],
        [CLS, 11, 12, PAD, SEP, 24, SEP, PAD, PAD],
        [CLS, 13, PAD, PAD, SEP, 31, 32, SEP, PAD],
    ]
    assert batch.lengths.tolist() == [3 + 3 + 3, 3 + 1 + 3, 3 + 2 + 3]


def test_robertas_layouts():
    batch = ROBERTA.collate(QUERIES, WINDOWS)
    assert batch.input_ids.tolist() == [
        [0, 11, 12, 2, 2, 21, 22, 23, 2],
        [0, 11, 12, 2, 2, 24, 2, 1, 1],
        [0, 13, 2, 2, 31, 32, 2, 1, 1],
    ]
    assert batch.token_type_ids is batch.position_ids is None  # positions are left to the backbone
    # The fixed one has one separator and counts its padding.
    batch = padded(ROBERTA, 3, 4).collate(QUERIES, WINDOWS)
    assert batch.input_ids.tolist() == [
        [0, 11, 12, 1, 2, 21, 22, 23, 1, 2],
        [0, 11, 12, 1, 2, 24, 1, 1, 1, 2],
        [0, 13, 1, 1, 2, 31, 32, 1, 1, 2],
    ]
    assert batch.position_ids.tolist() == [list(range(2, 2 + 3 + 4 + 3))] * 3


def test_an_empty_query_and_an_empty_window_leave_the_special_tokens():
    batch = BERT.collate([ids()], [[ids()]])
    assert batch.input_ids.tolist() == [[CLS, SEP, SEP]]
    assert batch.lengths.tolist() == [BERT.specials] == [BERT.length(0, 0)] == [3]
    # Where there are none, padding stands in: a model cannot read nothing.
    bare = InputFormat((), (), (), None, PAD).collate([ids()], [[ids()]])
    assert (bare.input_ids.tolist(), bare.attention_mask.tolist()) == ([[PAD]], [[True]])


@pytest.mark.parametrize("family", slow_but(("bert", "roberta", "modernbert"), tiny.FAMILIES))
def test_the_pair_layout_is_the_tokenizers(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    tokenizer, layout = backbone.tokenizer, backbone.pair_format()
    pairs = [("old dog", "a cat and a bird"), ("snow", "rain. sun."), ("", "")]
    queries, windows = (
        [ids(*tokenizer(x, add_special_tokens=False)["input_ids"]) for x in xs] for xs in zip(*pairs, strict=True)
    )
    batch = layout.collate(queries, [[window] for window in windows])
    expected = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == expected["input_ids"].tolist()
    assert batch.attention_mask.tolist() == expected["attention_mask"].bool().tolist()
    if layout.types is not None:
        assert batch.token_type_ids.tolist() == expected["token_type_ids"].tolist()
    assert (layout.types is not None) == (family in ("bert", "electra"))
    assert layout.specials == (4 if "roberta" in family else 3)


PAIR = replace(BERT, longest=128)
APART = replace(BERT, longest=128, query_format=replace(BERT, longest=128, types=(0,) * 5))
PREFIXED = replace(APART, prefix=(CLS, 1, 2), query_format=replace(APART.query_format, prefix=(CLS, 3)))
TOGETHER = replace(APART, longest_pair=100)
SLIDING = SlidingWindows(40, 20)


@pytest.mark.parametrize(
    ("form", "windows", "asked", "query", "window"),
    [
        # One input: 128 tokens, three of them special.
        (PAIR, GreedyChunks(), 8, 8, 117),
        (PAIR, SLIDING, 8, 8, 40),
        (PAIR, SLIDING, None, 85, 40),
        (PAIR, GreedyChunks(), None, 31, 94),  # a quarter for queries
        (PAIR, WholeText(), None, 31, 94),
        (replace(PAIR, query_trail="?", query_trail_size=5), GreedyChunks(), 8, 8, 112),
        # Inputs of their own, and the prefixes of queries and of windows.
        (APART, GreedyChunks(), 8, 8, 125),
        (APART, GreedyChunks(), None, 125, 125),
        (PREFIXED, GreedyChunks(), 124, 124, 123),
        (PREFIXED, SLIDING, None, 124, 40),
        # And a limit on both, of an interaction.
        (TOGETHER, GreedyChunks(), 8, 8, 92),
        (TOGETHER, SLIDING, None, 60, 40),
        (TOGETHER, SentenceWindows(), None, 25, 75),
        (replace(BERT, longest_pair=100), GreedyChunks(), 8, 8, 92),
        # Nothing limits it.
        (BERT, GreedyChunks(), None, None, 477),
        (BERT, SentenceWindows(), 8, 8, None),
    ],
)
def test_room_for_queries_and_windows(form, windows, asked, query, window):
    fitted, same = form.fit(Settings(windows, max_query_len=asked))
    assert (fitted.max_query_len, fitted.windows.largest) == (query, window)
    assert same == form
    # Room for titles comes out of that of windows.
    if window is not None and not isinstance(windows, SlidingWindows) and window < 477:
        titled = form.fit(Settings(windows, max_query_len=asked, repeat_tokens=10))[0]
        assert (titled.max_query_len, titled.windows.largest, titled.largest_window) == (query, window - 10, window)


def test_sizes_of_padded_inputs():
    fitted, form = PAIR.fit(Settings(SLIDING, max_query_len=8, repeat_tokens=5, layout=LAYOUTS["padded"]))
    assert (form.query_size, form.window_size, fitted.largest_window) == (8, 45, 45)
    form = APART.fit(Settings(SLIDING, max_query_len=8, layout=LAYOUTS["padded"]))[1]
    assert (form.query_size, form.window_size) == (0, 40)
    assert (form.query_format.query_size, form.query_format.window_size, form.query_format.types) == (0, 8, (0,) * 5)


@pytest.mark.parametrize(
    ("form", "windows", "limit", "budget"),
    [
        (PAIR, Truncate(10), None, 8 + 10),
        (PAIR, WholeText(), None, 128 - 3),
        (PAIR, WholeText(), 20, 8 + 20),
        (replace(BERT, middle=(), longest=128), Truncate(10), None, 3 + 8 + 10 - 2),  # of 21 tokens two are special
        (BERT, WholeText(), None, sys.maxsize - 3),
    ],
)
def test_a_shared_budget(form, windows, limit, budget):
    shared = Settings(windows, max_query_len=8, max_doc_len=limit, layout=LAYOUTS["shared"])
    assert form.fit(shared)[1].budget == budget


@pytest.mark.parametrize(
    ("form", "arguments", "name"),
    [
        (PAIR, {"max_query_len": 125}, "max_query_len=125"),
        (APART, {"max_query_len": 126}, "max_query_len=126"),
        (TOGETHER, {"max_query_len": 100}, "max_query_len=100"),
        (PAIR, {"windows": SlidingWindows(118, 60)}, "117 document tokens"),
        (PAIR, {"windows": SlidingWindows(127, 60), "max_query_len": None}, "document tokens"),
        (APART, {"windows": SlidingWindows(127, 60)}, "125 document tokens"),
        (PAIR, {"windows": SlidingWindows(108, 60), "repeat_tokens": 10}, "repeat_tokens"),
        (PAIR, {"repeat_tokens": 117}, "lower repeat_tokens"),
        (replace(PAIR, has_words=True), {"layout": LAYOUTS["padded"]}, "layout='pair'"),
        (replace(PAIR, has_words=True), {"layout": LAYOUTS["shared"], "windows": Truncate(9)}, "layout='pair'"),
        (PAIR, {"layout": LAYOUTS["longformer"]}, "positions='columns'"),
    ],
)
def test_what_does_not_fit(form, arguments, name):
    with pytest.raises(ValueError, match=name):
        form.fit(Settings(**{"windows": GreedyChunks(), "max_query_len": 8, **arguments}))


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_to_dense(counts, seed):
    vectors = torch.randn(sum(counts), 5, generator=torch.Generator().manual_seed(seed))
    dense = to_dense(vectors, counts)
    assert dense.cls.shape == (len(counts), max(counts), 5)
    rows = iter(vectors)
    for i, count in enumerate(counts):
        for j in range(max(counts)):
            assert bool(dense.mask[i, j]) == (j < count)
            assert torch.equal(dense.cls[i, j], next(rows) if j < count else torch.zeros(5))
