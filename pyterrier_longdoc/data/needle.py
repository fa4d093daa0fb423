"""Needle and Passkey: one sentence to be found in a long text, at any place of it (LongEmbed, Zhu et al. 2024).

The published sets have, for each of eight context lengths from 256 to 32,768 tokens, 100 documents and 50 queries; all
documents of a length are the same text, cut, with another sentence put in.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.language import Counter, token_counter
from pyterrier_longdoc.data.jsonl import checked_fields, read_jsonl
from pyterrier_longdoc.data.positioned import Parts, PositionedCollection, gold_frame
from pyterrier_longdoc.data.recipe import between

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
_THINGS = {
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
"""A query, and the text that answers it."""


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
    """Builds documents of set lengths with one sentence each that answers a query.

    Each document is the beginning of the background, cut at a word so that it has as many tokens as its length allows,
    with a sentence of its own between two sentences of the background, those nearest to a token drawn at random.
    Documents without a query have a sentence that answers another one. White space becomes single spaces.

    Topics and qrels have a variant for each length ("256", ...); `candidates(pool=...)` gives the documents to rerank.

    Args:
        background: a text, or texts that follow one another, such as those of a collection.
        needles: queries and the sentences that answer them, all different; None invents them (`invented_needles`).
        lengths: of documents, in tokens.
        queries: for each length.
        documents: for each length.
        repeat: start over at the end of a background that is too short.
        tokenizer: in whose tokens the lengths are, see `token_counter`.
        seed: the same seed gives the same bytes.
        name: of the collection.

    Raises:
        ValueError: if there are not enough needles or background, a needle is blank or stands in the background too,
            or a length has no room for a needle.
    """
    count = token_counter(tokenizer)
    wanted = len(lengths) * documents
    if not 1 <= queries <= documents:
        raise ValueError(f"queries={queries} must be at least 1 and at most documents={documents}")
    if not lengths or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths={lengths!r} must be different numbers of tokens")
    given = invented_needles(wanted, seed) if needles is None else list(needles)
    if len(set(given[:wanted])) < wanted:
        raise ValueError(f"{wanted} different needles are needed, but there are {len(set(given[:wanted]))}")
    if not all(text.strip() for _, text in given):
        raise ValueError("needles hold one without text")
    source = _Background(background, max(lengths), repeat, count)
    parts = _parts(source, given, lengths, queries, documents, seed)
    return PositionedCollection(name, parts, count=count, variants=list(parts.splits))


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
    """Builds documents of set lengths with somebody's pass key each, for "what is the passkey for ...?".

    Args:
        background: a text; by default a few words without meaning, again and again.
        lengths: as for `needle`, like all other arguments.
        queries: for each length.
        documents: for each length.
        repeat: start over at the end of a background that is too short.
        tokenizer: in whose tokens the lengths are.
        seed: the same seed gives the same bytes.
        name: of the collection.

    Raises:
        ValueError: if there is not enough background, a length has no room for a pass key, or more documents are
            wanted than there are names.
    """
    given = passkeys(len(lengths) * documents, seed)
    return needle(
        background,
        given,
        lengths=lengths,
        queries=queries,
        documents=documents,
        repeat=repeat,
        tokenizer=tokenizer,
        seed=seed,
        name=name,
    )


def invented_needles(count: int, seed: int = 0) -> list[Needle]:
    """Questions about sights that do not exist, and the sentences that answer them; at most 3840.

    Raises:
        ValueError: if there are not as many.
    """
    places = ["".join(parts) for parts in product(*(part.split() for part in _PLACES))]
    drawn = _draw(list(product(places, _THINGS)), count, seed, "needles")
    return [
        (f"What is the {place} {thing}?", f"The {place} {thing} is {_THINGS[thing].format(place=place)}.")
        for place, thing in drawn
    ]


def passkeys(count: int, seed: int = 0) -> list[Needle]:
    """Queries for pass keys of five digits, and the three sentences that give one away; at most 1200.

    Raises:
        ValueError: if there are not as many.
    """
    names = [" ".join(parts) for parts in product(_FIRST_NAMES.split(), _LAST_NAMES.split())]
    people = _draw(names, count, seed, "names")
    keys = _draw(range(10000, 100000), count, seed, "keys")
    return [
        (
            f"what is the passkey for {person}?",
            f"{person}'s pass key is {key}. Remember it. {key} is the pass key for {person}.",
        )
        for person, key in zip(people, keys, strict=True)
    ]


def read_longembed(
    source: str | Path | Mapping[str, Iterable[Mapping[str, Any]]], *, tokenizer: Any = None, name: str = "longembed"
) -> PositionedCollection:
    """Reads a set of the published LongEmbed: `needle`, `passkey`, or one of its real tasks.

    Topics and qrels have a variant for each context length. Positions are not published, so `gold` is empty.

    Args:
        source: a folder with `corpus`, `queries` and `qrels` as `.jsonl` or `.jsonl.gz`; or these three as dicts, such
            as `datasets.load_dataset("dwzhu/LongEmbed", "needle")` gives them. Their fields are `doc_id, text`,
            `qid, text` and `qid, doc_id`; `context_length` (of documents and queries) may be absent.
        tokenizer: for statistics, see `token_counter`.
        name: of the collection.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a line is malformed, or an id is there twice.
    """
    corpus = _unique(_longembed_rows(source, "corpus", ("doc_id", "text")), "doc_id")
    queries = _unique(_longembed_rows(source, "queries", ("qid", "text")), "qid")
    qrels = [(row["qid"], row["doc_id"], 1) for _, row in _longembed_rows(source, "qrels", ("qid", "doc_id"))]
    splits: dict[str, list[str]] = {}
    for qid, row in queries.items():
        if "context_length" in row:
            splits.setdefault(str(row["context_length"]), []).append(qid)
    parts = Parts(
        documents={docno: {"docno": docno, "text": row["text"]} for docno, row in corpus.items()},
        topics=pd.DataFrame([(qid, row["text"]) for qid, row in queries.items()], columns=["qid", "query"]),
        qrels=pd.DataFrame(qrels, columns=["qid", "docno", "label"]),
        gold=gold_frame([]),
        splits=splits,
        groups={docno: str(row["context_length"]) for docno, row in corpus.items() if "context_length" in row},
    )
    return PositionedCollection(name, parts, count=token_counter(tokenizer), variants=list(splits))


class _Background:
    """A text in words, so that it can be cut to any number of tokens."""

    def __init__(self, background: str | Iterable[str], longest: int, repeat: bool, count: Counter) -> None:
        texts = [background] if isinstance(background, str) else background
        words: list[str] = []
        for text in texts:
            words.extend(text.split())
            if len(words) > longest:  # a word has at least one token
                break
        if not words:
            raise ValueError("background holds no text")
        tokens = self._tokens(words, count)
        if repeat:
            rounds = max(1, -(-longest // max(1, int(tokens.sum()))))
            words, tokens = words * rounds, np.tile(tokens, rounds)
        self.words, self.count = words, count
        self.tokens_before = np.concatenate([[0], np.cumsum(tokens)])
        ends = [word.rstrip("\"')]").endswith((".", "!", "?")) for word in words]
        self.sentences = np.concatenate([[0], np.flatnonzero(ends) + 1])

    @staticmethod
    def _tokens(words: list[str], count: Counter) -> np.ndarray:
        distinct = list(dict.fromkeys(words))
        # With the space in front that some tokenizers count in.
        sizes = dict(zip(distinct, count([f" {word}" for word in distinct]), strict=True))
        return np.array([sizes[word] for word in words])

    def _sentence_near(self, tokens: int, words: int) -> int:
        """The start of a sentence, in words, that is nearest to a place in tokens, at most `words`."""
        starts = self.sentences[self.sentences <= words]
        return int(starts[np.abs(self.tokens_before[starts] - tokens).argmin()])

    def document(self, rng: random.Random, text: str, length: int) -> tuple[str, int]:
        """A document of at most `length` tokens with `text` in it, and the offset of that.

        Raises:
            ValueError: if there is no room for the text, not enough background, or the text in it.
        """
        room = length - self.count([text])[0]
        if room < 1:
            raise ValueError(f"length={length} has no room for {text!r}, which has {length - room} tokens")
        if self.tokens_before[-1] < room:
            raise ValueError(
                f"length={length} cannot be met: the background has only {self.tokens_before[-1]} tokens; give more of "
                f"it, or repeat=True"
            )
        words = int(np.searchsorted(self.tokens_before, room, side="right")) - 1
        place = self._sentence_near(between(rng, 0, room), words)
        while True:
            before, after = " ".join(self.words[:place]), " ".join(self.words[place:words])
            document = " ".join(filter(None, (before, text, after)))
            # Lengths of words need not add up to that of the text, for tokenizers that see the spaces.
            excess = self.count([document])[0] - length
            if excess <= 0 and document.count(text) > 1:
                raise ValueError(f"the background has {text!r} too; a needle must be in one place only")
            if excess <= 0:
                return document, len(before) + bool(before)
            words = max(0, words - excess)
            place = min(place, words)


def _parts(
    source: _Background, needles: Sequence[Needle], lengths: Sequence[int], queries: int, documents: int, seed: int
) -> Parts:
    texts: dict[str, dict[str, str]] = {}
    topics, gold = [], []
    splits: dict[str, list[str]] = {str(length): [] for length in lengths}
    for (query, text), (length, number) in zip(needles, product(lengths, range(documents)), strict=False):
        docno, qid = f"{length}-{number}", f"q{length}-{number}"
        document, start = source.document(random.Random(f"{seed}/{docno}"), text, length)
        texts[docno] = {"docno": docno, "text": document}
        if number < queries:
            topics.append((qid, query))
            splits[str(length)].append(qid)
            first, total = source.count([document[:start], document])
            gold.append((qid, docno, start, start + len(text), first, total, "uniform", ""))
    return Parts(
        texts,
        pd.DataFrame(topics, columns=["qid", "query"]),
        pd.DataFrame([(row[0], row[1], 1) for row in gold], columns=["qid", "docno", "label"]),
        gold_frame(gold),
        splits,
        groups={docno: docno.partition("-")[0] for docno in texts},
    )


def _draw(population: Sequence[Any], count: int, seed: int, what: str) -> list[Any]:
    if count > len(population):
        raise ValueError(f"{count} {what} are needed, but there are only {len(population)}; ask for fewer documents")
    rng = random.Random(f"{seed}/{what}")
    left, drawn = list(population), []
    for last in range(len(left) - 1, len(left) - 1 - count, -1):
        place = between(rng, 0, last)
        left[place], left[last] = left[last], left[place]
        drawn.append(left[last])
    return drawn


def _longembed_rows(source: Any, part: str, fields: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(source, Mapping):
        folder = Path(source).expanduser()
        files = [file for file in (folder / f"{part}.jsonl", folder / f"{part}.jsonl.gz") if file.is_file()]
        if not files:
            raise FileNotFoundError(f"{folder} holds no {part}.jsonl or {part}.jsonl.gz")
        yield from read_jsonl(files[0], fields)
        return
    if part not in source:
        raise ValueError(f"source lacks {part!r}; it has {list(source)}, and corpus, queries and qrels are needed")
    for number, row in enumerate(source[part], start=1):
        where = f"{part}, row {number}"
        yield where, checked_fields(where, row, fields)


def _unique(rows: Iterable[tuple[str, dict[str, Any]]], field: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for where, row in rows:
        if found.setdefault(row[field], row) is not row:
            raise ValueError(f"{where}: {field} {row[field]!r} is there twice; it must be unique")
    return found
