"""FarRelevant: documents of random passages with one relevant passage at a chosen position.

Documents are generated when they are read, each from its own random numbers. Only their names need memory, and a
document does not depend on the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import argument, check_arguments, validate
from ..common.language import Counter, digest, token_counter
from .collection import CollectionParts, PositionedCollection, between
from .passages import PassagePool, read_source
from .rows import qrels_frame

PASSAGE_POSITIONS = ("early", "uniform", "far")

_ATTEMPTS = 50  # random draws before the whole pool is searched for a suitable passage


def far_relevant(
    passages: Any,
    topics: pd.DataFrame | None = None,
    qrels: pd.DataFrame | None = None,
    *,
    variant: str | None = None,
    position: str = "far",
    min_offset: int = 512,
    within: int | None = None,
    max_doc_len: int = 1431,
    extra_passage: bool = True,
    tokenizer: Any = None,
    unfit: str = "raise",
    min_label: int = 1,
    splits: Mapping[str, float] | None = None,
    text_field: str | Sequence[str] = "text",
    seed: int = 0,
    name: str = "far-relevant",
) -> PositionedCollection:
    """Build a collection of long documents with one relevant passage each from a passage collection.

    For each relevant passage of each topic, with C tokens (Boytsov et al. 2025, Section C.2):

    1. draw the document length D from `min_offset + C` to `max_doc_len`;
    2. draw distinct non-relevant passages until they have at least `min_offset` tokens;
    3. draw more of them until there are at least D - C tokens;
    4. shuffle the passages of step 3 with the relevant one, and put those of step 2 in front.

    The authors draw passages until the length is exceeded, which they call a bug: documents have one passage more than
    intended, and about 5 % of their documents are longer than `max_doc_len`. With `extra_passage=False`, step 3 stops
    before the length is exceeded, and no document is longer than `max_doc_len`.

    Filler passages and document lengths depend on the seed but not on `position`, so that collections with the same
    seed only differ in the position of the relevant passage.

    The qrels are complete: a document is relevant for all topics for which its passage is relevant.

    Args:
        passages: a dataset, the name of a dataset (of PyTerrier or ir_datasets), or the passages: a frame or
            re-iterable dicts with `docno` and text.
        topics: `qid, query` and optionally `split`; None uses those of the dataset. Topics without relevant passages
            are left out.
        qrels: `qid, docno, label`; None uses those of the dataset.
        variant: the variant of the dataset's topics and qrels.
        position: the position of the relevant passage. "far": at least `min_offset` tokens after the start; "uniform":
            anywhere between filler passages; "early": it ends within the first `within` tokens, or is at the start if
            it is longer.
        min_offset: in tokens; 512 as in the paper, the maximum input length of BERT.
        within: in tokens; None uses `min_offset`.
        max_doc_len: in tokens; 1431 as in the paper, three windows of 477.
        extra_passage: reproduce the authors' bug, for comparable collections.
        tokenizer: counts the tokens of all lengths, see `token_counter`; "bert-base-uncased" in the paper. If lengths
            of passages do not add up to the length of a document, whole documents are counted, which takes several
            times as long. Offsets are then still exact, and lengths are exact within about one token per passage.
        unfit: what to do with relevant passages that are missing from the collection, empty, or too long for
            `max_doc_len`: "raise" or "skip".
        min_label: the smallest label that counts as relevant.
        splits: name -> share of the topics. Topics with a common relevant passage or the same query stay together.
        text_field: one or several fields of the passages, joined by a space.
        seed: the random seed; the same seed gives the same bytes.
        name: the name of the collection.

    Raises:
        ValueError: if an argument is out of range, no passage is relevant, a relevant passage is unfit, no filler is
            left, lengths or splits are impossible, or two documents would have the same docno.

    Example:
        `far_relevant(pt.get_dataset("irds:msmarco-passage/train"), tokenizer="bert-base-uncased")`
    """
    recipe = DocumentRecipe(position, min_offset, within, max_doc_len, extra_passage, seed)
    check_arguments("str", "far_relevant", choices=("raise", "skip"), unfit=unfit)
    count = token_counter(tokenizer)
    source, topics, relevant = read_source(passages, topics, qrels, variant, min_label)
    longest, qid_of = max_doc_len - min_offset, dict(zip(relevant["docno"], relevant["qid"], strict=True))

    def check(docno: str, tokens: int) -> None:
        if unfit == "raise" and not 1 <= tokens <= longest:
            raise _misfit(docno, qid_of[docno], f"{tokens} tokens, not 1 to {longest}")

    pool = PassagePool(source, count=count, text_field=text_field, docnos=qid_of, check=check)
    relevant = pool.locate(relevant)
    labels = relevant[relevant["passage"] >= 0].drop_duplicates(["qid", "digest"])
    qids_of: dict[Any, list[str]] = labels.groupby("digest", sort=False)["qid"].agg(list).to_dict()
    usable = _usable_passages(relevant, longest, unfit)
    docnos = usable["qid"] + "_" + usable["docno"]
    if docnos.duplicated().any():
        duplicate = docnos[docnos.duplicated()].iloc[0]
        raise ValueError(f"two documents have the docno {duplicate!r} (qid_passage): rename topics or passages")
    # Filler that is relevant for another topic would make a document relevant for it, but unjudged.
    is_relevant = np.isin(pool.digests, list(qids_of))
    filler = np.flatnonzero((pool.tokens > 0) & ~is_relevant).astype(np.int32)
    if not len(filler):
        raise ValueError(
            f"none of {len(pool)} passages can be used as filler: {is_relevant.sum()} are relevant for a topic, the "
            f"others are empty. Use fewer topics, by variant= or topics="
        )
    documents = FarDocuments(recipe, pool, qids_of, dict(zip(docnos, usable["passage"], strict=True)), filler, count)
    qrels = qrels_frame((qid, docno, 1) for docno in documents for qid in documents.qids(docno))
    topics = topics[topics["qid"].isin(qrels["qid"])].reset_index(drop=True)
    if splits is not None:
        groups = qrels.groupby("docno", sort=False)["qid"].agg(list).tolist()
        groups += topics.groupby(topics["query"].map(digest), sort=False)["qid"].agg(list).tolist()
        topics = topics.assign(split=by_split(topics["qid"].tolist(), groups, splits, seed))
    variants = splits or (dict.fromkeys(topics["split"]) if "split" in topics else {})
    parts = CollectionParts(
        documents,
        topics,
        qrels,
        documents.gold,
        splits={split: topics["qid"][topics["split"] == split].tolist() for split in variants},
        lengths=documents.lengths,
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, papers=("boytsov-2025-positional",))


def _usable_passages(relevant: pd.DataFrame, longest: int, unfit: str) -> pd.DataFrame:
    """Return the relevant passages that fit into documents; of those with the same text, the first."""
    missing = relevant[relevant["passage"] < 0]
    if len(missing) and unfit == "raise":
        raise _misfit(missing["docno"].iloc[0], missing["qid"].iloc[0], "it is not in the collection")
    usable = relevant[relevant["tokens"].between(1, longest)]
    if usable.empty:
        count = len(relevant)
        raise ValueError(f"{count} of {count} relevant passages are unfit: none has 1 to {longest} tokens")
    return usable.drop_duplicates(["qid", "digest"])


def _misfit(docno: str, qid: str, why: str) -> ValueError:
    """Return the error for a relevant passage that cannot be used."""
    return ValueError(
        f"relevant passage {docno!r} of topic {qid!r} is unfit: {why}; set unfit='skip' to leave such passages out"
    )


@dataclass(frozen=True)
class DocumentRecipe:
    """The arguments of `far_relevant` that determine the documents."""

    position: str = argument("far", choices=PASSAGE_POSITIONS)
    min_offset: int = argument(512, at_least=0)
    within: int | None = argument(None, at_least=1)
    max_doc_len: int = argument(1431, above="min_offset")
    extra_passage: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        validate(self, "far_relevant")

    @property
    def beginning(self) -> int:
        """The number of tokens within which an early passage ends."""
        return self.min_offset if self.within is None else self.within


@dataclass(frozen=True, eq=False, repr=False)
class FarDocuments(Mapping[str, Mapping[str, str]]):
    """The documents of a FarRelevant collection, docno -> `docno, text`, generated when they are read.

    Passages are indices into the pool, or digests where passages with the same text count as one.
    """

    recipe: DocumentRecipe
    pool: PassagePool
    qids_of: Mapping[int, list[str]]  # digest -> topics for which the passage is relevant
    relevant: Mapping[str, int]  # docno -> relevant passage
    filler: np.ndarray  # possible filler passages
    count: Counter

    @cached_property
    def lengths_add_up(self) -> bool:
        """Whether a document is as long as its passages together, tested on a sample of pairs."""
        # WordPiece tokens do not include white space, so lengths add up; byte-level tokens include the preceding space.
        rng = random.Random(0)
        pairs = [(self._pick(rng), self._pick(rng)) for _ in range(256)]
        lengths = self.count([self._text(pair) for pair in pairs])
        return lengths == [int(self.pool.tokens[list(pair)].sum()) for pair in pairs]

    def __len__(self) -> int:
        return len(self.relevant)

    def __iter__(self) -> Iterator[str]:
        return iter(self.relevant)

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return {"docno": docno, "text": self._text(self._plan(docno)[0])}

    def qids(self, docno: str) -> list[str]:
        """Return the topics for which a document is relevant."""
        return self.qids_of[int(self.pool.digests[self.relevant[docno]])]

    def pieces(self, docno: str) -> list[str]:
        """Return the docnos of a document's passages in order."""
        return [self.pool.name(piece) for piece in self._plan(docno)[0]]

    def gold(self) -> Iterator[tuple[Any, ...]]:
        """Generate the rows of `PositionedCollection.gold`."""
        for docno, passage in self.relevant.items():
            pieces, slot = self._plan(docno)
            start = int(self.pool.characters[pieces[:slot]].sum()) + slot  # with a space between passages
            end = start + int(self.pool.characters[passage])
            places = (start, end, self._length(pieces[:slot]), self._length(pieces))
            for qid in self.qids(docno):
                yield (qid, docno, *places, self.recipe.position, self.pool.name(passage))

    def lengths(self) -> Iterator[int]:
        """Count the tokens of each document."""
        return (self._length(self._plan(docno)[0]) for docno in self)

    def _text(self, pieces: Iterable[int]) -> str:
        return " ".join(map(self.pool.text, pieces))

    def _length(self, pieces: list[int]) -> int:
        return int(self.pool.tokens[pieces].sum()) if self.lengths_add_up else self.count([self._text(pieces)])[0]

    def _plan(self, docno: str) -> tuple[list[int], int]:
        """Choose the passages of a document; return them and the index of the relevant one."""
        recipe, tokens, passage = self.recipe, self.pool.tokens, self.relevant[docno]
        rng, used, size = random.Random(f"{recipe.seed}/{docno}"), set[int](), int(tokens[passage])
        budget = between(rng, recipe.min_offset + size, recipe.max_doc_len) - size
        pieces: list[int] = []
        total = 0
        while total < recipe.min_offset:
            pieces.append(self._draw(rng, used, None if recipe.extra_passage else recipe.max_doc_len - size - total))
            total += int(tokens[pieces[-1]])
        while total < budget:
            piece = self._draw(rng, used)
            total += int(tokens[piece])
            if total > budget and not recipe.extra_passage:
                break
            pieces.append(piece)
        offsets = np.cumsum([0, *tokens[pieces]])  # tokens before each possible place
        first, last = 0, len(pieces)
        if recipe.position == "far":
            first = int(np.searchsorted(offsets, recipe.min_offset))
        elif recipe.position == "early":
            last = max(0, int(np.searchsorted(offsets, recipe.beginning - size, side="right")) - 1)
        slot = between(rng, first, last)
        if recipe.position == "far" and not self.lengths_add_up:
            while self._length(pieces[:slot]) < recipe.min_offset:
                pieces.insert(0, self._draw(rng, used))
                slot += 1
        if recipe.position == "early" and not self.lengths_add_up:
            while slot and self._length([*pieces[:slot], passage]) > recipe.beginning:
                slot -= 1
        return [*pieces[:slot], passage, *pieces[slot:]], slot

    def _draw(self, rng: random.Random, used: set[int], longest: int | None = None) -> int:
        """Draw filler of at most `longest` tokens that is not `used`; None for no limit."""
        for index in self._candidates(rng):
            value = int(self.pool.digests[index])
            if value not in used and (longest is None or self.pool.tokens[index] <= longest):
                used.add(value)
                return index
        limit = "" if longest is None else f" of at most {longest} tokens"
        shortage = f"none of {len(self.filler)} filler passages is left{limit}"
        raise ValueError(f"a document cannot be completed: {shortage}; add passages, or lower max_doc_len")

    def _candidates(self, rng: random.Random) -> Iterator[int]:
        for _ in range(_ATTEMPTS):
            yield self._pick(rng)
        # The pool is small or nearly used up: search all of it, from a random start.
        start = between(rng, 0, len(self.filler) - 1)
        yield from chain(self.filler[start:].tolist(), self.filler[:start].tolist())

    def _pick(self, rng: random.Random) -> int:
        return int(self.filler[between(rng, 0, len(self.filler) - 1)])


