"""What the collections of this package share: texts that are looked up, known places of relevant passages, no leaks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice
from ..common.frames import as_strings
from ..common.language import Counter, digest, token_counter
from ..common.progress import counting

Documents = Mapping[str, Mapping[str, str]]
"""docno -> {"docno": ..., "text": ..., further fields}."""

GOLD_COLUMNS = {
    **dict.fromkeys(("qid", "docno"), "str"),
    **dict.fromkeys(("start", "end", "first_token", "length"), "int64"),
    **dict.fromkeys(("position", "passage"), "str"),
}
"""Columns of `PositionedCollection.gold` and their types."""


class StreamedDocuments(Mapping[str, Mapping[str, str]]):
    """Documents that are made or read when they are asked for: a collection of any size then takes no memory."""

    def rows(self) -> Iterator[Mapping[str, str]]:
        """All documents, one after the other."""
        raise NotImplementedError

    def many(self, docnos: Sequence[str]) -> Documents:
        """Those of the documents that there are, for different docnos, where reading them together is faster."""
        return self

    def values(self) -> ValuesView[Mapping[str, str]]:
        """All documents, as often as wanted."""
        return _Rows(self)


class _Rows(ValuesView[Mapping[str, str]]):
    _mapping: StreamedDocuments

    def __iter__(self) -> Iterator[Mapping[str, str]]:
        return self._mapping.rows()


@dataclass(eq=False, repr=False)
class TextLoader(pt.Transformer):
    """Adds the text of each document to a frame with a ``docno`` column.

    Nothing is truncated, as a Terrier meta index would. Rows, their order, their index and all other columns are kept;
    a column of the same name is replaced.

    Args:
        documents: docno -> fields of the document.
        fields: Names of the fields to add, each one present in every document.
        name: Name of the collection, for messages only.
        verbose: Show a progress bar.
        papers: Behind the collection, see `Collection.papers`.

    Example:
        >>> loader = TextLoader({"d1": {"docno": "d1", "text": "a long document"}}, ["text"])
        >>> loader(pd.DataFrame({"qid": ["q1"], "docno": ["d1"]}))["text"].tolist()
        ['a long document']
    """

    documents: Documents
    fields: list[str]
    name: str = ""
    verbose: bool = False
    papers: tuple[str, ...] | None = None  # PyTerrier takes an empty tuple for one of transformers

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the fields.

        Raises:
            KeyError: If a docno is not in the collection.
        """
        pt.validate.columns(inp, includes=["docno"], context=self)
        docnos = as_strings(inp["docno"]).tolist()
        distinct = list(dict.fromkeys(docnos))
        documents = self.documents
        if isinstance(documents, StreamedDocuments):
            documents = documents.many(distinct)
        rows = {}
        with counting(repr(self), "doc", len(distinct), shown=self.verbose) as done:
            for docno in distinct:
                rows[docno] = self._look_up(documents, docno)
                done()
        columns = {name: [rows[docno][name] for docno in docnos] for name in self.fields}
        out = inp.drop(columns=self.fields, errors="ignore")
        # dtype=str keeps the column type of an empty frame equal to that of a full one.
        return out.assign(**{name: pd.Series(values, dtype=str).array for name, values in columns.items()})

    def describe(self) -> dict[str, Any]:
        """Who this transformer is, JSON-able: documents count by their contents.

        Raises:
            ValueError: if they are not in memory; to read a collection of any size would take too long.
        """
        if isinstance(self.documents, StreamedDocuments):
            raise ValueError(f"{self!r} reads its documents when they are asked for: these cannot be compared")
        content = blake2b(digest_size=16)
        for docno, document in self.documents.items():
            for text in (docno, *(document[name] for name in self.fields)):
                content.update(f"{text}\0".encode("utf-8", "replace"))
        return {"fields": list(self.fields), "documents": len(self.documents), "content": content.hexdigest()}

    def fuse_rank_cutoff(self, k: int) -> pt.Transformer:
        """Cuts the ranking before the texts are looked up (``loader % k``)."""
        return pt.RankCutoff(k) >> self

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        # PyTerrier would otherwise print every document, and look for help online.
        return {"label": "TextLoader", "help_url": None, "settings": {"name": self.name, "fields": self.fields}}

    def _look_up(self, documents: Documents, docno: str) -> Mapping[str, str]:
        try:
            return documents[docno]
        except KeyError:
            raise KeyError(
                f"docno {docno!r} is not in the collection {self.name!r} ({len(self.documents)} documents); "
                "was the run or index made from another collection, or another version of it?"
            ) from None

    def __repr__(self) -> str:
        return f"TextLoader({self.name!r}, {self.fields!r})"


