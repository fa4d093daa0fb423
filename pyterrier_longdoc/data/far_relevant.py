"""FarRelevant: documents of random passages, one of them relevant, at a place of one's choice.

After MS MARCO FarRelevant (Boytsov et al. 2025, Section C.2), for any passage collection:

    collection = far_relevant(pt.get_dataset("irds:msmarco-passage/train"), tokenizer="bert-base-uncased")
    index.index(collection.get_corpus_iter())
    pt.Experiment([...], collection.get_topics(), collection.get_qrels(), [...])

Documents are made when they are read, each from its own random numbers: a collection of half a million documents takes
the memory of one of five thousand, and a document does not depend on which others are made.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.language import Counter, token_counter
from pyterrier_longdoc.data.passages import PassagePool, digest
from pyterrier_longdoc.data.positioned import Parts, PositionedCollection
from pyterrier_longdoc.data.recipe import Length, Recipe, between, pick
from pyterrier_longdoc.data.sources import Relevance, by_split, read_source

_ATTEMPTS = 50  # random draws before the whole pool is searched for a passage that fits


def far_relevant(
    passages: Any,
    topics: pd.DataFrame | None = None,
    qrels: pd.DataFrame | None = None,
    *,
    variant: str | None = None,
    position: str = "far",
    min_offset: int = 512,
    within: int | None = None,
    max_length: int = 1431,
    length: Length = "uniform",
    extra_passage: bool = True,
    tokenizer: Any = None,
    relevant_per_query: int | None = None,
    copies: int = 1,
    distractors: int = 0,
    exclude: str = "all",
    min_passage: int = 1,
    max_passage: int | None = None,
    unfit: str = "raise",
    min_label: int = 1,
    splits: Mapping[str, float] | None = None,
    text_field: str | Sequence[str] = "text",
    separator: str = " ",
    seed: int = 0,
    name: str = "far-relevant",
) -> PositionedCollection:
    """Builds a collection of long documents with one relevant passage each, from a passage collection.

    For each relevant passage of each topic, with C tokens (Boytsov et al. 2025, Section C.2):

    1. draw the document's length D from `min_offset + C` to `max_length`;
    2. draw non-relevant passages, all different, until they have at least `min_offset` tokens;
    3. draw further ones until there are at least D - C tokens;
    4. mix the passages of step 3 with the relevant one, and put those of step 2 in front.

    Drawing until the length is passed is what the authors did, and call a bug: a document has one passage more than
    intended, and some 5 % of theirs are longer than `max_length`. Without it (`extra_passage=False`) step 3 stops
    before the length is passed, and no document is longer than `max_length`.

    Which filler a document has, and how long it is, depends on the seed but not on `position`: the same seed gives the
    same documents with their relevant passage elsewhere.

    Qrels are complete: a document is relevant for all topics that its passage is relevant for.

    Args:
        passages: a dataset, the name of one (PyTerrier's or of ir_datasets), or the passages: a frame or re-iterable
            dicts with `docno` and text.
        topics: `qid, query`, and perhaps `split`; None takes those of the dataset. Topics without relevant passages
            are left out.
        qrels: `qid, docno, label`; None takes those of the dataset.
        variant: of the dataset's topics and qrels.
        position: where the relevant passage stands. "far": at least `min_offset` tokens into the document; "uniform":
            anywhere between filler passages; "early": so that it ends within the first `within` tokens (if it is
            longer than that: at the start).
        min_offset: tokens; 512 as in the paper, the positions of BERT.
        within: tokens; None takes `min_offset`.
        max_length: tokens; 1431 as in the paper, three windows of 477.
        length: distribution of D; "uniform" as in the paper.
        extra_passage: reproduce the authors' bug, for collections comparable with theirs.
        tokenizer: in whose tokens all lengths are, see `token_counter`; the paper's are "bert-base-uncased". Where the
            lengths of passages do not add up to that of a document, as some pairs of passages show, documents are
            counted whole: offsets then hold too, at several times the time, and lengths but for a token or so for each
            passage.
        relevant_per_query: make at most so many documents for each topic, of relevant passages drawn at random, first
            among those that are relevant for this topic only; None takes all. Documents made for other topics of the
            same passage come on top.
        copies: documents made of each relevant passage, with other filler.
        distractors: further documents, without a relevant passage; of the same lengths.
        exclude: which passages are no filler: those relevant for "all" topics taken together, so that no document is
            relevant but unjudged, or only those of the document's "own" topic, as the paper may have it.
        min_passage: tokens, at least 1; passages with less are no filler.
        max_passage: tokens; passages with more are neither filler nor, with `unfit="skip"`, relevant.
        unfit: what to do with relevant passages that are missing from the collection, shorter than `min_passage`,
            longer than `max_passage`, or too long for `max_length`: "raise" or "skip".
        min_label: the lowest relevant label.
        splits: name -> share of the topics; topics with a relevant passage or the query in common stay together.
        text_field: one or several fields of the passages, joined by one space.
        separator: white space between passages.
        seed: the same seed gives the same bytes.
        name: of the collection.

    Raises:
        ValueError: if an argument is out of range; columns are missing; nothing is relevant; a relevant passage is
            unfit; no filler is left; lengths or splits cannot be met; or two documents would have the same docno.

    Example:
        >>> passages = [{"docno": str(i), "text": f"passage number {i} ."} for i in range(9)]
        >>> topics = pd.DataFrame({"qid": ["q"], "query": ["five"]})
        >>> qrels = pd.DataFrame({"qid": ["q"], "docno": ["5"], "label": [1]})
        >>> small = far_relevant(passages, topics, qrels, min_offset=8, max_length=16)
        >>> small.gold[["docno", "position", "passage"]].values.tolist()
        [['q_5', 'far', '5']]
        >>> bool(small.gold["first_token"].min() >= 8)
        True
    """
    recipe = Recipe(position, min_offset, within, max_length, length, extra_passage, separator, seed)
    _check_settings(relevant_per_query, copies, distractors, exclude, min_passage, unfit)
    count = token_counter(tokenizer)
    source = read_source(passages, topics, qrels, variant=variant, min_label=min_label)
    judged = set(source.relevant["docno"])
    pool = PassagePool.read(source.passages, count=count, text_field=text_field, judged=judged)
    relevance = Relevance(source, pool)
    longest = min(max_length - min_offset, max_passage or max_length)
    fit = relevance.fit(pool, min_passage, longest, raising=unfit == "raise")
    chosen = relevance.choose(fit, relevant_per_query, seed)
    open_to_all = (pool.tokens >= min_passage) & (pool.tokens <= (max_passage or np.iinfo(np.int32).max))
    if exclude == "all":
        open_to_all &= ~np.isin(pool.digests, list(relevance.topics_of))
    filler = np.flatnonzero(open_to_all).astype(np.int32)
    if not len(filler):
        raise ValueError(
            f"no filler: of {len(pool)} passages none has {min_passage} tokens or more, and is not relevant"
        )
    documents = FarDocuments(recipe, pool, relevance, filler, chosen, count, copies=copies, distractors=distractors)
    found = documents.qrels()
    kept = source.topics[source.topics["qid"].isin(found["qid"])].reset_index(drop=True)
    if splits is not None:
        groups = found.groupby("docno", sort=False)["qid"].agg(list).tolist()
        groups += kept.groupby(kept["query"].map(digest), sort=False)["qid"].agg(list).tolist()
        kept = kept.assign(split=by_split(kept["qid"].tolist(), groups, splits, seed))
    names = splits or (dict.fromkeys(kept["split"]) if "split" in kept else {})
    variants = {split: kept["qid"][kept["split"] == split].tolist() for split in names}
    parts = Parts(documents, kept, found, documents.gold, splits=variants, lengths=documents.lengths)
    return PositionedCollection(name, parts, count=count, variants=list(variants))


class FarDocuments(Mapping[str, Mapping[str, str]]):
    """The documents of a FarRelevant collection, docno -> `docno, text`, made when they are read."""

    def __init__(
        self,
        recipe: Recipe,
        pool: PassagePool,
        relevance: Relevance,
        filler: np.ndarray,
        chosen: np.ndarray,
        count: Counter,
        *,
        copies: int,
        distractors: int,
    ) -> None:
        self.recipe, self.pool, self.relevance = recipe, pool, relevance
        self._filler, self._chosen, self._count = filler, chosen, count
        self._copies, self._distractors = copies, distractors
        self.lengths_add_up = self._check_lengths()

    def __len__(self) -> int:
        return len(self._chosen) * self._copies + self._distractors

    def __iter__(self) -> Iterator[str]:
        return map(self._docno, range(len(self)))

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return self._row(self._index_of[docno])

    def values(self) -> ValuesView[Mapping[str, str]]:
        """All documents, made one after the other."""
        return _Values(self)

    def rows(self) -> Iterator[Mapping[str, str]]:
        """Makes all documents, one after the other."""
        return map(self._row, range(len(self)))

    def pieces(self, docno: str) -> list[str]:
        """Docnos of the passages that a document consists of, in order."""
        return [self.pool.docno(piece) for piece in self._plan(self._index_of[docno])[0]]

    def filler_of(self, docno: str) -> list[int]:
        """Positions in the pool of the filler of a document, in order."""
        pieces, slot = self._plan(self._index_of[docno])
        return [*pieces[:slot], *pieces[slot + 1 :]]

    def qrels(self) -> pd.DataFrame:
        """`qid, docno, label`: each document with all topics that its passage is relevant for.

        Raises:
            ValueError: if two documents have the same docno.
        """
        # By columns, which share their strings; half a million tuples would take more than all else.
        qids: list[str] = []
        docnos: list[str] = []
        taken = set(map(self._docno, range(len(self._relevant()), len(self))))
        for i in self._relevant():
            found, docno = self._qids(i), self._docno(i)
            if docno in taken:
                raise ValueError(f"two documents are called {docno!r} (qid_passage); rename topics or passages")
            taken.add(docno)
            qids.extend(found)
            docnos.extend([docno] * len(found))
        return pd.DataFrame({"qid": pd.Series(qids, dtype=str), "docno": pd.Series(docnos, dtype=str), "label": 1})

    def gold(self) -> Iterator[tuple[Any, ...]]:
        """Where the relevant passages stand: the rows of `PositionedCollection.gold`."""
        return chain.from_iterable(map(self._gold, self._relevant()))

    def lengths(self) -> Iterator[int]:
        """The length of each document in tokens."""
        return (self._length(self._plan(i)[0]) for i in range(len(self)))

    def _relevant(self) -> range:
        return range(len(self._chosen) * self._copies)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {docno: i for i, docno in enumerate(self)}

    def _docno(self, i: int) -> str:
        base, copy = divmod(i, self._copies)
        if base >= len(self._chosen):
            return f"distractor_{i - len(self._relevant())}"
        row = self._chosen[base]
        name = f"{self.relevance.qids[self.relevance.topic[row]]}_{self.relevance.docnos[row]}"
        return f"{name}_{copy + 1}" if self._copies > 1 else name

    def _qids(self, i: int) -> list[str]:
        digest = int(self.relevance.digests[self._chosen[i // self._copies]])
        return [self.relevance.qids[topic] for topic in self.relevance.topics_of[digest]]

    def _row(self, i: int) -> dict[str, str]:
        return {"docno": self._docno(i), "text": self._text(self._plan(i)[0])}

    def _text(self, pieces: Sequence[int]) -> str:
        return self.recipe.separator.join(map(self.pool.text, pieces))

    def _length(self, pieces: list[int]) -> int:
        if self.lengths_add_up:
            return int(self.pool.tokens[pieces].sum())
        return self._count([self._text(pieces)])[0]

    def _gold(self, i: int) -> Iterator[tuple[Any, ...]]:
        pieces, slot = self._plan(i)
        start = int(self.pool.characters[pieces[:slot]].sum()) + slot * len(self.recipe.separator)
        end = start + int(self.pool.characters[pieces[slot]])
        places = (start, end, self._length(pieces[:slot]), self._length(pieces))
        for qid in self._qids(i):
            yield (qid, self._docno(i), *places, self.recipe.position, self.pool.docno(pieces[slot]))

    def _plan(self, i: int) -> tuple[list[int], int]:
        """The passages of a document, and the place of the relevant one among them."""
        docno = self._docno(i)
        rng = random.Random(f"{self.recipe.seed}/{docno}")
        filler = _Filler(self, rng, docno)
        if i < len(self._relevant()):
            row = self._chosen[i // self._copies]
            passage = int(self.relevance.passage[row])
            topics = self.relevance.topics_of[int(self.pool.digests[passage])]
            filler.barred = [self.relevance.digests_of[topic] for topic in topics]
        else:
            filler.barred = [self.relevance.topics_of]
            passage = filler.draw(self.recipe.max_length - self.recipe.min_offset)
        filler.used.add(int(self.pool.digests[passage]))
        size = int(self.pool.tokens[passage])
        before = self._draw(filler, rng, size)
        slot = between(rng, *self.recipe.slots(np.cumsum([0, *self.pool.tokens[before]]), size))
        if self.recipe.position == "far" and not self.lengths_add_up:
            while self._length(before[:slot]) < self.recipe.min_offset:
                before.insert(0, filler.draw())
                slot += 1
        if self.recipe.position == "early" and not self.lengths_add_up:
            while slot and self._length([*before[:slot], passage]) > self.recipe.beginning:
                slot -= 1
        return [*before[:slot], passage, *before[slot:]], slot

    def _draw(self, filler: _Filler, rng: random.Random, size: int) -> list[int]:
        """Steps 1 to 3 of the algorithm: the filler of a document with a relevant passage of `size` tokens."""
        recipe, tokens = self.recipe, self.pool.tokens
        budget = recipe.target(rng, recipe.min_offset + size) - size
        drawn: list[int] = []
        total = 0
        while total < recipe.min_offset:
            drawn.append(filler.draw(None if recipe.extra_passage else recipe.max_length - size - total))
            total += int(tokens[drawn[-1]])
        while total < budget:
            following = filler.draw()
            total += int(tokens[following])
            if total > budget and not recipe.extra_passage:
                break
            drawn.append(following)
        return drawn

    def _check_lengths(self) -> bool:
        # Word pieces never span white space, so that lengths add up; byte-level pieces take the space before a word.
        rng = random.Random(0)
        pairs = [(pick(rng, self._filler), pick(rng, self._filler)) for _ in range(256)]
        joint = self._count([self._text(pair) for pair in pairs])
        return joint == [int(self.pool.tokens[list(pair)].sum()) for pair in pairs]


class _Filler:
    """Draws passages without replacement, none of them relevant."""

    def __init__(self, documents: FarDocuments, rng: random.Random, docno: str) -> None:
        self._pool, self._indices = documents.pool, documents._filler
        self._rng, self._docno = rng, docno
        self.used: set[int] = set()
        self.barred: Sequence[Container[int]] = ()

    def draw(self, longest: int | None = None) -> int:
        """A passage of at most so many tokens; None sets no limit.

        Raises:
            ValueError: if there is none left.
        """
        for _ in range(_ATTEMPTS):
            index = pick(self._rng, self._indices)
            if self._take(index, longest):
                return index
        # A small or nearly used up pool: search all of it, from a random place on.
        start = between(self._rng, 0, len(self._indices) - 1)
        for index in chain(self._indices[start:].tolist(), self._indices[:start].tolist()):
            if self._take(index, longest):
                return index
        limit = "" if longest is None else f" of at most {longest} tokens"
        raise ValueError(
            f"document {self._docno!r} cannot be completed: no further filler passage{limit} among "
            f"{len(self._indices)}, {len(self.used)} of which it has already; give more passages or a smaller length"
        )

    def _take(self, index: int, longest: int | None) -> bool:
        digest = int(self._pool.digests[index])
        if digest in self.used or any(digest in barred for barred in self.barred):
            return False
        if longest is not None and self._pool.tokens[index] > longest:
            return False
        self.used.add(digest)
        return True


class _Values(ValuesView[Mapping[str, str]]):
    def __init__(self, documents: FarDocuments) -> None:
        super().__init__(documents)
        self._documents = documents

    def __iter__(self) -> Iterator[Mapping[str, str]]:
        return self._documents.rows()


def _check_settings(
    relevant_per_query: int | None, copies: int, distractors: int, exclude: str, min_passage: int, unfit: str
) -> None:
    for name, number, least in (
        ("relevant_per_query", relevant_per_query, 1),
        ("copies", copies, 1),
        ("distractors", distractors, 0),
        ("min_passage", min_passage, 1),
    ):
        if number is not None and number < least:
            raise ValueError(f"{name}={number} must be at least {least}")
    for argument, value, known in (("exclude", exclude, ("all", "own")), ("unfit", unfit, ("raise", "skip"))):
        if value not in known:
            raise ValueError(f"{argument}={value!r} is unknown; choose one of {', '.join(known)}")
