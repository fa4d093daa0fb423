"""Training data: for each query its positives and negatives, from a run and qrels."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Group:
    """A training query with the texts of its candidates.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        positives: texts judged relevant (label > 0); at least one.
        negatives: texts judged not relevant or not judged, best ranked first; at least one.
    """

    qid: str
    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


def make_groups(
    results: pd.DataFrame, texts: list[str], qrels: pd.DataFrame, *, max_negative_rank: int | None = None
) -> list[Group]:
    """Joins a run with its qrels.

    Args:
        results: `qid, query, docno`, and `score` or `rank` if negatives are to be limited by rank.
        texts: the text of each row of `results`.
        qrels: `qid, docno, label`; unjudged candidates count as not relevant.
        max_negative_rank: negatives are taken from the best so many candidates of a query.

    Returns:
        The queries that have at least one positive and one negative among their candidates, in order of appearance.

    Raises:
        ValueError: if qrels lack a column, or no query has both a positive and a negative.
    """
    check_qrels(qrels)
    judged = zip(qrels["qid"].astype(str), qrels["docno"].astype(str), qrels["label"], strict=True)
    relevant = {(qid, docno) for qid, docno, label in judged if label > 0}
    frame = pd.DataFrame(
        {
            "qid": results["qid"].astype(str).tolist(),
            "query": results["query"].tolist(),
            "text": texts,
            "positive": [
                key in relevant for key in zip(results["qid"].astype(str), results["docno"].astype(str), strict=True)
            ],
            "position": _positions(results),
        }
    )
    groups = [
        group
        for qid, rows in frame.groupby("qid", sort=False)
        if (group := _group(str(qid), rows, max_negative_rank)) is not None
    ]
    if not groups:
        raise ValueError(
            "no training query has both a relevant and a non-relevant candidate: check that the qids and docnos of "
            "the run and the qrels match, and that the first stage retrieves deep enough"
        )
    return groups


def check_qrels(qrels: pd.DataFrame) -> None:
    """Raises ValueError, naming the missing columns, if these are no qrels."""
    missing = {"qid", "docno", "label"} - set(qrels.columns)
    if missing:
        raise ValueError(f"qrels lack the columns {sorted(missing)}; they need qid, docno and label")


def _positions(results: pd.DataFrame) -> list[int]:
    """Rank of each row within its query, by score if there is one, from 0."""
    if "score" in results.columns:
        ranks = results.groupby("qid", sort=False)["score"].rank(ascending=False, method="first") - 1
    elif "rank" in results.columns:
        ranks = results["rank"]
    else:
        ranks = results.groupby("qid", sort=False).cumcount()
    return ranks.astype(int).tolist()


def _group(qid: str, rows: pd.DataFrame, max_negative_rank: int | None) -> Group | None:
    ranked = rows.sort_values("position", kind="stable")
    positives = ranked.loc[ranked["positive"], "text"]
    negatives = ranked.loc[~ranked["positive"]]
    if max_negative_rank is not None:
        negatives = negatives.loc[negatives["position"] < max_negative_rank]
    if positives.empty or negatives.empty:
        return None
    return Group(qid, str(rows["query"].iloc[0]), tuple(positives), tuple(negatives["text"]))
