"""Readers against inputs assembled by hand, room for queries and windows, and back to documents."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.modelling.backbones.architectures import InputRules
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.inputs import Settings, collate, to_dense
from pyterrier_longdoc.modelling.late_interaction import LateReader
from pyterrier_longdoc.modelling.layout import LAYOUTS
from pyterrier_longdoc.modelling.reader import Reader, SeparateReader, Specials, TemplateReader, reader_of
from pyterrier_longdoc.modelling.templates import Template
from pyterrier_longdoc.modelling.windows import GreedyChunks, SentenceWindows, SlidingWindows, Truncate, WholeText

from ..support import tiny

CLS, SEP, PAD = 101, 102, 9
BERT = Specials(prefix=(CLS,), middle=(SEP,), suffix=(SEP,), types=(0, 0, 0, 1, 1), pad_id=PAD)
SLIDING = SlidingWindows(40, 20)


def ids(*values):
    return np.array(values, dtype=np.int32)


def backbone(longest=128, *, template=None, prompt="", first_position=None, vectors=None):
    """As much of a BERT as readers need."""
    return SimpleNamespace(
        tokenizer=tiny.tokenizer(),
        longest_input=longest,
        has_segments=True,
        first_position=first_position,
        rules=InputRules(),
        template=template,
        prompt=prompt,
        interaction=SimpleNamespace(max_vectors=vectors),
    )


def requested(windows, query=8, **options):
    return Settings(windows, max_query_len=query, **options)


# One input.


def test_special_tokens_surround_query_and_text():
    one = BERT.around(ids(11, 12), ids(21, 22, 23))
    assert one.ids.tolist() == [CLS, 11, 12, SEP, 21, 22, 23, SEP]
    assert one.types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (one.query, one.content, one.mask) == ((1, 3), (4, 7), None)
    assert BERT.around(ids(), ids()).ids.tolist() == [CLS, SEP, SEP]


def test_query_and_text_are_padded_separately():
    for query, text, expected in [
        ((11, 12), (21, 22, 23), [CLS, 11, 12, PAD, PAD, SEP, 21, 22, 23, SEP]),
        ((11, 12), (24,), [CLS, 11, 12, PAD, PAD, SEP, 24, PAD, PAD, SEP]),
        ((14, 15, 16, 17), (), [CLS, 14, 15, 16, 17, SEP, PAD, PAD, PAD, SEP]),
        ((), (41, 42, 43), [CLS, PAD, PAD, PAD, PAD, SEP, 41, 42, 43, SEP]),
    ]:
        one = BERT.around(ids(*query), ids(*text), 4, 3)
        assert one.ids.tolist() == expected
        real = [True] * len(one) if one.mask is None else one.mask.tolist()
        assert real == [token != PAD for token in expected]
        assert one.types.tolist() == [0] * 6 + [1] * 4
        assert (one.query, one.content) == ((1, 1 + len(query)), (6, 6 + len(text)))


def test_without_special_tokens_an_empty_input_is_a_padding_token():
    for size in [0, 3]:
        one = Specials(pad_id=PAD).around(ids(), ids(), 0, size)
        assert one.ids.tolist() == [PAD] * max(1, size)
        assert one.mask is None or one.mask.tolist() == [True, False, False]


def test_equal_inputs_have_equal_keys_and_others_do_not():
    one = BERT.around(ids(11, 12), ids(21))
    assert one.key == BERT.around(ids(11, 12), ids(21)).key
    others = [
        BERT.around(ids(11), ids(12, 21)),
        BERT.around(ids(11, SEP, 12), ids(21)),
        BERT.around(ids(11), ids(12, SEP, 21)),
        BERT.around(ids(11, 12), ids(21), 2, 2),
        replace(BERT, types=None).around(ids(11, 12), ids(21)),
        replace(one, positions=np.arange(len(one))),
    ]
    assert len({other.key for other in [one, *others]}) == 1 + len(others)


def test_inputs_of_a_pass_are_padded_at_their_end():
    batch = collate([BERT.around(ids(11), ids(21, 22)), BERT.around(ids(), ids(31))], 7, PAD)
    assert batch.input_ids.tolist() == [[CLS, 11, SEP, 21, 22, SEP, PAD], [CLS, SEP, 31, SEP, PAD, PAD, PAD]]
    assert batch.mask.tolist() == [[True] * 6 + [False], [True] * 4 + [False] * 3]
    assert batch.tokens == 10
    assert batch.arguments.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert batch.arguments["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert "attention_mask" not in collate([BERT.around(ids(11), ids(21))], 5, PAD).arguments


# Readers.


def test_the_padded_layout_of_roberta_has_one_separator_and_counts_padding(tmp_path):
    loaded = load_backbone(tiny.checkpoint(tmp_path, "roberta"))
    reader = Reader(loaded, requested(Truncate(4), 3, layout=LAYOUTS["padded"]))
    one = reader.assemble(ids(11, 12), ids(21, 22))
    assert one.ids.tolist() == [2, 11, 12, 0, 3, 21, 22, 0, 0, 3]
    assert one.positions.tolist() == list(range(1, 1 + 3 + 3 + 4))


def test_padded_inputs_have_a_fixed_size():
    reader = Reader(backbone(), requested(SLIDING, repeat_tokens=5, layout=LAYOUTS["padded"]))
    assert (reader.sizes[0], len(reader.assemble(ids(11), ids(21)))) == (8, 3 + 8 + 45)
    apart = LateReader(backbone(), requested(SLIDING, layout=LAYOUTS["padded"]))
    assert len(apart.assemble_query(ids(11))) == 3 + 8
    assert len(apart.assemble(ids(), ids(21))) == 3 + 40
    assert set(apart.assemble_query(ids(11)).types.tolist()) == {0}


# The longest input.

TRAIL = Template("{query} fish {text}")


def test_queries_and_windows_share_the_longest_input():
    for make, windows, query, expected in [
        # One input: 128 tokens, three of them special.
        (Reader, GreedyChunks(), 8, (8, 117)),
        (Reader, SLIDING, 8, (8, 40)),
        (Reader, SLIDING, None, (85, 40)),
        (Reader, GreedyChunks(), None, (31, 94)),  # a quarter for queries
        (Reader, WholeText(), None, (31, 94)),
        # [CLS], [SEP] and the template's word.
        (lambda _, s: TemplateReader(backbone(template=TRAIL), s), GreedyChunks(), 8, (8, 128 - 8 - 3)),
        # Inputs of their own: two special tokens, and the prefixes of queries and of windows.
        (SeparateReader, GreedyChunks(), 8, (8, 126)),
        (SeparateReader, GreedyChunks(), None, (126, 126)),
        (lambda *a: SeparateReader(*a, prefixes=("a ", "a dog ")), GreedyChunks(), 125, (125, 124)),
        (lambda *a: SeparateReader(*a, prefixes=("a ", "a dog ")), SLIDING, None, (125, 40)),
        # Lengths of the checkpoint's training, where no argument gives a size.
        (lambda *a: SeparateReader(*a, lengths=(20, 60)), GreedyChunks(), None, (18, 58)),
        (lambda *a: SeparateReader(*a, lengths=(20, 60)), GreedyChunks(70), 30, (30, 70)),
        # Nothing limits it.
        (lambda _, s: Reader(backbone(None), s), GreedyChunks(), None, (None, 477)),
        (lambda _, s: Reader(backbone(None), s), SentenceWindows(), 8, (8, None)),
        # A limit on both, of an interaction: 100 vectors beside ten of special tokens.
        (lambda _, s: LateReader(backbone(vectors=110), s), GreedyChunks(), 8, (8, 92)),
        (lambda _, s: LateReader(backbone(vectors=110), s), SLIDING, None, (60, 40)),
        (lambda _, s: LateReader(backbone(vectors=110), s), SentenceWindows(), None, (25, 75)),
        (lambda _, s: LateReader(backbone(None, vectors=110), s), GreedyChunks(), 8, (8, 92)),
    ]:
        reader = make(backbone(), requested(windows, query))
        assert (reader.max_query_len, reader.windows.largest) == expected
        # Room for titles comes out of that of windows.
        largest = reader.windows.largest
        if largest is not None and windows.resized(sys.maxsize) != windows and largest < 477:
            titled = make(backbone(), requested(windows, query, repeat_tokens=10))
            assert (titled.max_query_len, titled.windows.largest) == (expected[0], largest - 10)


def test_arguments_that_do_not_fit_the_input_are_refused_by_name():
    for make, arguments, name in [
        (Reader, {"max_query_len": 125}, "max_query_len=125"),
        (SeparateReader, {"max_query_len": 127}, "max_query_len=127"),
        (lambda _, s: LateReader(backbone(vectors=110), s), {"max_query_len": 100}, "max_query_len=100"),
        (Reader, {"windows": SlidingWindows(118, 60)}, "117 document tokens"),
        (Reader, {"windows": SlidingWindows(127, 60), "max_query_len": None}, "document tokens"),
        (SeparateReader, {"windows": SlidingWindows(127, 60)}, "126 document tokens"),
        (Reader, {"windows": SlidingWindows(108, 60), "repeat_tokens": 10}, "repeat_tokens"),
        (Reader, {"repeat_tokens": 117}, "lower repeat_tokens"),
        (lambda *a: SeparateReader(*a, prefixes=("a " * 130, "")), {}, "query_prefix="),
        (lambda *a: SeparateReader(*a, prefixes=("", "a " * 130)), {}, "passage_prefix="),
        (lambda _, s: reader_of(backbone(template=TRAIL), s), {"layout": LAYOUTS["padded"]}, "layout='pair'"),
        (
            lambda _, s: reader_of(backbone(prompt="find: "), s),
            {"windows": Truncate(), "layout": LAYOUTS["shared"]},
            "layout='pair'",
        ),
        (Reader, {"layout": LAYOUTS["longformer"]}, "positions='columns'"),
    ]:
        with pytest.raises(ValueError, match=name):
            make(backbone(), Settings(**{"windows": GreedyChunks(), "max_query_len": 8, **arguments}))


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_to_dense_pads_vectors_by_document(counts, seed):
    vectors = torch.randn(sum(counts), 5, generator=torch.Generator().manual_seed(seed))
    dense = to_dense(vectors, counts)
    assert dense.cls.shape == (len(counts), max(counts), 5)
    rows = iter(vectors)
    for i, count in enumerate(counts):
        for j in range(max(counts)):
            assert bool(dense.mask[i, j]) == (j < count)
            assert torch.equal(dense.cls[i, j], next(rows) if j < count else torch.zeros(5))
