"""Inputs of the backbone against inputs assembled by hand, and back to the document axis."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.batching import Encoded, PairLayout, to_dense

from ..support import tiny
from ..support.systems import slow_but

CLS, SEP, PAD = 101, 102, 9
BERT = PairLayout(prefix=(CLS,), middle=(SEP,), suffix=(SEP,), types=(0, 0, 0, 1, 1), pad_id=PAD)
ROBERTA = PairLayout(prefix=(0,), middle=(2, 2), suffix=(2,), types=None, pad_id=1, position_offset=2)


def ids(*values):
    return np.array(values, dtype=np.int32)


# Two documents: two windows for the query (11, 12), one for the query (13,).
QUERIES = [ids(11, 12), ids(13)]
WINDOWS = [[ids(21, 22, 23), ids(24)], [ids(31, 32)]]


def test_plain_layout():
    batch = BERT.collate(QUERIES, WINDOWS)
    assert batch.input_ids.tolist() == [
        [CLS, 11, 12, SEP, 21, 22, 23, SEP],
        [CLS, 11, 12, SEP, 24, SEP, PAD, PAD],
        [CLS, 13, SEP, 31, 32, SEP, PAD, PAD],
    ]
    assert batch.attention_mask.tolist() == [[n < length for n in range(8)] for length in (8, 6, 6)]
    assert batch.token_type_ids.tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
    ]
    assert batch.lengths.tolist() == [8, 6, 6]
    assert batch.doc.tolist() == [0, 0, 1]
    assert batch.documents == 2
    assert batch.position_ids is None
    assert batch.attention_mask.dtype == torch.bool
    assert batch.input_ids.dtype == batch.token_type_ids.dtype == batch.lengths.dtype == batch.doc.dtype == torch.int64


def test_fixed_layout():
    """The papers': query and window of a fixed size, as their padding is inside the input."""
    full, empty = ids(14, 15, 16, 17), ids()
    batch = BERT.fixed(4, 3).collate([*QUERIES, full, empty], [*WINDOWS, [empty], [ids(41, 42, 43)]])
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
    assert batch.lengths.tolist() == [BERT.fixed(4, 3).length(0, 0)] * 5 == [4 + 3 + 3] * 5


def test_fixed_query_with_windows_of_their_own_length():
    batch = BERT.fixed(3, None).collate(QUERIES, WINDOWS)
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
    batch = ROBERTA.fixed(3, 4).collate(QUERIES, WINDOWS)
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
    bare = PairLayout((), (), (), None, PAD).collate([ids()], [[ids()]])
    assert (bare.input_ids.tolist(), bare.attention_mask.tolist()) == ([[PAD]], [[True]])


@pytest.mark.parametrize("family", slow_but(("bert", "roberta", "modernbert"), tiny.FAMILIES))
def test_the_pair_layout_is_the_tokenizers(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    tokenizer, layout = backbone.tokenizer, backbone.pair_layout()
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


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_to_dense(counts, seed):
    vectors = torch.randn(sum(counts), 5, generator=torch.Generator().manual_seed(seed))
    dense = to_dense(vectors, counts)
    assert dense.cls.shape == (len(counts), max(counts), 5)
    rows = iter(vectors)
    for i, count in enumerate(counts):
        for j in range(max(counts)):
            assert bool(dense.mask[i, j]) == (j < count)
            assert torch.equal(dense.cls[i, j], next(rows) if j < count else torch.zeros(5))


def test_to_dense_hands_gradients_back():
    vectors = torch.ones(3, 2, requires_grad=True)
    dense = to_dense(vectors, [2, 1])
    (dense.cls * torch.tensor([1.0, 2.0]).view(1, 2, 1)).sum().backward()
    assert vectors.grad.tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]


def test_each_window_as_a_document_of_its_own():
    cls = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    single, own = Encoded(cls, mask).each_window()
    assert torch.equal(own, mask)
    assert single.cls.tolist() == [[row] for row in cls.reshape(6, 2).tolist()]
    assert single.mask.tolist() == [[True]] * 6