class Collection(pt.datasets.Dataset):
    """A test collection. Subclasses give ``name``, ``documents``, topics and qrels."""

    name: str
    tokenizer: Any = None
    papers: tuple[str, ...] = ()
    """Behind the collection: keys of `references.bib`, or BibTeX entries."""

    @property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", further fields}, in order, read at first use; all with the same."""
        raise NotImplementedError

    @cached_property
    def _loaders(self) -> dict[tuple[tuple[str, ...], bool], TextLoader]:
        return {}

    def get_corpus_iter(self, *, verbose: bool = True) -> pt.model.IterDict:
        """A sized iterator of ``{"docno": ..., "text": ..., ...}``, for indexing, perhaps with a progress bar."""
        rows = self.documents.values()
        shown = pt.tqdm(rows, desc=f"{self.name} documents", disable=not verbose)
        return pt.utils.GeneratorLen(map(dict, shown), len(rows))

    def text_loader(self, fields: Sequence[str] | str = "*", *, verbose: bool = False) -> pt.Transformer:
        """A transformer that adds the document texts to any frame with a ``docno`` column.

        The same arguments give the same object, so that ``pt.Experiment(..., plan="tree")`` sees that
        pipelines share it.

        Args:
            fields: ``"*"`` for all fields, or one or several of their names.
            verbose: Show a progress bar.

        Raises:
            ValueError: If the collection has no such field.
        """
        available = self._fields()
        wanted = available if fields == "*" else [fields] if isinstance(fields, str) else list(fields)
        unknown = [name for name in wanted if name not in available]
        if unknown:
            raise ValueError(f"{self!r} has no field {unknown[0]!r}; its fields are {available}")
        key = (tuple(wanted), verbose)
        if key not in self._loaders:
            self._loaders[key] = TextLoader(self.documents, wanted, self.name, verbose, self.papers or None)
        return self._loaders[key]

    def describe(self) -> dict[str, Any]:
        """Whose texts these are, JSON-able: documents count by their contents, see `TextLoader.describe`."""
        return TextLoader(self.documents, self._fields(), self.name).describe()

    def statistics(self, tokenizer: Any = None, *, limits: Sequence[int] = (1431, 1500)) -> pd.DataFrame:
        """Sizes of the collection, as in Tables 7 and 8 and Section C.2 of Boytsov et al. 2025.

        Args:
            tokenizer: in whose tokens, see `token_counter`; that of BERT in the paper. None for the collection's own,
                words and punctuation marks if it has none.
            limits: lengths in tokens; the share of longer documents is told.

        Returns:
            A row for each variant of topics and qrels and one for `all` (`split`): number of `queries`, their mean
            length `query_tokens`, and the mean number of their relevant documents (`positives`); number of `documents`
            (of collections with several lengths those of the variant's, else all), their mean length
            `document_tokens`, its `median`, `p90` and `max`, and the share of those `over_1431` and so on; of the
            relevant passages' first tokens, in the collection's own tokens, `first_min`, `first_mean` and `first_max`.
            NaN is what is not known.
        """
        count, lengths = token_counter(self.tokenizer if tokenizer is None else tokenizer), self._lengths(tokenizer)
        rows = []
        for split in dict.fromkeys((*self._splits(), "all")):
            own = lengths[self._documents_of(split)]
            sizes = {"documents": len(own), "document_tokens": np.mean(own) if len(own) else np.nan}
            sizes |= {"median": np.median(own) if len(own) else np.nan}
            sizes |= {"p90": np.percentile(own, 90) if len(own) else np.nan, "max": own.max(initial=0)}
            sizes |= {f"over_{limit}": np.mean(own > limit) if len(own) else np.nan for limit in limits}
            rows.append({"split": split, **self._of_queries(split, count), **sizes, **self._first_tokens(split)})
        return pd.DataFrame(rows)

    def _lengths(self, tokenizer: Any) -> np.ndarray:
        """`(D,)` int64 tokens of the documents, in their order."""
        count = token_counter(tokenizer)
        return np.fromiter((count([row["text"]])[0] for row in self.documents.values()), dtype=np.int64)

    def _splits(self) -> list[str]:
        """Variants of topics and qrels."""
        return []

    def _documents_of(self, split: str) -> Any:
        """Which documents belong to a variant, to index `_lengths`."""
        return slice(None)

    def _judged(self, split: str) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
        """Topics and qrels of a variant; None of what the collection lacks."""
        topics = self.get_topics() if self._describe_component("topics") else None
        return topics, self.get_qrels() if self._describe_component("qrels") else None

    def _first_tokens(self, split: str) -> dict[str, float]:
        return dict.fromkeys(("first_min", "first_mean", "first_max"), np.nan)

    def _of_queries(self, split: str, count: Counter) -> dict[str, Any]:
        topics, qrels = self._judged(split)
        if topics is None or not len(topics):
            return {"queries": 0, "query_tokens": np.nan, "positives": np.nan}
        # Topics of ir_datasets may have several fields and no query.
        tokens = np.mean(count(topics["query"].tolist())) if "query" in topics else np.nan
        positives = np.nan
        if qrels is not None:
            positives = qrels.query("label > 0").groupby("qid").size().reindex(topics["qid"]).fillna(0).mean()
        return {"queries": len(topics), "query_tokens": tokens, "positives": positives}

    def _fields(self) -> list[str]:
        return [name for name in next(iter(self.documents.values()), {"text": ""}) if name != "docno"]


