"""Where in a document a passage stands, though one of the two may have been edited since.

Source: Boytsov et al. 2022 (3.3.3; 2025, C.4, has no figures), who match passages of MS MARCO with later downloads of
the documents they come from: first by the longest common substring, then by the longest common subsequence. The paper
leaves open what the units are, how far windows are apart and how candidates are found. Here units are words (accents,
letter case, punctuation and white space do not count), windows begin a tenth of a passage apart, and what is skipped
cannot match.

Shapes: M words of a passage, N words of a document.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import ceil
from typing import Any

import numpy as np

from ..common.arguments import argument, validate
from ..common.files import import_extra
from ..common.language import COPIED_WORD, INVISIBLE

_ASCII_WORD = re.compile(r"[a-z0-9_]+")
_DROPPED = re.compile(rf"[{INVISIBLE}]")

_PLAIN = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2010\u2011\u2012\u2013\u2014", '\'\'\'"""""-----'
)
"""Quotation marks and dashes as they are typed: publishing systems change them back and forth."""

_OTHER = "\x00"
"""Stands for all words of a document that no passage has."""


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
    passage's words. Failing that, it is found in the window of the document, `slack` times as long as the passage, with
    which it has the longest common subsequence, if that has at least `subsequence` of its words. Of several places with
    the same share the first counts. The ends of the match are those of the span that differs from the passage by the
    fewest words inserted, deleted and substituted, and begins and ends with a word of the passage.

    Short passages match by chance, since all texts share phrases: a passage with fewer than `min_words` words is never
    found, one with fewer than `min_words_edited` only verbatim. The defaults are the lengths from which on such chance
    matches become rare in `tests/benchmarks/bench_positions.py`; a nearly equal passage is a match at any length.

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
        of_passages = [compared_words(passage) for passage in passages]
        # One character for each word, so that what is written for strings compares words.
        codes = {word: chr(i) for i, word in enumerate(dict.fromkeys(chain.from_iterable(of_passages)), start=1)}
        text = "".join([codes.get(word, _OTHER) for word in compared_words(document)])
        found: list[Match | None] = []
        for passage, own in zip(passages, of_passages, strict=True):
            place = self._place("".join([codes[word] for word in own]), text, rapidfuzz)
            if place is None:
                found.append(None)
                continue
            start, end, common, method = place
            found.append(Match(*_characters(document, start, end, passage), common / len(own), method))
        return found

    def too_short(self, passage: str) -> bool:
        """Return whether the passage has so few words that it is never found."""
        return len(compared_words(passage)) < self.min_words

    def _place(self, passage: str, document: str, rapidfuzz: Any) -> tuple[int, int, int, str] | None:
        """Return the passage's place `(start, end)` in words, how many words are common, and the method."""
        if len(passage) < self.min_words:
            return None
        edited = len(passage) >= self.min_words_edited
        method = "substring"
        found = _common_substring(passage, document, self.substring if edited else 1.0, rapidfuzz.distance)
        if found is None and edited:
            method, found = "subsequence", self._common_subsequence(passage, document, rapidfuzz)
        if found is None:
            return None
        start, end, common = found
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
            score_cutoff=_needed(self.subsequence, M),
        )
        if best is None:
            return None
        _, common, number = best
        return starts[number], min(starts[number] + size, N), int(common)


def compared_words(text: str) -> list[str]:
    r"""Return the words of a text as they are compared: in small letters, without accents and invisible characters.

    Example:
        >>> compared_words("Café-au-lait, co\u00adoperation; 猫犬")
        ['cafe', 'au', 'lait', 'cooperation', '猫', '犬']
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return [_folded(word) for word in COPIED_WORD.findall(text)]


@lru_cache(maxsize=2**16)
def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()
    decomposed = unicodedata.normalize("NFKD", _DROPPED.sub("", word))
    return unicodedata.normalize("NFKC", _DROPPED.sub("", decomposed)).casefold()


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters of each of `compared_words(text)`."""
    found = _ASCII_WORD.finditer(text.lower()) if text.isascii() else COPIED_WORD.finditer(text)
    return (match.span() for match in found)


def _needed(share: float, length: int) -> int:
    """Return the fewest of `length` words that are at least the share."""
    return max(1, ceil(share * length - 1e-9))


def _common_substring(passage: str, document: str, share: float, distance: Any) -> tuple[int, int, int] | None:
    """Return `(start, end, common)` of the longest common substring; None if shorter than the share of the passage.

    Exact without an index: what is common and long enough contains the passage's middle, for which `str.find` looks.
    """
    M, N = len(passage), len(document)
    needed = _needed(share, M)
    spare, middle = M - needed, passage[M - needed : needed]
    best: tuple[int, int, int] | None = None
    at = document.find(middle)
    while at >= 0:
        start, end = at - spare, at + needed  # of a verbatim copy with this middle
        common = len(middle) + distance.Postfix.similarity(passage[:spare], document[max(0, start) : at])
        common += distance.Prefix.similarity(passage[needed:], document[at + len(middle) : end])
        if common == M:
            return start, end, M
        if common >= needed and (best is None or common > best[2]):
            # Room for the words of the passage that are not in the substring.
            best = max(0, start - spare), min(N, end + spare), common
        at = document.find(middle, at + 1)
    return best


def _closest_span(passage: str, document: str, start: int, end: int) -> tuple[int, int]:
    """Return the words of the document, near `start` to `end`, that differ from the passage by the fewest edits.

    Approximate matching by dynamic programming (Sellers 1980), which rapidfuzz has only for whole strings. Of spans
    with equally few edits the one with the most words of the passage counts, then the one that begins last, then the
    one that ends first: so that there is no word at the ends that the passage lacks.
    """
    room = (end - start) // 6
    low, high = max(0, start - room), min(len(document), end + room)
    codes = np.array([ord(word) for word in document[low:high]])
    # Edits, common words and start in one number, of which the smallest wins.
    common = len(codes) + 1
    edit = common * (len(passage) + 1)
    at = np.arange(len(codes) + 1, dtype=np.int64)
    costs = len(codes) - at  # (region + 1,): the passage's first 0 words against spans that end here
    for code in map(ord, passage):
        substituted = costs[:-1] + np.where(codes == code, -common, edit)
        costs = costs + edit
        np.minimum(costs[1:], substituted, out=costs[1:])
        # Words inserted: each costs one edit more than the span without it.
        costs = np.minimum.accumulate(costs - edit * at) + edit * at
    last = int(np.argmin(costs))
    first = len(codes) - int(costs[last]) % common
    # With thresholds far below the paper's, nothing can be closer to the passage than no word at all.
    return (low + first, low + last) if first < last else (start, end)


def _characters(document: str, start: int, end: int, passage: str) -> tuple[int, int]:
    """Return the characters of the words from `start` to `end`, with the punctuation around that the passage has."""
    found, of_passage = list(islice(_spans(document), start, end)), list(_spans(passage))
    before = _shared(reversed(passage[: of_passage[0][0]]), reversed(document[: found[0][0]]))
    after = _shared(passage[of_passage[-1][1] :], document[found[-1][1] :])
    return found[0][0] - before, found[-1][1] + after


def _shared(of_passage: Iterable[str], of_document: Iterable[str]) -> int:
    """Count the characters of the document that are the passage's punctuation, white space apart."""
    wanted = (character.translate(_PLAIN) for character in of_passage if not character.isspace())
    count, due = 0, next(wanted, None)
    for read, character in enumerate(of_document, start=1):
        if character.isspace():
            continue
        if due is None or character.translate(_PLAIN) != due:
            break
        count, due = read, next(wanted, None)
    return count
