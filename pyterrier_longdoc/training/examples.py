"""What is trained on: each query's candidates with their labels, what an epoch draws of them, a teacher's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_given
from ..common.frames import check_columns
from .losses import LOSSES
from .recipe import TrainingArgs


@dataclass(frozen=True)
class Group:
    """A training query with its candidates, best ranked first.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        texts: C candidates.
        labels: C labels: relevant candidates have at least 1, the more the better, whatever the collection's scale; all
            others have 0.
        targets: the teacher's C scores, or None.
    """

    qid: str
    query: str
    texts: tuple[str, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None = None

    @property
    def positives(self) -> list[int]:
        """Indices of the relevant candidates."""
        return [i for i, label in enumerate(self.labels) if label > 0]

    @property
    def negatives(self) -> list[int]:
        """Indices of all others."""
        return [i for i, label in enumerate(self.labels) if label <= 0]


def make_groups(
    results: pd.DataFrame, texts: list[str], qrels: pd.DataFrame, args: TrainingArgs | None = None
) -> list[Group]:
    """Joins a run with its qrels.

    Args:
        results: `qid, query, docno`, `score` or `rank` if negatives are to be limited by rank, and the recipe's
            `teacher_field` if it is there.
        texts: the text of each row of `results`.
        qrels: `qid, docno, label`; of several labels of a document the last one counts.
        args: the recipe: `max_negative_rank`, `negative_pool`, `min_label`, `unjudged`, `loss`, `teacher_field`,
            `seed`; None for the defaults.

    Returns:
        The queries that have at least one positive and one negative among their candidates, in order of appearance.

    Raises:
        ValueError: if qrels lack a column, no query has both a positive and a negative, or a teacher's scores are
            missing or not finite.
    """
    args = args or TrainingArgs()
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    judged = dict(zip(keys_of(qrels), qrels["label"].astype(float), strict=True))
    frame = pd.DataFrame(
        {
            "qid": results["qid"].astype(str).tolist(),
            "query": results["query"].tolist(),
            "text": texts,
            "label": np.array([judged.get(key, np.nan) for key in keys_of(results)], dtype=float),
            "position": _positions(results),
        }
    )
    if args.teacher_field in results.columns:
        frame["target"] = results[args.teacher_field].to_numpy(dtype=float)
        if not np.isfinite(frame["target"]).all():
            raise ValueError(f"the teacher's scores in the column {args.teacher_field!r} are not all finite numbers")
    elif LOSSES[args.loss].teacher:
        raise ValueError(
            f"loss={args.loss!r} needs the teacher's scores: the training candidates have no column "
            f"{args.teacher_field!r}; put TeacherScores(teacher) before the student, or set teacher_field"
        )
    groups = [_group(str(qid), candidates, args) for qid, candidates in frame.groupby("qid", sort=False)]
    found = [group for group in groups if group is not None]
    if not found:
        raise ValueError(
            "no training query has both a relevant and a non-relevant candidate: check that the qids and docnos of "
            "the run and the qrels match, and that the first stage retrieves deep enough"
        )
    return found


def keys_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The query and document of each row, as strings."""
    return list(zip(frame["qid"].astype(str), frame["docno"].astype(str), strict=True))


def _group(qid: str, rows: pd.DataFrame, args: TrainingArgs) -> Group | None:
    """The candidates that may be drawn, the same in every epoch; None without a positive or a negative."""
    if args.unjudged == "skip":
        rows = rows[rows["label"].notna()]
    rows = rows.sort_values("position", kind="stable")
    judged = rows["label"].to_numpy()
    positive = judged >= args.min_label
    labels = np.where(positive, judged - args.min_label + 1, 0.0)
    negatives = ~positive
    if args.max_negative_rank is not None:
        negatives &= rows["position"].to_numpy() < args.max_negative_rank
    places = np.flatnonzero(negatives).tolist()
    if not positive.any() or not places:
        return None
    if args.negative_pool is not None and len(places) > args.negative_pool:
        places = Random(f"{args.seed}:pool:{qid}").sample(places, args.negative_pool)
    drawable = sorted([*np.flatnonzero(positive), *places])
    rows = rows.iloc[drawable]
    return Group(
        qid,
        str(rows["query"].iloc[0]),
        tuple(rows["text"]),
        tuple(labels[drawable].tolist()),
        tuple(rows["target"].tolist()) if "target" in rows.columns else None,
    )


def _positions(results: pd.DataFrame) -> list[int]:
    """Rank of each row within its query, by score if there is one, from 0."""
    if "score" in results.columns:
        ranks = results.groupby("qid", sort=False)["score"].rank(ascending=False, method="first") - 1
    elif "rank" in results.columns:
        ranks = results["rank"]
    else:
        ranks = results.groupby("qid", sort=False).cumcount()
    return ranks.astype(int).tolist()


