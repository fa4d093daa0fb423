"""Training data: for each query its candidates and their labels, from a run and qrels."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .args import TrainingArgs


@dataclass(frozen=True)
class Group:
    """A training query with its candidates, best ranked first.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        texts: C candidates.
        labels: C labels, the more the better; where not judged 0, or less if 0 is positive.
        targets: the teacher's C scores, or None.
        min_label: labels from here on are positive.
    """

    qid: str
    query: str
    texts: tuple[str, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None = None
    min_label: float = 1

    @property
    def positives(self) -> list[int]:
        """Indices of the relevant candidates."""
        return [i for i, label in enumerate(self.labels) if label >= self.min_label]

    @property
    def negatives(self) -> list[int]:
        """Indices of all others."""
        return [i for i, label in enumerate(self.labels) if label < self.min_label]


def make_groups(
    results: pd.DataFrame, texts: list[str], qrels: pd.DataFrame, args: TrainingArgs | None = None
) -> list[Group]:
    """Joins a run with its qrels.

    Args:
        results: `qid, query, docno`, `score` or `rank` if negatives are to be limited by rank, and the recipe's
            `teacher_field` if it is there.
        texts: the text of each row of `results`.
        qrels: `qid, docno, label`; of several labels of a document the last one counts.
        args: the recipe: `max_negative_rank`, `negative_pool`, `min_label`, `unjudged`, `teacher_field`, `seed`;
            None for the defaults.

    Returns:
        The queries that have at least one positive and one negative among their candidates, in order of appearance.

    Raises:
        ValueError: if qrels lack a column, no query has both a positive and a negative, or a teacher's score is not
            finite.
    """
    args = args or TrainingArgs()
    check_qrels(qrels)
    keys = zip(qrels["qid"].astype(str), qrels["docno"].astype(str), strict=True)
    judged = dict(zip(keys, qrels["label"].astype(float), strict=True))
    rows = zip(results["qid"].astype(str), results["docno"].astype(str), strict=True)
    labels = [judged.get(key, np.nan) for key in rows]
    frame = pd.DataFrame(
        {
            "qid": results["qid"].astype(str).tolist(),
            "query": results["query"].tolist(),
            "text": texts,
            "label": np.array(labels, dtype=float),
            "position": _positions(results),
        }
    )
    if args.teacher_field in results.columns:
        frame["target"] = _targets(results[args.teacher_field])
    groups = [
        group
        for qid, candidates in frame.groupby("qid", sort=False)
        if (group := _group(str(qid), candidates, args)) is not None
    ]
    if not groups:
        raise ValueError(
            "no training query has both a relevant and a non-relevant candidate: check that the qids and docnos of "
            "the run and the qrels match, and that the first stage retrieves deep enough"
        )
    return groups


def pseudo_qrels(results: pd.DataFrame, *, relevant: int = 1) -> pd.DataFrame:
    """Labels made of a first stage's own ranking, for training where nothing is judged (Mokrii et al. 2021).

    Args:
        results: `qid, docno` and `score` or `rank`, e.g. of BM25.
        relevant: how many of the best candidates of each query count as relevant.

    Returns:
        `qid, docno, label` with label 1 for these and 0 for all others.
    """
    if relevant < 1:
        raise ValueError(f"relevant={relevant} must be at least 1")
    labels = [int(position < relevant) for position in _positions(results)]
    return results[["qid", "docno"]].assign(label=labels).reset_index(drop=True)


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


def _targets(column: pd.Series) -> np.ndarray:
    targets = column.to_numpy(dtype=float)
    if not np.isfinite(targets).all():
        raise ValueError(f"the teacher's scores in the column {column.name!r} are not all finite numbers")
    return targets


def _group(qid: str, rows: pd.DataFrame, args: TrainingArgs) -> Group | None:
    if args.unjudged == "skip":
        rows = rows[rows["label"].notna()]
    ranked = rows.sort_values("position", kind="stable")
    positive = ranked["label"] >= args.min_label
    negative = ~positive
    if args.max_negative_rank is not None:
        negative &= ranked["position"] < args.max_negative_rank
    if not positive.any() or not negative.any():
        return None
    kept = (positive | _pool(negative, qid, args)).to_numpy()
    ranked = ranked[kept]
    return Group(
        qid,
        str(ranked["query"].iloc[0]),
        tuple(ranked["text"]),
        tuple(ranked["label"].fillna(min(0.0, args.min_label - 1.0)).tolist()),
        tuple(ranked["target"].tolist()) if "target" in ranked.columns else None,
        args.min_label,
    )


def _pool(negative: pd.Series, qid: str, args: TrainingArgs) -> pd.Series:
    """Which negatives a query may draw from, the same in every epoch."""
    places = np.flatnonzero(negative.to_numpy())
    if args.negative_pool is None or len(places) <= args.negative_pool:
        return negative
    chosen = random.Random(f"{args.seed}:pool:{qid}").sample(places.tolist(), args.negative_pool)
    mask = np.zeros(len(negative), dtype=bool)
    mask[chosen] = True
    return pd.Series(mask, index=negative.index)
