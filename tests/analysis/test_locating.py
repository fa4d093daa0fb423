"""PassageLocator finds passages in documents: verbatim, edited, and not by chance."""

from __future__ import annotations

import unicodedata
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.locating import _closest_span
from pyterrier_longdoc.common.language import count_tokens

from ..support.passages import Writer

LOCATOR = ld.PassageLocator()
PASSAGE = "(Seventeen) purple elephants don't march through Vienna: the naïve brass band's “polkas” are too loud!"


def placed(writer: Writer, *pieces: str, filler: int = 300) -> tuple[str, list[int]]:
    """A document of pieces between filler, and the characters at which the pieces begin."""
    text, starts = writer.prose(filler), []
    for piece in pieces:
        text += " "
        starts.append(len(text))
        text += piece + " " + writer.prose(filler)
    return text, starts


# Verbatim.


@pytest.mark.parametrize(
    "change",
    [
        str,
        str.upper,
        lambda text: text.replace(" ", "\n\t "),
        lambda text: text.replace(" ", "\u00a0\u00a0"),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace("'", "\u2019").replace("“", '"').replace("”", '"'),
        lambda text: text.replace("ele", "e\u00adl\u200be"),
        lambda text: text.replace("ï", "i"),
        lambda text: text.replace("march", "\uff4d\uff41\uff52\uff43\uff48"),  # wide letters
        lambda text: text.replace("elephants", "e\u064elephants"),  # an Arabic vowel sign
        lambda text: text.replace(":", " - ").replace("are too", "are, too"),
    ],
)
def test_case_spacing_punctuation_and_unicode_form_do_not_matter(change):
    document, (start,) = placed(Writer(), change(PASSAGE))
    match = LOCATOR(PASSAGE, document)
    assert (match.start, match.end) == (start, start + len(change(PASSAGE)))
    assert (match.similarity, match.method) == (1.0, "substring")


def test_a_passage_without_spaces_is_found():
    passage = "春はあけぼの。やうやう白くなりゆく山ぎは、すこしあかりて"
    document = "夏は夜。月のころはさらなり。" * 20 + passage + "秋は夕暮れ。" * 20
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, document)
        match = LOCATOR(passage, text)
        assert unicodedata.normalize("NFC", text[match.start : match.end]) == passage


# Edited.


@pytest.mark.parametrize(("share", "tokens", "least"), [(0.0, 0, 0.99), (0.1, 5, 0.95)])
def test_verbatim_passages_are_found_exactly_and_edited_ones_nearly_so(share, tokens, least):
    writer, near = Writer(1), []
    for _ in range(60):
        passage = writer.prose(writer.rng.randint(30, 100))
        document, (start,) = placed(writer, writer.edited(passage, share) if share else passage)
        match = LOCATOR(passage, document)
        low, high = sorted((start, match.start)) if match else (0, len(document))
        near.append(count_tokens(document[low:high]) <= tokens)
    assert np.mean(near) >= least


def test_the_first_of_two_copies_is_found():
    writer = Writer(9)
    passage = writer.prose(60)
    copies = [passage]
    for lost in (4, 9):
        in_a_row, scattered = passage.split(" "), passage.split(" ")
        in_a_row[-lost:] = ["unheard"] * lost
        scattered[5 : 5 + 6 * lost : 6] = ["unheard"] * lost
        copies += [" ".join(in_a_row), " ".join(scattered)]
    for copy in copies:
        document, (first, _) = placed(writer, copy, copy)
        assert LOCATOR(passage, document).start == first


@pytest.mark.parametrize("at", [1, 20])
def test_an_inserted_word_moves_neither_end(at):
    writer = Writer(10)
    passage = writer.prose(40)
    own = passage.split(" ")
    document, (start,) = placed(writer, " ".join([*own[:at], "unheard", *own[at:]]))
    match = LOCATOR(passage, document)
    assert (match.start, match.end) == (start, start + len(passage) + len(" unheard"))


# What is not there.


