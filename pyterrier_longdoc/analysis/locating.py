"""The place of a passage in a document, even if one of the two has been edited since.

Source: Boytsov et al. 2022 (3.3.3; 2025, C.4, has no figures), who match passages of MS MARCO with later downloads of
their documents: first by the longest common substring, then by the longest common subsequence. The paper does not
define the units, the distance of windows and the search for candidates. Here units are words (accents, letter case,
punctuation and white space do not count), windows begin a tenth of a passage apart, and only places that cannot match
are skipped.

Shapes: M words of a passage, N words of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from ..common.arguments import argument, validate
from ..common.files import import_extra
from ..common.language import word_spans, words

_PLAIN = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2010\u2011\u2012\u2013\u2014", '\'\'\'"""""-----'
)
"""Quotation marks and dashes as typed: publishing systems change them back and forth."""

_OTHER = "\x00"
"""Stands for all words of a document that are in no passage."""


@dataclass(frozen=True)
class Match:
    """A passage in a document."""

    start: int  # character of the document with which the passage begins
    end: int  # character after its last one
    similarity: float  # share of the passage's words that are in the common substring or subsequence
    method: str  # `"substring"` or `"subsequence"`, whichever found it


@dataclass(frozen=True, kw_only=True)
class PassageLocator:
    r"""Finds passages in documents.

    A passage is found where its longest common substring with the document, in words, has at least `substring` of the
    passage's words. Otherwise windows of the document are searched, `slack` times as long as the passage: it is found
    in the one with the longest common subsequence, if that has at least `subsequence` of its words. Of places with the
    same share the first counts. The match is the span that differs from the passage by the fewest inserted, deleted
    and substituted words, and begins and ends with a word of the passage.

    Short passages match by chance, since all texts share phrases: a passage with fewer than `min_words` words is never
    found, one with fewer than `min_words_edited` only verbatim. With more words than the defaults such
    matches are rare (`tests/benchmarks/README.md`); a nearly equal passage is a match at any length.

    Args:
        substring: 0.8 in Boytsov et al. 2022; at least 0.5.
        subsequence: 0.7 there.
        slack: 1.2 there: windows are 20 % longer than the passage.
        step: from one window's start to the next one's, as a share of the passage; the paper does not give it.
        min_words: see above.
        min_words_edited: see above.

    Example:
        >>> locator = PassageLocator(min_words=3)
        >>> locator("the lazy dog", "The quick fox; the\nlazy dog.")
        Match(start=15, end=27, similarity=1.0, method='substring')
    """

    substring: float = argument(0.8, at_least=0.5, at_most=1)
    subsequence: float = argument(0.7, at_least=0, at_most=1)
    slack: float = argument(1.2, at_least=1)
    step: float = argument(0.1, at_least=0, at_most=1)
    min_words: int = argument(8, at_least=1)
    min_words_edited: int = argument(12, at_least=1)

    def __post_init__(self) -> None:
        validate(self)

    def __call__(self, passage: str, document: str) -> Match | None:
        """Find one passage; None if it is too short or not in the document."""
        return self.locate([passage], document)[0]

    def locate(self, passages: Sequence[str], document: str) -> list[Match | None]:
        """Find several passages in one document, which is read once: a match or None for each."""
        rapidfuzz = import_extra("rapidfuzz", "analysis", "rapidfuzz is missing")
        word_lists = [words(passage) for passage in passages]
        # One character for each word, so that functions for strings compare words.
        codes = {word: chr(i) for i, word in enumerate(dict.fromkeys(chain.from_iterable(word_lists)), start=1)}
        text = "".join([codes.get(word, _OTHER) for word in words(document)])
        matches: list[Match | None] = []
        for passage, passage_words in zip(passages, word_lists, strict=True):
            place = self._place("".join([codes[word] for word in passage_words]), text, rapidfuzz)
            if place is None:
                matches.append(None)
                continue
            start, end, count, method = place
            matches.append(Match(*_characters(document, start, end, passage), count / len(passage_words), method))
        return matches

    def too_short(self, passage: str) -> bool:
        """Return whether the passage has so few words that it is never found."""
        return len(words(passage)) < self.min_words

    def _place(self, passage: str, document: str, rapidfuzz: Any) -> tuple[int, int, int, str] | None:
        """Return the passage's place `(start, end)` in words, the number of common words, and the method."""
        if len(passage) < self.min_words:
            return None
        may_differ = len(passage) >= self.min_words_edited
        method = "substring"
        span = _common_substring(passage, document, self.substring if may_differ else 1.0, rapidfuzz.distance)
        if span is None and may_differ:
            method, span = "subsequence", self._common_subsequence(passage, document, rapidfuzz)
        if span is None:
            return None
        start, end, common = span
        if end - start > common:
            start, end = _closest_span(passage, document, start, end)
        return start, end, common, method

    def _common_subsequence(self, passage: str, document: str, rapidfuzz: Any) -> tuple[int, int, int] | None:
        """Return `(start, end, common)` of the best window; None if none is good enough."""
        M, N = len(passage), len(document)
        size, step = ceil(self.slack * M), max(1, int(self.step * M))
        starts = range(0, max(N - size, 0) + step, step)
        best = rapidfuzz.process.extractOne(
            passage,
            [document[start : start + size] for start in starts],
            scorer=rapidfuzz.distance.LCSseq.similarity,
            score_cutoff=_least_words(self.subsequence, M),
        )
        if best is None:
            return None
        _, common, number = best
        return starts[number], min(starts[number] + size, N), int(common)


