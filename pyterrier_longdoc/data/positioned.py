"""Test collections of which it is known where in a document the relevant passage stands."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.language import Counter
from pyterrier_longdoc.data.textstore import Documents, InMemoryDataset, kept_rows

GOLD_COLUMNS = {
    "qid": "str",
    "docno": "str",
    "start": "int64",
    "end": "int64",
    "first_token": "int64",
    "length": "int64",
    "position": "str",
    "passage": "str",
}
"""Columns of `PositionedCollection.gold` and their types."""


class Corpus:
    """The documents of a collection, to be iterated over as often as wanted; its length is their number."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (dict(row) for row in self._documents.values())

    def __len__(self) -> int:
        return len(self._documents)


@dataclass(frozen=True)
class Parts:
    """What a `PositionedCollection` consists of.

    Attributes:
        documents: docno -> fields. May make or read them when asked: then a collection of any size takes no memory.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        gold: the frame of `PositionedCollection.gold`, or a function that makes its rows.
        splits: variant of topics and qrels -> its qids.
        groups: docno -> a group of comparable documents, such as those of one context length.
        lengths: makes the length in tokens of each document, in order; None counts them.
    """

    documents: Documents
    topics: pd.DataFrame
    qrels: pd.DataFrame
    gold: pd.DataFrame | Callable[[], Iterable[tuple[Any, ...]]]
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    lengths: Callable[[], Iterable[int]] | None = None


