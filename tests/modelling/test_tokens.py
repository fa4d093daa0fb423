"""Runs divided into blocks; texts tokenised once over many runs, and never by what another tokenizer made of them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.modelling import model as model_module
from pyterrier_longdoc.modelling import tokens as tokens_module
from pyterrier_longdoc.modelling.model import Pace, blocks
from pyterrier_longdoc.modelling.tokens import ENTRY_BYTES, TokenCache, tokenize
from pyterrier_longdoc.modelling.words import Words

from ..support import tiny
from ..support.systems import QUIET, REPRESENTATIVE, make, scores

pytestmark = QUIET
TEXTS = ["the cat and the dog", "", "snow in the city", "the cat and the dog", "Rain, 1999"]


@pytest.fixture
def seen(monkeypatch) -> Counter:
    """How often each text went through a tokenizer."""
    counts = Counter()

    def counting(tokenizer, texts, **kwargs):
        counts.update(texts)
        return tokenize(tokenizer, texts, **kwargs)

    monkeypatch.setattr(tokens_module, "tokenize", counting)
    return counts


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text
        for name in ("ids", "offsets"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            if getattr(other, name) is not None:
                assert getattr(one, name).dtype == np.int32


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=40),
    characters=st.integers(1, 60),
    pairs=st.integers(1, 12),
)
def test_blocks(rows, characters, pairs):
    texts = ["x" * (3 * text) + str(text) for _, text in rows]
    made = list(blocks([str(query) for query, _ in rows], texts, characters=characters, pairs=pairs))
    owners = {}
    for block in made:
        assert len(block.query) == len(block.text) == len(block.rows) <= pairs
        assert len(block.texts) == len(set(block.texts))
        # A block ends as soon as it has enough characters; a single pair may have more.
        assert len(block.rows) == 1 or len(block.rows) * len(block.texts[0]) <= characters
        for query, text, owned in zip(block.query, block.text, block.rows, strict=True):
            asked = block.queries[query]
            assert owned == [i for i, row in enumerate(rows) if (str(row[0]), texts[i]) == (asked, block.texts[text])]
            assert (query, block.texts[text]) not in owners
            owners[query, block.texts[text]] = owned
    assert sorted(itertools.chain(*owners.values())) == list(range(len(rows)))
    lengths = [len(text) for block in made for text in block.texts]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_text_once_over_two_transforms(name, results, seen):
    model = make(name)
    forget_embeddings()  # bi-encoders of one backbone remember together
    seen.clear()
    first = scores(model, results)
    texts = {*results["query"], *results["text"].fillna("")}
    assert seen == dict.fromkeys(texts, 1)
    np.testing.assert_allclose(scores(model, results), first, rtol=1e-6)
    assert seen == dict.fromkeys(texts, 1)
    model(results.assign(text="a new text"))
    assert seen == dict.fromkeys({*texts, "a new text"}, 1)


@pytest.mark.parametrize("offsets", [False, True])
def test_what_is_remembered_is_what_the_tokenizer_makes(offsets, seen):
    tokenizer, cache = tiny.tokenizer(), TokenCache()
    for _ in range(2):
        for lead in ("", " find "):
            found = cache(tokenizer, TEXTS, offsets=offsets, lead=lead)
            assert_same(found, tokenize(tokenizer, TEXTS, offsets=offsets, lead=lead))
            assert found[0] is found[3]
    seen.clear()
    [without] = cache(tokenizer, TEXTS[:1])  # offsets serve those who do not ask for them
    assert not seen
    [tokens] = cache(tokenizer, TEXTS[:1], offsets=True)
    assert bool(seen) != offsets
    assert without.ids.tolist() == tokens.ids.tolist()


def test_the_bound_holds(seen):
    tokenizer, texts = tiny.tokenizer(), [f"{word} cat dog bird" for word in tiny.WORDS[:10]]
    size = 4 * np.dtype(np.int32).itemsize + ENTRY_BYTES
    cache = TokenCache(max_bytes=3 * size)
    assert_same(cache(tokenizer, texts), tokenize(tokenizer, texts))
    assert len(cache.cache) == 3
    seen.clear()
    cache(tokenizer, texts[-3:])
    assert not seen


def test_another_tokenizer_and_other_settings():
    texts, cache, tokenizer = ["Rain zebra"], TokenCache(), tiny.tokenizer()
    before = cache(tokenizer, texts)[0].ids.tolist()
    tokenizer.add_tokens(["zebra"])
    added = cache(tokenizer, texts)[0].ids.tolist()
    assert len(added) < len(before)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # which leaves upper case as it is
    assert_same(cache(tokenizer, texts), tokenize(tokenizer, texts))
    assert cache(tokenizer, texts)[0].ids.tolist() != added
    assert_same(cache(in_python(tokenizer), texts), tokenize(tokenizer, texts))
    assert cache(tiny.tokenizer(), texts)[0].ids.tolist() == before


def test_another_setting_of_the_tokenizer_s_model():
    cache, tokenizer = TokenCache(), tiny.tokenizer()
    known = cache(tokenizer, ["river"])[0].ids.tolist()
    tokenizer.backend_tokenizer.model.max_input_chars_per_word = 4
    unknown = cache(tokenizer, ["river"])[0].ids.tolist()
    assert known != unknown == [tokenizer.unk_token_id]


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        (models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]), "dropout"),
        pytest.param(
            models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5)], unk_id=0),
            "alpha",
            marks=pytest.mark.skipif(not hasattr(models.Unigram, "alpha"), reason="these tokenizers draw no pieces"),
        ),
    ],
)
def test_nothing_random_is_remembered(model, setting, seen):
    cache, tokenizer = TokenCache(), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    setattr(tokenizer.backend_tokenizer.model, setting, 0.5)
    made = {tuple(cache(tokenizer, ["abab"])[0].ids.tolist()) for _ in range(40)}
    assert len(made) > 1
    assert seen["abab"] == 40


class Letters:
    """A step of a tokenizer that is written in Python, as RoFormer's is: every `size` letters are a word."""

    def __init__(self, size: int) -> None:
        self.size = size

    def pre_tokenize(self, text) -> None:
        text.split(lambda _, word: [word[i : i + self.size] for i in range(0, len(str(word)), self.size)])