def test_passages_of_other_documents_are_not_found():
    writer = Writer(4)
    there = [writer.prose(30) for _ in range(4)]
    others = [writer.prose(count) for count in (8, 12, 20, 40, 80) for _ in range(20)]
    document, starts = placed(writer, *there, filler=1000)
    found = LOCATOR.locate([*there, *others, there[0]], document)
    assert [match and match.start for match in found] == [*starts, *[None] * 100, starts[0]]


def test_short_passages_are_not_found_and_medium_ones_only_verbatim():
    for passage in ("", " ", "?!", "one two three four five six seven"):
        assert LOCATOR.too_short(passage)
        assert LOCATOR(passage, f"{passage} and {passage}") is None
    passage = "one two three four five six seven eight nine"
    assert LOCATOR(passage, f"zero {passage} ten").start == 5
    assert LOCATOR(passage, "zero " + passage.replace("nine", "ten")) is None


# Thresholds, and the definition word by word.


def letters(code: str) -> str:
    """Words of one letter each, so that expected values are easy to write."""
    return " ".join(code)


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ("abcdefghijklmnopxxxx", (0.8, "substring")),  # 16 of 20 in a row
        ("xxxxefghijklmnopqrst", (0.8, "substring")),
        ("abcdefghijklmnoxxxxx", (0.75, "subsequence")),
        ("abxdexghxjkxmnxpqrst", (0.75, "subsequence")),
        ("abxdexghxjkxmnxpqxst", (0.7, "subsequence")),
        ("abxdexghxjkxmnxpqxsx", None),
        ("tsrqponmlkjihgfedcba", None),
    ],
)
def test_a_match_needs_the_shares_of_the_thresholds(document, found):
    match = LOCATOR(letters("abcdefghijklmnopqrst"), letters("zzzzzzz" + document + "zzzz"))
    assert (match and (match.similarity, match.method)) == found


def reference(passage: str, document: str) -> tuple[float, str] | None:
    """Section C.4 with plain dynamic programming."""

    def common(a: str, b: str, *, contiguous: bool) -> int:
        table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                apart = 0 if contiguous else max(table[i, j + 1], table[i + 1, j])
                table[i + 1, j + 1] = table[i, j] + 1 if x == y else apart
        return int(table.max())

    longest = common(passage, document, contiguous=True)
    if longest >= 0.8 * len(passage):
        return longest / len(passage), "substring"
    size, step = ceil(1.2 * len(passage)), max(1, len(passage) // 10)
    starts = range(0, max(len(document) - size, 0) + step, step)
    best = max(common(passage, document[start : start + size], contiguous=False) for start in starts)
    return (best / len(passage), "subsequence") if best >= 0.7 * len(passage) else None


@given(st.data())
def test_similarities_are_those_of_the_papers_definition(data):
    passage = data.draw(st.text("abc", min_size=12, max_size=22))
    edits = st.lists(st.tuples(st.integers(0, 21), st.sampled_from("abcx")), max_size=8)
    changed = list(passage)
    for at, letter in data.draw(edits):
        changed[at % len(passage)] = letter
    document = data.draw(st.text("abcx", max_size=20)) + "".join(changed) + data.draw(st.text("abcx", max_size=20))
    match = LOCATOR(letters(passage), letters(document))
    assert (match and (match.similarity, match.method)) == reference(passage, document)
    if match is not None:
        found = letters(document)[match.start : match.end].split(" ")
        assert {found[0], found[-1]} <= set(passage)


@given(st.text("abcd", min_size=1, max_size=12), st.text("abcd", min_size=1, max_size=16))
def test_a_match_is_the_span_with_the_fewest_edits(passage, document):
    start, end = _closest_span(passage, document, 0, len(document))
    spans = [document[i:j] for i in range(len(document)) for j in range(i + 1, len(document) + 1)]
    fewest = min(Levenshtein.distance(passage, span) for span in ["", *spans])
    if fewest < len(passage):  # else no word at all is as near as any span
        assert Levenshtein.distance(passage, document[start:end]) == fewest


# Settings, libraries.
