"""Needle and Passkey: find one sentence anywhere in a long text (LongEmbed, Zhu et al. 2024)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ..common.language import Counter, is_visible, token_counter
from .collection import CollectionParts, PositionedCollection, between

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Context lengths of LongEmbed, in tokens."""

PASSKEY_BACKGROUND = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_FIRST_NAMES = (
    "Ada Amir Bela Boris Carla Chen Dana Diego Elena Emil Farah Felix Grace Hana Hugo Ines Ivan Jana Jonas Kira "
    "Lars Lena Marco Mina Nadia Nils Olga Omar Paula Pedro Quinn Rosa Ravi Sara Sven Tara Tomas Ulla Vera Yusuf"
)
_LAST_NAMES = (
    "Abbott Becker Costa Dahl Eriksen Fischer Garcia Haddad Ito Jensen Kaya Lopez Meyer Novak Okafor Park Quist "
    "Rossi Silva Tanaka Ueda Vogel Weber Xu Young Zieba Brandt Castro Duarte Engel"
)
_PLACES = ("Bel Cor Dun Esk Fal Gar Hol Ist Kel Lor Mar Nor Ost Pel Rov Sul", "a e i o", "vaar mond wick thal nia ros")
_SIGHTS = {
    "army": "a collection of clay figures that guards the grave of {place}'s first queen",
    "bridge": "a stone crossing of nine arches, built by monks without any mortar",
    "clock": "a water-driven timepiece that has struck thirteen at noon since it was repaired",
    "garden": "a park of dwarf trees, planted on the roof of an old salt store",
    "gate": "the last remnant of a city wall that was pulled down for a railway",
    "manuscript": "a medical handbook written in two alphabets on birch bark",
    "mask": "a face of beaten copper worn by dancers at the end of winter",
    "mill": "a tide mill that ground flour for the fleet until its pond silted up",
    "stone": "a boulder with carved footprints on which judges were sworn in",
    "tower": "a lighthouse that stands forty kilometers from the nearest shore",
}

Needle = tuple[str, str]
"""A query and the text that answers it."""


def needle(
    background: str | Iterable[str],
    needles: Sequence[Needle] | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    queries: int = 50,
    documents: int = 100,
    repeat: bool = False,
    tokenizer: Any = None,
    seed: int = 0,
    name: str = "needle",
) -> PositionedCollection:
    """Build documents of given lengths that each contain one sentence (the needle) that answers a query.

    Each document is the beginning of the background, truncated at a word to the given length. The needle is inserted
    between two sentences of the background, near a random token. Documents without a query contain a needle for another
    query. White space is replaced by single spaces.

    Topics and qrels have a variant for each length ("256", ...). `candidates(pool=...)` returns the documents to
    rerank.

    Args:
        background: a text, or consecutive texts, such as those of a collection.
        needles: distinct pairs of a query and the sentence that answers it; None generates them (`invented_needles`).
        lengths: the lengths of documents in tokens.
        queries: the number of queries for each length.
        documents: the number of documents for each length.
        repeat: repeat the background if it is too short.
        tokenizer: counts the tokens of the lengths, see `token_counter`.
        seed: the random seed; the same seed gives the same bytes.
        name: the name of the collection.

    Raises:
        ValueError: if there are not enough needles or background, or a needle is blank or occurs in the background.

    Example:
        `ld.needle(open("essays.txt").read(), lengths=(512, 4096))`
    """
    count = token_counter(tokenizer)
    total = len(lengths) * documents
    pairs = invented_needles(total, seed) if needles is None else list(needles)
    distinct = len(set(pairs[:total]))
    for valid, message in (
        (1 <= queries <= documents, f"queries={queries} must be at least 1 and at most documents={documents}"),
        (lengths and len(set(lengths)) == len(lengths), f"lengths={lengths!r} must be distinct numbers of tokens"),
        (distinct == total, f"documents={documents} of each length need {total} distinct needles, not {distinct}"),
        (all(is_visible(text) for _, text in pairs), "needles= must not have a blank text"),
    ):
        if not valid:
            raise ValueError(message)
    source = _Background(background, max(lengths), repeat, count)
    texts: dict[str, dict[str, str]] = {}
    topics: list[tuple[str, str]] = []
    gold: list[tuple[Any, ...]] = []
    splits: dict[str, list[str]] = {str(length): [] for length in lengths}
    for (query, text), (length, number) in zip(pairs, product(lengths, range(documents)), strict=False):
        docno, qid = f"{length}-{number}", f"q{length}-{number}"
        document, start, tokens = source.document(random.Random(f"{seed}/{docno}"), text, length)
        texts[docno] = {"docno": docno, "text": document}
        if number < queries:
            topics.append((qid, query))
            splits[str(length)].append(qid)
            [first] = count([document[:start]])
            gold.append((qid, docno, start, start + len(text), first, tokens, "uniform", ""))
    parts = CollectionParts(
        texts,
        pd.DataFrame(topics, columns=["qid", "query"]),
        pd.DataFrame([(qid, docno, 1) for qid, docno, *_ in gold], columns=["qid", "docno", "label"]),
        gold,
        splits,
        groups={docno: docno.partition("-")[0] for docno in texts},
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, papers=("zhu-2024-longembed",))