def in_python(tokenizer, step=None):
    """The tokenizer, its words found by Python code."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(step or Letters(1))
    return tokenizer


def test_nothing_is_remembered_of_a_tokenizer_in_python(seen):
    step, cache = Letters(1), TokenCache()
    tokenizer = in_python(tiny.tokenizer(), step)
    for offsets in (False, True):
        assert_same(cache(tokenizer, TEXTS, offsets=offsets), tokenize(tokenizer, TEXTS, offsets=offsets))
    before = cache(tokenizer, ["cat"])[0].ids.tolist()
    step.size = 3  # which nobody can see from outside
    assert len(cache(tokenizer, ["cat"])[0]) == 1 < len(before)
    assert seen == {**dict.fromkeys(TEXTS, 2), "cat": 2}
    assert not len(cache.cache)


def test_a_model_with_a_tokenizer_in_python(results, tmp_path):
    model = make("MaxP")
    in_python(model.model.tokenizer)
    before = scores(model, results)
    np.testing.assert_allclose(scores(model, results[::-1]), before[::-1], atol=1e-5)
    model.score_cache = tmp_path / "scores.sqlite"
    with pytest.raises(ValueError, match="leave score_cache out"):
        model(results)


def test_blocks_take_about_the_time_that_they_may(monkeypatch):
    """By a clock of the test's own: a character takes a millisecond, later a hundred times less."""
    now, texts = [0.0], [f"{i:03}" * 20 for i in range(400)]
    monkeypatch.setattr(model_module.time, "monotonic", lambda: now[0])
    pace, sizes, took = Pace(5000, 2.0), [], []
    for block in blocks([""] * len(texts), texts, characters=pace, pairs=1000):
        per_character = 1e-3 if sum(sizes) < 200 else 1e-5
        took.append(len(block.rows) * 60 * per_character)
        sizes.append(len(block.rows))
        now[0] += took[-1]
        pace.note(block)
    assert sum(sizes) == 400
    assert sizes[0] == 1
    assert max(took) <= 2.0
    assert min(took[1:5]) > 1.8
    assert max(sizes) == 5000 // 60  # never more than without a clock
    assert Pace(5000, None).characters == 5000


# Words as tokens.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\t", []),
        ("One, two  three.", ["One,", "two", "three."]),
        ("naïve café — déjà-vu", ["naïve", "café", "—", "déjà-vu"]),
        ("猫が mouse犬", ["猫", "が", "mouse", "犬"]),
        ("a\u00a0b 😀c", ["a", "b", "😀c"]),
    ],
)
def test_words_of_a_text(text, words):
    (tokens,) = tokenize(Words(), [text], offsets=True)
    assert [text[start:end] for start, end in tokens.offsets.tolist()] == words
    assert tokenize(Words(), [text])[0].ids.tolist() == tokens.ids.tolist()


def test_windows_are_written_as_they_stand_in_the_text():
    text = "one  two,\nthree four five six"
    (tokens,) = tokenize(Words(), [text], offsets=True)
    assert [tokens.window_text(span) for span in ld.GreedyChunks(4)(tokens)] == ["one  two,\nthree four", "five six"]
    assert tokens.window_text((2, 2)) == ""
    left = tokens.select([(0, 2), (3, 4), (4, 5)])
    assert left.window_text((0, 4)) == "one  two, four five"
    assert left.window_text((1, 3)) == "two, four"
    assert left.head(3).window_text((0, 3)) == "one  two, four"
