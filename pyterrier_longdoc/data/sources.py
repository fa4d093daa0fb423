"""Passage collections to build from: what is given in several shapes, checked and brought into one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.data.passages import PassagePool


@dataclass(frozen=True)
class Source:
    """A passage collection.

    Attributes:
        passages: dicts with `docno` and text; may be read only once.
        topics: `qid, query`, and perhaps `split`; qids are unique.
        relevant: `qid, docno`, each pair once, of these topics only.
    """

    passages: Iterable[Mapping[str, Any]]
    topics: pd.DataFrame
    relevant: pd.DataFrame


def read_source(
    passages: Any,
    topics: pd.DataFrame | None,
    qrels: pd.DataFrame | None,
    *,
    variant: str | None = None,
    min_label: int = 1,
) -> Source:
    """Finds passages, topics and qrels; the arguments are those of `far_relevant`.

    Raises:
        ValueError: if topics or qrels are missing, lack a column, repeat a qid, hold nothing relevant, or labels
            are no numbers.
        KeyError: if there is no dataset of that name.
    """
    dataset = _dataset(passages)
    if dataset is not None:
        topics = dataset.get_topics(variant) if topics is None else topics
        qrels = dataset.get_qrels(variant) if qrels is None else qrels
        passages = dataset.get_corpus_iter(verbose=False)
    elif variant is not None:
        raise ValueError(f"variant={variant!r} is of datasets only; give the topics and qrels themselves")
    if topics is None or qrels is None:
        raise ValueError("topics and qrels are missing; only a dataset brings its own")
    if isinstance(passages, pd.DataFrame):
        passages = passages.to_dict("records")
    topics = _with_columns(topics, "topics", ["qid", "query"])
    qrels = _with_columns(qrels, "qrels", ["qid", "docno", "label"])
    if len(qrels) and pd.api.types.is_string_dtype(qrels["label"]):
        raise ValueError(f"qrels: column label must hold numbers, not {qrels['label'].iloc[0]!r}")
    if topics["qid"].duplicated().any():
        raise ValueError(f"topics: qid {topics['qid'][topics['qid'].duplicated()].iloc[0]!r} is there twice")
    relevant = qrels[(qrels["label"] >= min_label) & qrels["qid"].isin(topics["qid"])]
    if not len(relevant):
        raise ValueError(
            f"no topic has a relevant passage: none of {len(qrels)} qrels has a label of at least {min_label} and a "
            f"qid of the {len(topics)} topics"
        )
    return Source(passages, topics, relevant[["qid", "docno"]].drop_duplicates().reset_index(drop=True))


class Relevance:
    """Which passages are relevant for which topics, where equal texts count as one passage.

    Attributes:
        qids: the topics.
        docnos: `(R,)`, the relevant passages' names.
        topic: `(R,)`, the topic each is relevant for, an index into `qids`.
        passage: `(R,)`, its position in the pool; -1 if it is missing there.
        topics_of: digest of a passage -> all topics it is relevant for, indices into `qids`.
    """

    def __init__(self, source: Source, pool: PassagePool) -> None:
        self.qids = source.topics["qid"].tolist()
        self.docnos = source.relevant["docno"].tolist()
        self.topic = pd.Index(self.qids).get_indexer(source.relevant["qid"]).astype(np.int32)
        self.passage = np.array([pool.index_of.get(docno, -1) for docno in self.docnos], dtype=np.int32)
        self.digests = pool.digests[self.passage] if len(pool) else np.zeros(0, dtype=np.int64)
        self.topics_of: dict[int, list[int]] = {}
        self.digests_of: dict[int, set[int]] = {}
        for digest, topic, passage in zip(self.digests.tolist(), self.topic.tolist(), self.passage, strict=False):
            if passage >= 0 and topic not in self.topics_of.setdefault(digest, []):
                self.topics_of[digest].append(topic)
                self.digests_of.setdefault(topic, set()).add(digest)

    def fit(self, pool: PassagePool, shortest: int, longest: int, *, raising: bool) -> np.ndarray:
        """The relevant passages that documents can be made of: indices into `passage`.

        Raises:
            ValueError: if there is none, or, `raising`, one that is missing, too short or too long.
        """
        tokens = np.where(self.passage < 0, -1, pool.tokens[self.passage] if len(pool) else -1)
        unfit = np.flatnonzero((tokens < shortest) | (tokens > longest))
        if len(unfit) and (raising or len(unfit) == len(tokens)):
            first = int(unfit[0])
            found = f"{tokens[first]} tokens" if tokens[first] >= 0 else "not in the collection"
            raise ValueError(
                f"relevant passage {self.docnos[first]!r} of topic {self.qids[self.topic[first]]!r} is unfit: {found}, "
                f"where {shortest} to {longest} tokens are needed ({len(unfit)} of {len(tokens)} are unfit); raise "
                f"max_length, lower min_passage, or leave such passages out with unfit='skip'"
            )
        return np.setdiff1d(np.arange(len(tokens)), unfit)

    def choose(self, fit: np.ndarray, per_query: int | None, seed: int) -> np.ndarray:
        """Of the fitting ones at most `per_query` for each topic, first those that no other topic shares."""
        # Of passages with the same text the first stands for all.
        first_of = pd.DataFrame({"topic": self.topic[fit], "digest": self.digests[fit]}).duplicated()
        fit = fit[~first_of.to_numpy()]
        if per_query is None:
            return fit
        chosen = []
        for topic, members in pd.Series(fit).groupby(self.topic[fit], sort=False):
            rng = random.Random(f"{seed}/{self.qids[int(str(topic))]}")
            drawn = rng.sample(members.tolist(), len(members))
            drawn.sort(key=lambda index: len(self.topics_of[int(self.digests[index])]))
            chosen.extend(drawn[:per_query])
        return np.array(chosen)


def by_split(qids: Sequence[str], groups: Sequence[Sequence[str]], splits: Mapping[str, float], seed: int) -> list[str]:
    """Divides topics at random, those of a group together.

    Args:
        qids: the topics.
        groups: topics that must not be parted; groups that overlap become one.
        splits: name -> share; the shares need not add up to 1.
        seed: of the division.

    Returns:
        The split of each topic.

    Raises:
        ValueError: if a share is not positive, or a split gets no topic.
    """
    if not splits or min(splits.values()) <= 0:
        raise ValueError(f"splits={dict(splits)!r} must be names with positive shares")
    parent = {qid: qid for qid in qids}

    def root(qid: str) -> str:
        while parent[qid] != qid:
            parent[qid] = parent[parent[qid]]
            qid = parent[qid]
        return qid

    for first, *others in groups:
        for other in others:
            parent[root(other)] = root(first)
    members: dict[str, list[str]] = {}
    for qid in qids:
        members.setdefault(root(qid), []).append(qid)
    joined = list(members.values())
    random.Random(f"{seed}/splits").shuffle(joined)
    joined.sort(key=len, reverse=True)
    size = dict.fromkeys(splits, 0)
    split_of: dict[str, str] = {}
    for group in joined:
        name = min(splits, key=lambda split: size[split] / splits[split])
        size[name] += len(group)
        split_of.update(dict.fromkeys(group, name))
    empty = [name for name in splits if not size[name]]
    if empty:
        raise ValueError(
            f"splits={dict(splits)!r} cannot be met: {', '.join(empty)} would be empty, for the largest group "
            f"of topics that share relevant passages has {len(joined[0])} of {len(qids)} topics; a small "
            f"relevant_per_query leaves fewer in common"
        )
    return [split_of[qid] for qid in qids]


def _dataset(passages: Any) -> Any:
    if isinstance(passages, str):
        try:
            return pt.get_dataset(passages)
        except KeyError:
            return pt.get_dataset(f"irds:{passages}")
    return passages if hasattr(passages, "get_corpus_iter") else None


def _with_columns(frame: pd.DataFrame, name: str, columns: list[str]) -> pd.DataFrame:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{name} lack the column(s) {', '.join(missing)} (there are {', '.join(map(str, frame))})")
    kept = [*columns, *(["split"] if "split" in frame.columns and name == "topics" else [])]
    return frame[kept].astype({column: str for column in kept if column != "label"}).reset_index(drop=True)