def passkey(
    background: str | Iterable[str] = PASSKEY_BACKGROUND,
    *,
    lengths: Sequence[int] = LENGTHS,
    queries: int = 50,
    documents: int = 100,
    repeat: bool = True,
    tokenizer: Any = None,
    seed: int = 0,
    name: str = "passkey",
) -> PositionedCollection:
    """Build documents of given lengths that each contain a pass key, for "what is the passkey for ...?".

    The arguments are those of `needle`; the default background repeats a few meaningless sentences.
    """
    sizes: dict[str, Any] = {"lengths": lengths, "queries": queries, "documents": documents, "repeat": repeat}
    keys = passkeys(len(lengths) * documents, seed)
    return needle(background, keys, **sizes, tokenizer=tokenizer, seed=seed, name=name)


def invented_needles(count: int, seed: int = 0) -> list[Needle]:
    """Generate questions about fictional sights and the sentences that answer them; at most 3840."""
    places = ["".join(parts) for parts in product(*(part.split() for part in _PLACES))]
    sample = _draw(list(product(places, _SIGHTS)), count, seed, "needles")
    return [
        (f"What is the {place} {sight}?", f"The {place} {sight} is {_SIGHTS[sight].format(place=place)}.")
        for place, sight in sample
    ]


def passkeys(count: int, seed: int = 0) -> list[Needle]:
    """Generate queries for pass keys of five digits and the texts that contain them; at most 1200."""
    names = [" ".join(parts) for parts in product(_FIRST_NAMES.split(), _LAST_NAMES.split())]
    people = _draw(names, count, seed, "names")
    keys = _draw(range(10000, 100000), count, seed, "keys")
    text = "{0}'s pass key is {1}. Remember it. {1} is the pass key for {0}."
    pairs = zip(people, keys, strict=False)
    return [(f"what is the passkey for {person}?", text.format(person, key)) for person, key in pairs]


class _Background:
    """A text, split into words so that it can be truncated to any number of tokens."""

    def __init__(self, background: str | Iterable[str], longest: int, repeat: bool, count: Counter) -> None:
        texts = [background] if isinstance(background, str) else background
        words: list[str] = []
        for text in texts:
            words.extend(text.split())
            if len(words) > longest:  # a word has at least one token
                break
        distinct = list(dict.fromkeys(words))
        # With the preceding space, which is part of the word in some tokenizers.
        sizes = dict(zip(distinct, count([f" {word}" for word in distinct]), strict=True))
        tokens = np.array([sizes[word] for word in words])
        if repeat:
            rounds = max(1, -(-longest // max(1, int(tokens.sum()))))
            words, tokens = words * rounds, np.tile(tokens, rounds)
        self._words, self._count = words, count
        self._tokens_before = np.concatenate([[0], np.cumsum(tokens)])
        # Not from `common.language`, so that published positions do not change.
        ends = [word.rstrip("\"')]").endswith((".", "!", "?")) for word in words]
        self._sentences = np.concatenate([[0], np.flatnonzero(ends) + 1])

    def document(self, rng: random.Random, text: str, length: int) -> tuple[str, int, int]:
        """Insert `text` into a document of at most `length` tokens; return document, offset and number of tokens."""
        room, supply = length - self._count([text])[0], self._tokens_before[-1]
        if not 1 <= room <= supply:
            reason = f"{text!r} has {length - room} tokens, the background {supply}"
            advice = "add background, or set repeat=True" if room >= 1 else "use greater lengths"
            raise ValueError(f"length={length} is not possible: {reason}; {advice}")
        words = int(np.searchsorted(self._tokens_before, room, side="right")) - 1
        starts = self._sentences[self._sentences <= words]
        place = int(starts[np.abs(self._tokens_before[starts] - between(rng, 0, room)).argmin()])
        while True:
            before, after = " ".join(self._words[:place]), " ".join(self._words[place:words])
            document = " ".join(filter(None, (before, text, after)))
            # With tokenizers that encode spaces, lengths of words need not add up to the length of the text.
            [tokens] = self._count([document])
            if tokens <= length:
                break
            words = max(0, words - (tokens - length))
            place = min(place, words)
        if document.count(text) > 1:
            raise ValueError(f"the background must not contain the needle {text!r}")
        return document, len(before) + bool(before), tokens


def _draw(population: Sequence[Any], count: int, seed: int, purpose: str) -> list[Any]:
    rng = random.Random(f"{seed}/{purpose}")
    rest, sample = list(population), []
    for _ in range(min(count, len(rest))):
        place = between(rng, 0, len(rest) - 1)
        rest[place], rest[-1] = rest[-1], rest[place]
        sample.append(rest.pop())
    return sample