@dataclass(frozen=True)
class Parts:
    """What a `PositionedCollection` consists of.

    Attributes:
        documents: docno -> fields, perhaps `StreamedDocuments`.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        gold: the rows of `PositionedCollection.gold`, or a function that makes them.
        splits: variant of topics and qrels -> its qids.
        groups: docno -> a group of comparable documents, such as those of one context length.
        excluded: `qid, docno` of documents that must not be returned for a query, as BRIGHT names them.
        lengths: makes the length in tokens of each document, in order; None counts them.
        relevant_filler: makes `qid, docno, passage` for all passages that are relevant for a topic, but for those of
            gold; None where they are not known.
    """

    documents: Documents
    topics: pd.DataFrame
    qrels: pd.DataFrame
    gold: Sequence[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]] = ()
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    excluded: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=["qid", "docno"], dtype=str))
    lengths: Callable[[], Iterable[int]] | None = None
    relevant_filler: Callable[[], Iterable[tuple[str, str, str]]] | None = None


class PositionedCollection(Collection):
    """Documents, topics, qrels, and the place of each relevant passage: a PyTerrier dataset.

    Args:
        name: name of the collection.
        parts: its parts, or a function that makes them, which is called at the first use.
        tokenizer: in whose tokens lengths and the positions of `gold` are, see `token_counter`.
        default: variant of topics and qrels if none is asked for; None stands for all of them.
        variants: of topics and qrels, where the parts are still to be made.
        papers: behind the collection: keys of `references.bib`, or BibTeX entries.
    """

    def __init__(
        self,
        name: str,
        parts: Parts | Callable[[], Parts],
        *,
        tokenizer: Any = None,
        default: str | None = None,
        variants: Iterable[str] = (),
        papers: tuple[str, ...] = (),
    ) -> None:
        self.papers = papers
        self.name, self.tokenizer, self._count = name, tokenizer, token_counter(tokenizer)
        self._given, self._default, self._variants = parts, default, list(variants)

    @cached_property
    def parts(self) -> Parts:
        """All parts of the collection, made at the first use."""
        return self._given() if callable(self._given) else self._given

    @property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", perhaps "title"}, in order."""
        return self.parts.documents

    @property
    def corpus(self) -> ValuesView[Mapping[str, str]]:
        """All documents: dicts of `docno`, `text` and perhaps `title`; can be iterated over again."""
        return self.documents.values()

    @property
    def topics(self) -> pd.DataFrame:
        """All topics, `qid` and `query`."""
        return self.parts.topics[["qid", "query"]].copy()

    @property
    def qrels(self) -> pd.DataFrame:
        """All judgements, `qid`, `docno` and `label`."""
        return self.parts.qrels[["qid", "docno", "label"]].copy()

    @property
    def excluded(self) -> pd.DataFrame:
        """Documents that must not be returned for a query, `qid` and `docno`; `candidates` has none of them."""
        return self.parts.excluded.copy()

    @cached_property
    def gold(self) -> pd.DataFrame:
        """Where the relevant passages stand, one row each.

        Columns: `qid` and `docno`; `start` and `end`, half-open character offsets in the document's text;
        `first_token`, the number of tokens before it; `length`, that of the document in tokens; `position`, the
        kind of place (early, uniform or far); and `passage`, the docno it had in the collection it comes from.
        """
        return pd.DataFrame(list(self.gold_rows()), columns=list(GOLD_COLUMNS)).astype(GOLD_COLUMNS)

    def gold_rows(self) -> Iterable[tuple[Any, ...]]:
        """The rows of `gold`, one after the other."""
        return self.parts.gold() if callable(self.parts.gold) else self.parts.gold

    @property
    def splits(self) -> dict[str, list[str]]:
        """The variants of topics and qrels, with their qids; empty if there is only one."""
        return {name: list(qids) for name, qids in self.parts.splits.items()}

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """The topics of a variant, with columns `qid` and `query`; None stands for the default.

        Raises:
            ValueError: if there is no such variant.
        """
        return self._of_variant(self.topics, variant)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """The judgements of a variant, with columns `qid`, `docno` and `label`; None stands for the default.

        Raises:
            ValueError: if there is no such variant.
        """
        return self._of_variant(self.qrels, variant)

    def candidates(
        self, variant: str | None = None, *, pool: str = "all", depth: int | None = None, seed: int = 0
    ) -> pd.DataFrame:
        """Documents to rerank without a first stage, in random order.

        Args:
            variant: of the topics.
            pool: "all" documents (Boytsov et al. 2025 rerank all 800 of a LongEmbed set), those of the
                "same_length", that is of the group of the topic's relevant document (LongEmbed's own protocol), or
                those that are "judged" for the topic, relevant or not (the pairs of ColDeR).
            depth: documents for each topic, all of its relevant ones among them; None takes the whole pool.
            seed: of the sample and its order.

        Returns:
            `qid, query, docno, score, rank`, with scores that fall from 0.

        Raises:
            ValueError: if a pool is empty, unknown, or smaller than `depth`.
        """
        check_choice("pool", pool, ("all", "same_length", "judged"))
        groups, members = self.parts.groups, defaultdict[str, list[str]](list)
        if pool == "same_length" and not groups:
            raise ValueError(f"{self!r} has no groups of equal length; choose pool='all'")
        for docno, group in groups.items():
            members[group].append(docno)
        qrels = self.get_qrels(variant)
        judged, relevant, excluded = map(_by_query, (qrels, qrels.query("label > 0"), self.excluded))
        names = list(self.documents) if pool == "all" else []
        rows: list[tuple[str, str, str, float, int]] = []
        for qid, query in self.get_topics(variant).itertuples(index=False):
            wanted, left_out = relevant.get(qid, []), set(excluded.get(qid, []))
            of_length = members[groups[wanted[0]]] if pool == "same_length" and wanted else []
            offered = {"all": names, "same_length": of_length, "judged": judged.get(qid, [])}[pool]
            allowed = [docno for docno in offered if docno not in left_out] if left_out else offered
            docnos = _sample(random.Random(f"{seed}/{qid}"), allowed, wanted, depth, qid)
            rows.extend((qid, query, docno, float(-rank), rank) for rank, docno in enumerate(docnos))
        return pd.DataFrame(rows, columns=["qid", "query", "docno", "score", "rank"])

    def lengths(self) -> np.ndarray:
        """The length of each document in tokens, `(D,)` int64, in the order of the corpus."""
        if self.parts.lengths is not None:
            return np.fromiter(self.parts.lengths(), dtype=np.int64)
        return np.fromiter((self._count([row["text"]])[0] for row in self.corpus), dtype=np.int64)

    def _lengths(self, tokenizer: Any) -> np.ndarray:
        return self.lengths() if tokenizer is None else super()._lengths(tokenizer)

    def _splits(self) -> list[str]:
        return list(self.parts.splits)

    def _documents_of(self, split: str) -> Any:
        groups = self.parts.groups
        if split not in groups.values():
            return slice(None)
        return np.fromiter((groups.get(docno) == split for docno in self.documents), bool, len(self.documents))

    def _judged(self, split: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        return (self.topics, self.qrels) if split == "all" else (self.get_topics(split), self.get_qrels(split))

    def _first_tokens(self, split: str) -> dict[str, float]:
        first = self.gold[self.gold["qid"].isin(self._judged(split)[0]["qid"])]["first_token"]
        return {f"first_{what}": float(first.agg(what)) for what in ("min", "mean", "max")}

    def _of_variant(self, frame: pd.DataFrame, variant: str | None) -> pd.DataFrame:
        variant = variant or self._default
        if variant is None:
            return frame
        if variant not in self.parts.splits:
            raise ValueError(f"{self!r} has no variant {variant!r}; available are {list(self.parts.splits)}")
        return frame[frame["qid"].isin(set(self.parts.splits[variant]))].reset_index(drop=True)

    def _describe_component(self, component: str) -> bool | list[str] | None:
        if component in ("topics", "qrels"):
            return self._variants or list(self.parts.splits) or True
        return True if component == "corpus" else None

    def __repr__(self) -> str:
        return f"PositionedCollection({self.name!r})"


def _by_query(pairs: pd.DataFrame) -> dict[str, list[str]]:
    docnos = pairs.groupby("qid")["docno"].agg(list)
    return {str(qid): found for qid, found in docnos.items()}


def _sample(rng: random.Random, offered: list[str], wanted: list[str], depth: int | None, qid: str) -> list[str]:
    if not offered:
        raise ValueError(f"the pool of topic {qid!r} is empty: it has no relevant document, or there are no documents")
    if depth is None:
        return rng.sample(offered, len(offered))
    known = set(wanted)
    if not len(wanted) <= depth <= len(offered):
        raise ValueError(
            f"depth={depth} cannot be met for topic {qid!r}: {len(wanted)} of {len(offered)} documents are relevant"
        )
    # As many spare draws as there are relevant documents, any of which may come up.
    spare = rng.sample(offered, min(len(offered), depth + len(known)))
    docnos = [*wanted, *[docno for docno in spare if docno not in known][: depth - len(wanted)]]
    return rng.sample(docnos, len(docnos))


def between(rng: random.Random, first: int, last: int) -> int:
    """A random number from `first` to `last`, both included; the same for all versions of Python."""
    # random() is the one method whose numbers Python promises not to change.
    return first + int(rng.random() * (last - first + 1))


def find_leaks(collection: PositionedCollection) -> pd.DataFrame:
    """Looks for what a collection must not have: relevant text that is unjudged, or known from training.

    Texts that differ in letter case and white space only count as equal.

    Args:
        collection: any; that filler is relevant can be seen only if `far_relevant` has just made the collection.

    Returns:
        A row for each leak, with `kind`, `split`, `qid`, `docno` and `other`: a "shared query" stands in two splits
        (`other` is the second), and so does a "shared passage", a relevant one; a "duplicate document" has the text
        of another one (`other`); "relevant filler" (`other`, a passage) is relevant for a topic of its document; an
        "unjudged passage" is filler that is relevant for a topic its document is not judged for. Splits that contain
        another one whole are not compared with it.
    """
    rows = [*_shared_between_splits(collection), *_duplicates(collection)]
    if collection.parts.relevant_filler is not None:
        judged = set(collection.qrels[["qid", "docno"]].itertuples(index=False, name=None))
        for qid, docno, passage in collection.parts.relevant_filler():
            kind = "relevant filler" if (qid, docno) in judged else "unjudged passage"
            rows.append((kind, "", qid, docno, passage))
    return pd.DataFrame(rows, columns=["kind", "split", "qid", "docno", "other"])


def check_leaks(collection: PositionedCollection) -> None:
    """Raises ValueError if there is any leak; see `find_leaks`."""
    leaks = find_leaks(collection)
    if len(leaks):
        counts = ", ".join(f"{count} x {kind}" for kind, count in leaks["kind"].value_counts().items())
        raise ValueError(f"{collection!r} leaks: {counts}; find_leaks shows them, the first is {dict(leaks.iloc[0])}")


def _shared_between_splits(collection: PositionedCollection) -> Iterator[tuple[str, ...]]:
    splits = collection.splits
    if len(splits) < 2:
        return
    texts_of: defaultdict[str, list[tuple[str, int, str]]] = defaultdict(list)  # qid -> kind, digest, docno
    for qid, query in collection.topics.itertuples(index=False):
        texts_of[qid].append(("shared query", digest(query), ""))
    for docno, places in collection.gold.groupby("docno"):
        text = collection.documents[str(docno)]["text"]
        for qid, start, end in places[["qid", "start", "end"]].itertuples(index=False):
            texts_of[qid].append(("shared passage", digest(text[start:end]), str(docno)))
    found = {
        split: {(kind, value): (qid, docno) for qid in qids for kind, value, docno in texts_of[qid]}
        for split, qids in splits.items()
    }
    for first, second in combinations(splits, 2):
        if set(splits[first]) <= set(splits[second]) or set(splits[second]) <= set(splits[first]):
            continue
        for (kind, value), place in found[first].items():
            if (kind, value) in found[second]:
                yield (kind, first, *place, second)


def _duplicates(collection: PositionedCollection) -> Iterator[tuple[str, ...]]:
    first_of: dict[int, str] = {}
    for row in collection.corpus:
        first = first_of.setdefault(digest(row["text"]), row["docno"])
        if first != row["docno"]:
            yield ("duplicate document", "", "", row["docno"], first)
