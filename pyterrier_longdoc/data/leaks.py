"""Find leaks: duplicate documents, and queries or relevant passages shared between splits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from ..common.language import digest
from .collection import PositionedCollection


def find_leaks(collection: PositionedCollection) -> pd.DataFrame:
    """Find duplicate documents, and queries or relevant passages shared between splits.

    Letter case, accents, white space, invisible characters and the Unicode form are ignored.

    Returns:
        One row per leak, with `kind`, `split`, `qid`, `docno` and `other`. A "shared query" or a (relevant) "shared
        passage" is in two splits; `other` is the second. A "duplicate document" has the text of the document `other`.
        A split is not compared with one that contains it.
    """
    rows, first_docnos = list(_shared_between_splits(collection)), dict[int, str]()
    for row in collection.corpus:
        first = first_docnos.setdefault(digest(row["text"]), row["docno"])
        if first != row["docno"]:
            rows.append(("duplicate document", "", "", row["docno"], first))
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