def _least_words(share: float, length: int) -> int:
    """Return the fewest of `length` words that are at least the share."""
    return max(1, ceil(share * length - 1e-9))


def _common_substring(passage: str, document: str, share: float, distance: Any) -> tuple[int, int, int] | None:
    """Return `(start, end, common)` of the longest common substring; None if shorter than the share of the passage.

    Exact without an index: a common substring of enough words contains the passage's middle, which `str.find` finds.
    """
    M, N = len(passage), len(document)
    least = _least_words(share, M)
    spare, middle = M - least, passage[M - least : least]
    best: tuple[int, int, int] | None = None
    position = document.find(middle)
    while position >= 0:
        start, end = position - spare, position + least  # of a verbatim copy with this middle
        common = len(middle) + distance.Postfix.similarity(passage[:spare], document[max(0, start) : position])
        common += distance.Prefix.similarity(passage[least:], document[position + len(middle) : end])
        if common == M:
            return start, end, M
        if common >= least and (best is None or common > best[2]):
            # Room for the words of the passage that are not in the substring.
            best = max(0, start - spare), min(N, end + spare), common
        position = document.find(middle, position + 1)
    return best


def _closest_span(passage: str, document: str, start: int, end: int) -> tuple[int, int]:
    """Return the words of the document, near `start` to `end`, that differ from the passage by the fewest edits.

    Approximate matching by dynamic programming (Sellers 1980), which rapidfuzz has only for whole strings. Of spans
    with equally few edits the one with the most words of the passage counts, then the one that begins last, then the
    one that ends first: thus the ends are words of the passage.
    """
    room = (end - start) // 6
    low, high = max(0, start - room), min(len(document), end + room)
    codes = np.array([ord(word) for word in document[low:high]])
    # Edits, common words and start in one number: the smallest wins.
    common = len(codes) + 1
    edit = common * (len(passage) + 1)
    positions = np.arange(len(codes) + 1, dtype=np.int64)
    costs = len(codes) - positions  # (region + 1,): the passage's first 0 words against spans that end here
    for code in map(ord, passage):
        substitution = costs[:-1] + np.where(codes == code, -common, edit)
        costs = costs + edit
        np.minimum(costs[1:], substitution, out=costs[1:])
        # An inserted word costs one edit more than the span without it.
        costs = np.minimum.accumulate(costs - edit * positions) + edit * positions
    last = int(np.argmin(costs))
    first = len(codes) - int(costs[last]) % common
    # With thresholds far below the paper's, the empty span may be the closest one.
    return (low + first, low + last) if first < last else (start, end)


def _characters(document: str, start: int, end: int, passage: str) -> tuple[int, int]:
    """Return the characters of the words from `start` to `end`, and of the passage's punctuation around them."""
    (_, spans), (_, passage_spans) = word_spans(document), word_spans(passage)
    first, last = int(spans[start, 0]), int(spans[end - 1, 1])
    extra_start = _count_shared(reversed(passage[: passage_spans[0, 0]]), reversed(document[:first]))
    extra_end = _count_shared(passage[passage_spans[-1, 1] :], document[last:])
    return first - extra_start, last + extra_end


def _count_shared(passage: Iterable[str], document: Iterable[str]) -> int:
    """Count the characters of the document that match the passage's punctuation, apart from white space."""
    marks = (character.translate(_PLAIN) for character in passage if not character.isspace())
    count, mark = 0, next(marks, None)
    for length, character in enumerate(document, start=1):
        if character.isspace():
            continue
        if mark is None or character.translate(_PLAIN) != mark:
            break
        count, mark = length, next(marks, None)
    return count