def pseudo_qrels(results: pd.DataFrame, *, relevant: int = 1) -> pd.DataFrame:
    """Labels made of a first stage's own ranking, for training where nothing is judged (Mokrii et al. 2021).

    Args:
        results: `qid, docno` and `score` or `rank`, e.g. of BM25.
        relevant: how many of the best candidates of each query count as relevant.

    Returns:
        `qid, docno, label` with label 1 for these and 0 for all others.
    """
    check_given(relevant=relevant)
    labels = [int(position < relevant) for position in _positions(results)]
    return results[["qid", "docno"]].assign(label=labels).reset_index(drop=True)


Pick = tuple[Group, tuple[int, ...]]
"""A query and the indices of some of its candidates; with `sampling="pairs"` a positive's, then negatives'."""


def examples_per_epoch(groups: Sequence[Group], args: TrainingArgs) -> int:
    """How many picks an epoch has."""
    return sum(len(group.texts) for group in groups) if args.sampling == "pointwise" else len(groups)


def draw_epoch(groups: Sequence[Group], args: TrainingArgs, epoch: int) -> list[Pick]:
    """All picks of an epoch in the order of training.

    Every draw depends on the seed, the epoch and the query alone, not on what was drawn before: a run that continues
    after a kill needs no state of a random generator.

    Args:
        groups: the training data.
        args: the recipe: `sampling`, `negatives`, `seed`.
        epoch: its number, from 0.
    """
    picks: list[Pick] = []
    for group in groups:
        if args.sampling == "pointwise":
            picks += [(group, (i,)) for i in range(len(group.texts))]
            continue
        rng = Random(f"{args.seed}:{epoch}:{group.qid}")
        positive, negatives = rng.choice(group.positives), group.negatives
        if args.sampling == "listwise":
            others = [i for i in range(len(group.texts)) if i != positive]
            drawn = sorted([positive, *rng.sample(others, min(args.negatives, len(others)))])
        elif len(negatives) >= args.negatives:
            drawn = [positive, *rng.sample(negatives, args.negatives)]
        else:
            # Too few: each is taken equally often, or once more.
            rng.shuffle(negatives)
            drawn = [positive, *(negatives[i % len(negatives)] for i in range(args.negatives))]
        picks.append((group, tuple(drawn)))
    Random(f"{args.seed}:{epoch}").shuffle(picks)
    return picks


def make_example(pick: Pick, args: TrainingArgs, epoch: int) -> Group:
    """What one loss is computed of: the candidates of a pick in its order, augmented if the recipe says so."""
    group, candidates = pick
    texts = [group.texts[i] for i in candidates]
    if args.augment is not None:
        rngs = [Random(f"{args.seed}:{epoch}:{group.qid}:{i}") for i in candidates]
        texts = [args.augment(text, rng) for text, rng in zip(texts, rngs, strict=True)]
    labels = tuple(group.labels[i] for i in candidates)
    targets = None if group.targets is None else tuple(group.targets[i] for i in candidates)
    return Group(group.qid, group.query, tuple(texts), labels, targets)


class TeacherScores(pt.Transformer):
    """Adds a column with the scores of another transformer; all other columns stay, the score too.

    Args:
        teacher: scores `qid, query, docno` and text; frozen, whatever it is.
        column: its name, as in the student's `TrainingArgs(teacher_field=...)`.

    Example:
        `student = ld.MaxP(small, training=ld.TrainingArgs(loss="margin_mse"))`, then
        `(bm25 >> text >> TeacherScores(teacher) >> student).fit(topics, qrels)`. PARADE's distillation (Eq. 8) is
        `TrainingArgs.preset("parade-distillation")`.
    """

    def __init__(self, teacher: pt.Transformer, *, column: str = "teacher_score") -> None:
        super().__init__()
        self.teacher = teacher
        self.column = column

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the column.

        Raises:
            ValueError: if the teacher drops a candidate, or has several scores for one.
        """
        keys, columns = ["qid", "docno"], {"qid": str, "docno": str}
        answer: Any = self.teacher(inp)
        scores = answer[[*keys, "score"]].astype(columns).drop_duplicates().set_index(keys)["score"].astype(float)
        twice = scores.index[scores.index.duplicated()]
        if len(twice):
            raise ValueError(f"the teacher gives {len(twice)} candidates several scores, e.g. {twice[0]}")
        asked = pd.MultiIndex.from_frame(inp[keys].astype(columns))
        missing = asked[~asked.isin(scores.index)]
        if len(missing):
            raise ValueError(
                f"the teacher gives no score for {len(missing)} of {len(asked)} candidates, e.g. {missing[0]}"
            )
        return inp.assign(**{self.column: scores.reindex(asked).to_numpy()})