def by_split(qids: Sequence[str], groups: Sequence[Sequence[str]], splits: Mapping[str, float], seed: int) -> list[str]:
    """Assign topics to splits (name -> share) at random, and return the split of each.

    Topics of a group stay together; overlapping groups are merged. Shares need not add up to 1.
    """
    if min(splits.values(), default=0) <= 0:
        raise ValueError(f"splits={splits!r} must have positive shares")
    group_of = {qid: [qid] for qid in qids}
    for first, *others in groups:
        for other in others:
            if group_of[first] is not group_of[other]:
                smaller, larger = sorted((group_of[first], group_of[other]), key=len)
                larger.extend(smaller)
                group_of.update(dict.fromkeys(smaller, larger))
    clusters = list({id(group): group for group in group_of.values()}.values())
    random.Random(f"{seed}/splits").shuffle(clusters)
    clusters.sort(key=len, reverse=True)
    size = dict.fromkeys(splits, 0)
    split_of: dict[str, str] = {}
    for group in clusters:
        name = min(splits, key=lambda split: size[split] / splits[split])
        size[name] += len(group)
        split_of.update(dict.fromkeys(group, name))
    empty = [name for name in splits if not size[name]]
    if empty:
        raise ValueError(
            f"splits={dict(splits)!r} leave {', '.join(empty)} empty, because {len(clusters[0])} of {len(qids)} topics "
            f"share relevant passages: use fewer splits, or leave out qrels"
        )
    return [split_of[qid] for qid in qids]
