"""Locate a passage in a document, even if one of them was edited.

Source: Boytsov et al. 2022 (3.3.3; 2025, C.4, has no figures), who match passages of MS MARCO with later downloads of
their documents: first by the longest common substring, then by the longest common subsequence. The paper does not
define the units, the stride of windows and the search for candidates. Here, units are words (accents, letter case,
punctuation and white space are ignored), the stride of windows is a tenth of the passage, and only places that cannot
match are skipped.

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
"""Typographic quotation marks and dashes to plain ones, because publishing systems convert between them."""

_OTHER = "\x00"
"""Stands for every word of a document that is in no passage."""


@dataclass(frozen=True)
class Match:
    """A passage in a document."""

    start: int  # first character of the passage in the document
    end: int  # the character after its last one
    similarity: float  # share of the passage's words that are in the common substring or subsequence
    method: str  # `"substring"` or `"subsequence"`


@dataclass(frozen=True, kw_only=True)
class PassageLocator:
    r"""Finds passages in documents.

    A passage is found if its longest common substring with the document contains at least the share `substring` of its
    words. Otherwise, windows of the document are searched that are `slack` times as long as the passage. The passage is
    found in the window with the longest common subsequence if this contains at least the share `subsequence` of its
    words. The first of several equal places is used. The match is the span with the fewest inserted, deleted and
    substituted words, which begins and ends with a word of the passage.

    Short passages can match by chance, because texts share phrases. A passage with fewer than `min_words` words is
    never found; one with fewer than `min_words_edited` words must match verbatim. A nearly equal passage is a match at
    any length.

    Args:
        substring: the minimum share of words in the common substring, at least 0.5. 0.8 in Boytsov et al. 2022.
        subsequence: the minimum share of words in the common subsequence. 0.7 in Boytsov et al. 2022.
        slack: the length of windows relative to the passage. 1.2 in Boytsov et al. 2022.
        step: the stride of windows, as a share of the passage; not given in the paper.
        min_words: the minimum number of words of a passage.
        min_words_edited: the minimum number of words of a passage that does not match verbatim.

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
        """Find a passage in a document; None if it is too short or not found."""
        return self.locate([passage], document)[0]

    def locate(self, passages: Sequence[str], document: str) -> list[Match | None]:
        """Find several passages in one document; return a match or None for each."""
        rapidfuzz = import_extra("rapidfuzz", "analysis", "rapidfuzz is missing")
        word_lists = [words(passage) for passage in passages]
        # One character per word, so that string functions compare words.
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
        """Return whether the passage has fewer than `min_words` words."""
        return len(words(passage)) < self.min_words

    def _place(self, passage: str, document: str, rapidfuzz: Any) -> tuple[int, int, int, str] | None:
        """Return the place `(start, end)` of the passage in words, the number of common words, and the method."""
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
    """Return the smallest number of words that is at least this share of `length` words."""
    return max(1, ceil(share * length - 1e-9))


def _common_substring(passage: str, document: str, share: float, distance: Any) -> tuple[int, int, int] | None:
    """Return `(start, end, common)` of the longest common substring; None if shorter than the share of the passage.

    This is exact: a common substring of at least half the passage contains its middle, which `str.find` finds.
    """
    M, N = len(passage), len(document)
    least = _least_words(share, M)
    spare, middle = M - least, passage[M - least : least]
    best: tuple[int, int, int] | None = None
    position = document.find(middle)
    while position >= 0:
        start, end = position - spare, position + least  # where a verbatim copy with this middle would be
        common = len(middle) + distance.Postfix.similarity(passage[:spare], document[max(0, start) : position])
        common += distance.Prefix.similarity(passage[least:], document[position + len(middle) : end])
        if common == M:
            return start, end, M
        if common >= least and (best is None or common > best[2]):
            # Leave room for the words of the passage that are not in the substring.
            best = max(0, start - spare), min(N, end + spare), common
        position = document.find(middle, position + 1)
    return best


def _closest_span(passage: str, document: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of document words near `start` to `end` with the fewest edits from the passage.

    Approximate matching by dynamic programming (Sellers 1980), which rapidfuzz only has for whole strings. Ties go to
    the span with the most words of the passage, then to the one that begins last, then to the one that ends first, so
    that the span begins and ends with words of the passage.
    """
    room = (end - start) // 6
    low, high = max(0, start - room), min(len(document), end + room)
    codes = np.array([ord(word) for word in document[low:high]])
    # Edits, common words and start are combined in one number, to be minimized.
    common = len(codes) + 1
    edit = common * (len(passage) + 1)
    positions = np.arange(len(codes) + 1, dtype=np.int64)
    costs = len(codes) - positions  # (region + 1,): the first 0 words of the passage against spans that end here
    for code in map(ord, passage):
        substitution = costs[:-1] + np.where(codes == code, -common, edit)
        costs = costs + edit
        np.minimum(costs[1:], substitution, out=costs[1:])
        # An inserted word costs one edit.
        costs = np.minimum.accumulate(costs - edit * positions) + edit * positions
    last = int(np.argmin(costs))
    first = len(codes) - int(costs[last]) % common
    # With thresholds far below the paper's, the empty span can be the closest one.
    return (low + first, low + last) if first < last else (start, end)


def _characters(document: str, start: int, end: int, passage: str) -> tuple[int, int]:
    """Return the character span of the words from `start` to `end`, with the passage's punctuation around them."""
    (_, spans), (_, passage_spans) = word_spans(document), word_spans(passage)
    first, last = int(spans[start, 0]), int(spans[end - 1, 1])
    extra_start = _count_shared(reversed(passage[: passage_spans[0, 0]]), reversed(document[:first]))
    extra_end = _count_shared(passage[passage_spans[-1, 1] :], document[last:])
    return first - extra_start, last + extra_end


def _count_shared(passage: Iterable[str], document: Iterable[str]) -> int:
    """Count the characters of the document that match the passage's punctuation, ignoring white space."""
    marks = (character.translate(_PLAIN) for character in passage if not character.isspace())
    count, mark = 0, next(marks, None)
    for length, character in enumerate(document, start=1):
        if character.isspace():
            continue
        if mark is None or character.translate(_PLAIN) != mark:
            break
        count, mark = length, next(marks, None)
    return count
