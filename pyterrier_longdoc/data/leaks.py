"""What a collection must not have: documents twice, and relevant text that is known from training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from ..common.language import digest
from .collection import PositionedCollection


def find_leaks(collection: PositionedCollection) -> pd.DataFrame:
    """Look for documents that stand twice, and for relevant text that is known from training.

    Letter case, accents, white space, invisible characters and the Unicode form make no difference.

    Returns:
        A row for each leak, with `kind`, `split`, `qid`, `docno` and `other`. A "shared query" and a (relevant) "shared
        passage" stand in two splits (`other` is the second). A "duplicate document" has the text of another one
        (`other`). A split is not compared with one that contains all of it.
    """
    rows = [*_shared_between_splits(collection), *_duplicates(collection)]
    return pd.DataFrame(rows, columns=["kind", "split", "qid", "docno", "other"])


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
    texts = {
        split: {(kind, value): (qid, docno) for qid in qids for kind, value, docno in texts_of[qid]}
        for split, qids in splits.items()
    }
    for first, second in combinations(splits, 2):
        if set(splits[first]) <= set(splits[second]) or set(splits[second]) <= set(splits[first]):
            continue
        for (kind, value), place in texts[first].items():
            if (kind, value) in texts[second]:
                yield (kind, first, *place, second)


def _duplicates(collection: PositionedCollection) -> Iterator[tuple[str, ...]]:
    first_docnos: dict[int, str] = {}
    for row in collection.corpus:
        first = first_docnos.setdefault(digest(row["text"]), row["docno"])
        if first != row["docno"]:
            yield ("duplicate document", "", "", row["docno"], first)
