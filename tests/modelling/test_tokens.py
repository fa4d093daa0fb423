"""Tokenizers in Python, words as tokens, and the text of windows."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import pre_tokenizers

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.tokens import tokenize
from pyterrier_longdoc.modelling.words import Words

from ..support.systems import QUIET, make, scores

pytestmark = QUIET


class Letters:
    """A step of a tokenizer that is written in Python, as RoFormer's is: every letter is a word."""

    def pre_tokenize(self, text) -> None:
        text.split(lambda _, word: [word[i : i + 1] for i in range(len(str(word)))])


def test_a_python_tokenizer_gives_reproducible_scores_but_no_score_cache(results, tmp_path):
    model = make("MaxP")
    model.model.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Letters())
    before = scores(model, results)
    np.testing.assert_allclose(scores(model, results[::-1]), before[::-1], atol=1e-5)
    model.score_cache = tmp_path / "scores.sqlite"
    with pytest.warns(UserWarning, match=r"score_cache.*is not used"):
        assert scores(model, results).tolist() == before.tolist()
    assert not model.score_cache.exists()


def test_words_are_divided_by_white_space():
    for text, words in [
        ("", []),
        (" \n\t", []),
        ("One, two  three.", ["One,", "two", "three."]),
        ("naïve café — déjà-vu", ["naïve", "café", "—", "déjà-vu"]),
        ("猫が mouse犬", ["猫", "が", "mouse", "犬"]),
        ("a\u00a0b 😀c", ["a", "b", "😀c"]),
    ]:
        (tokens,) = tokenize(Words(), [text], offsets=True)
        assert [text[start:end] for start, end in tokens.offsets.tolist()] == words
        assert tokenize(Words(), [text])[0].ids.tolist() == tokens.ids.tolist()


def test_window_text_is_the_original_text_of_a_window():
    text = "one  two,\nthree four five six"
    (tokens,) = tokenize(Words(), [text], offsets=True)
    assert [tokens.window_text(span) for span in ld.GreedyChunks(4)(tokens)] == ["one  two,\nthree four", "five six"]
    assert tokens.window_text((2, 2)) == ""
    assert tokens.head(3).window_text((0, 3)) == "one  two,\nthree"
