"""Looks for what a collection must not have: relevant text that is unjudged, or known from training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

import pandas as pd

from pyterrier_longdoc.data.far_relevant import FarDocuments
from pyterrier_longdoc.data.passages import digest
from pyterrier_longdoc.data.positioned import PositionedCollection

LEAKS = ("shared query", "shared passage", "duplicate document", "relevant filler", "unjudged passage")


def find_leaks(collection: PositionedCollection) -> pd.DataFrame:
    """Looks for leaks. Texts that differ in letter case and white space only count as equal.

    Args:
        collection: any; that filler is relevant can be seen only if `far_relevant` has just made the collection.

    Returns:
        A row for each leak, with `kind`, `split`, `qid`, `docno` and `other`: a "shared query" stands in two splits
        (`other` is the second), and so does a "shared passage", a relevant one; a "duplicate document" has the text
        of another one (`other`); "relevant filler" (`other`, a passage) is relevant for a topic of its document; an
        "unjudged passage" is filler that is relevant for a topic its document is not judged for. Splits that contain
        another one whole are not compared with it.
    """
    rows = [*_between_splits(collection), *_duplicates(collection)]
    if isinstance(collection.documents, FarDocuments):
        rows.extend(_filler(collection, collection.documents))
    return pd.DataFrame(rows, columns=["kind", "split", "qid", "docno", "other"])


def check_leaks(collection: PositionedCollection) -> None:
    """Raises ValueError if there is any leak; see `find_leaks`."""
    leaks = find_leaks(collection)
    if len(leaks):
        counts = ", ".join(f"{count} x {kind}" for kind, count in leaks["kind"].value_counts().items())
        raise ValueError(f"{collection!r} leaks: {counts}; find_leaks shows them, the first is {dict(leaks.iloc[0])}")


def _between_splits(collection: PositionedCollection) -> Iterator[tuple[str, ...]]:
    queries, passages = {}, {}
    relevant = _relevant_digests(collection) if len(collection.splits) > 1 else {}
    for split, qids in collection.splits.items():
        topics = collection.get_topics(split)
        queries[split] = {digest(query): (qid, "") for qid, query in topics.itertuples(index=False)}
        passages[split] = {value: place for qid in qids for value, place in relevant.get(qid, [])}
    for (first, a), (second, b) in combinations(collection.splits.items(), 2):
        if set(a) <= set(b) or set(b) <= set(a):
            continue
        for kind, found in (("shared query", queries), ("shared passage", passages)):
            for value in found[first].keys() & found[second].keys():
                yield (kind, first, *found[first][value], second)


def _relevant_digests(collection: PositionedCollection) -> dict[str, list[tuple[int, tuple[str, str]]]]:
    found: dict[str, list[tuple[int, tuple[str, str]]]] = {}
    gold = collection.gold.sort_values("docno", kind="stable")
    for qid, docno, start, end in gold[["qid", "docno", "start", "end"]].itertuples(index=False):
        value = digest(collection.documents[docno]["text"][start:end])
        found.setdefault(qid, []).append((value, (qid, docno)))
    return found


def _duplicates(collection: PositionedCollection) -> Iterator[tuple[str, ...]]:
    first_of: dict[int, str] = {}
    for row in collection.corpus:
        first = first_of.setdefault(digest(row["text"]), row["docno"])
        if first != row["docno"]:
            yield ("duplicate document", "", "", row["docno"], first)


def _filler(collection: PositionedCollection, documents: FarDocuments) -> Iterable[tuple[str, ...]]:
    relevance, pool = documents.relevance, documents.pool
    judged = collection.qrels.groupby("docno")["qid"].agg(set).to_dict()
    for docno in documents:
        own = judged.get(docno, set())
        for piece in documents.filler_of(docno):
            topics = {relevance.qids[topic] for topic in relevance.topics_of.get(int(pool.digests[piece]), [])}
            for qid in sorted(topics):
                kind = "relevant filler" if qid in own else "unjudged passage"
                yield (kind, "", qid, docno, pool.docno(piece))