class PositionedCollection(InMemoryDataset):
    """Documents, topics, qrels, and the place of each relevant passage: a PyTerrier dataset.

    Args:
        name: name of the collection.
        parts: its parts, or a function that makes them, which is called at the first use.
        count: lengths of texts.
        default: variant of topics and qrels if none is asked for; None stands for all of them.
        variants: known before the parts are.
    """

    def __init__(
        self,
        name: str,
        parts: Parts | Callable[[], Parts],
        *,
        count: Counter,
        default: str | None = None,
        variants: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._given, self._count, self._default, self._variants = parts, count, default, list(variants)

    @cached_property
    def parts(self) -> Parts:
        """All parts of the collection, made at the first use."""
        return self._given() if callable(self._given) else self._given

    @property
    def corpus(self) -> Corpus:
        """All documents: dicts of `docno`, `text` and perhaps `title`; can be iterated over again."""
        return Corpus(self.documents)

    @property
    def topics(self) -> pd.DataFrame:
        """All topics, `qid` and `query`."""
        return self.parts.topics[["qid", "query"]].copy()

    @property
    def qrels(self) -> pd.DataFrame:
        """All judgements, `qid`, `docno` and `label`."""
        return self.parts.qrels[["qid", "docno", "label"]].copy()

    @cached_property
    def gold(self) -> pd.DataFrame:
        """Where the relevant passages stand, one row each.

        Columns: `qid` and `docno`; `start` and `end`, half-open character offsets in the document's text;
        `first_token`, the number of tokens before it; `length`, that of the document in tokens; `position`, the
        kind of place (early, uniform or far); and `passage`, the docno it had in the collection it comes from.
        """
        gold = self.parts.gold
        return gold_frame(gold()) if callable(gold) else gold

    def gold_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `gold`, one after the other."""
        gold = self.parts.gold
        rows = gold() if callable(gold) else gold.itertuples(index=False)
        return (dict(zip(GOLD_COLUMNS, row, strict=True)) for row in rows)

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
            pool: "all" documents (Boytsov et al. 2025 rerank all 800 of a LongEmbed set), or those of the
                "same_length", that is of the group of the topic's relevant document (LongEmbed's own protocol).
            depth: documents for each topic, all of its relevant ones among them; None takes the whole pool.
            seed: of the sample and its order.

        Returns:
            `qid, query, docno, score, rank`, with scores that fall from 0.

        Raises:
            ValueError: if a pool is empty, unknown, or smaller than `depth`.
        """
        if pool not in ("all", "same_length"):
            raise ValueError(f"pool={pool!r} is unknown; choose one of all, same_length")
        if pool == "same_length" and not self.parts.groups:
            raise ValueError(f"{self!r} has no groups of equal length; choose pool='all'")
        relevant = self.get_qrels(variant).query("label > 0").groupby("qid")["docno"].agg(list).to_dict()
        names, groups, members = list(self.documents), self.parts.groups, self._members()
        rows: list[tuple[str, str, str, float, int]] = []
        for qid, query in self.get_topics(variant).itertuples(index=False):
            wanted = relevant.get(qid, [])
            offered = names if pool == "all" else members[groups[wanted[0]]] if wanted else []
            docnos = _sample(random.Random(f"{seed}/{qid}"), offered, wanted, depth, qid)
            rows.extend((qid, query, docno, float(-rank), rank) for rank, docno in enumerate(docnos))
        return pd.DataFrame(rows, columns=["qid", "query", "docno", "score", "rank"])

    def lengths(self) -> np.ndarray:
        """The length of each document in tokens, `(D,)` int64, in the order of the corpus."""
        if self.parts.lengths is not None:
            return np.fromiter(self.parts.lengths(), dtype=np.int64)
        return np.fromiter((self._count([row["text"]])[0] for row in self.documents.values()), dtype=np.int64)

    def document_statistics(self, limits: tuple[int, ...] = (1431, 1500)) -> pd.DataFrame:
        """Sizes of the documents, as in Table 8 and Section C.2 of Boytsov et al. 2025.

        Returns:
            One row: number of `documents`; `mean`, `median`, `p90` and `max` of their length in tokens; the share of
            those longer than each limit (`over_1431`); and of the relevant passages' first tokens the `first_min`,
            `first_mean` and `first_max`.
        """
        lengths, first = self.lengths(), self.gold["first_token"]
        row: dict[str, Any] = {"documents": len(lengths)}
        if len(lengths):
            row |= {"mean": lengths.mean(), "median": np.median(lengths), "p90": np.percentile(lengths, 90)}
            row |= {"max": lengths.max(), **{f"over_{limit}": (lengths > limit).mean() for limit in limits}}
        if len(first):
            row |= {"first_min": first.min(), "first_mean": first.mean(), "first_max": first.max()}
        return pd.DataFrame([row])

    def query_statistics(self) -> pd.DataFrame:
        """Sizes of the topics, as in Table 7 of Boytsov et al. 2025.

        Returns:
            A row for each split, and for `all` of them: number of `queries`, their `mean_tokens`, and the mean number
            of `relevant` documents.
        """
        positive = self.qrels.query("label > 0").groupby("qid").size()
        rows = []
        for split in [*self.splits, None]:
            topics = self.topics if split is None else self.get_topics(split)
            tokens = self._count(topics["query"].tolist())
            relevant = positive.reindex(topics["qid"]).fillna(0)
            rows.append((split or "all", len(topics), float(np.mean(tokens or [0])), float(relevant.mean())))
        return pd.DataFrame(rows, columns=["split", "queries", "mean_tokens", "relevant"])

    def get_corpus_lang(self) -> str | None:
        """Unknown."""
        return None

    def _members(self) -> dict[str, list[str]]:
        members: dict[str, list[str]] = {}
        for docno, group in self.parts.groups.items():
            members.setdefault(group, []).append(docno)
        return members

    def _of_variant(self, frame: pd.DataFrame, variant: str | None) -> pd.DataFrame:
        variant = variant or self._default
        if variant is None:
            return frame
        if variant not in self.parts.splits:
            raise ValueError(f"{self!r} has no variant {variant!r}; available are {list(self.parts.splits)}")
        return frame[frame["qid"].isin(set(self.parts.splits[variant]))].reset_index(drop=True)

    def _read_documents(self) -> Documents:
        return self.parts.documents

    def _describe_component(self, component: str) -> bool | list[str] | None:
        if component in ("topics", "qrels"):
            return self._variants or True
        return True if component == "corpus" else None

    def __repr__(self) -> str:
        return f"PositionedCollection({self.name!r})"


def kept_parts(name: str, recipe: Mapping[str, Any], build: Callable[[], Parts]) -> Parts:
    """Parts that are expensive to build, kept on disk between runs: see `kept_rows`.

    Args:
        name: beginning of the file's name.
        recipe: all that the parts depend on.
        build: makes them.
    """
    rows = kept_rows(name, recipe, lambda: list(_to_rows(build())))
    kinds: dict[str, list[Any]] = {kind: [] for kind in ("document", "topic", "qrel", "gold", "split", "group")}
    for row in rows:
        kinds[row["kind"]].append(row["value"])
    return Parts(
        documents={row["docno"]: row for row in kinds["document"]},
        topics=pd.DataFrame(kinds["topic"], columns=["qid", "query"]).astype(str),
        qrels=pd.DataFrame(kinds["qrel"], columns=["qid", "docno", "label"]),
        gold=gold_frame(kinds["gold"]),
        splits=dict(kinds["split"]),
        groups=dict(kinds["group"]),
    )


def _to_rows(parts: Parts) -> Iterator[dict[str, Any]]:
    gold = parts.gold() if callable(parts.gold) else parts.gold.itertuples(index=False)
    values: dict[str, Iterable[Any]] = {
        "document": map(dict, parts.documents.values()),
        "topic": parts.topics[["qid", "query"]].values.tolist(),
        "qrel": parts.qrels[["qid", "docno", "label"]].values.tolist(),
        "gold": map(list, gold),
        "split": [[name, list(qids)] for name, qids in parts.splits.items()],
        "group": map(list, parts.groups.items()),
    }
    return ({"kind": kind, "value": value} for kind, of_kind in values.items() for value in of_kind)


def gold_frame(rows: Iterable[Mapping[str, Any] | tuple[Any, ...]]) -> pd.DataFrame:
    """A frame with the columns and types of `PositionedCollection.gold`."""
    return pd.DataFrame(list(rows), columns=list(GOLD_COLUMNS)).astype(GOLD_COLUMNS)


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
