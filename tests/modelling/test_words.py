"""Words as tokens: in every script, equal for equal words, remembered and cut as other tokens are."""

from __future__ import annotations

import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.tokens import tokenize
from pyterrier_longdoc.modelling.words import Words


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
    assert [tokens.written(span) for span in ld.GreedyChunks(4)(tokens)] == ["one  two,\nthree four", "five six"]
    assert tokens.written((2, 2)) == ""
    left = tokens.only([(0, 2), (3, 4), (4, 5)])
    assert left.written((0, 4)) == "one  two, four five"
    assert left.written((1, 3)) == "two, four"
    assert left.head(3).written((0, 3)) == "one  two, four"
