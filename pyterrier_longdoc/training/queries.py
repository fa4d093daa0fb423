"""Which queries a model is trained and validated on, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, labels_of
from .recipe import TrainingArgs


class LeftOutWarning(UserWarning):
    """Some queries of the training candidates are not trained on; `trained_on` of the model says why."""


@dataclass(frozen=True)
class ValidatedOn:
    """Which queries `fit` validates on.

    Attributes:
        queries: queries of the validation candidates.
        used: those that the figure of merit is a mean of: the qrels have their qid.
        without_relevant: those of these that have no relevant candidate, so that their figure is always 0.
    """

    queries: int
    used: int
    without_relevant: int

    def __str__(self) -> str:
        counts = {"not in the qrels": self.queries - self.used, "without a relevant candidate": self.without_relevant}
        asides = ", ".join([f"{count} {what}" for what, count in counts.items() if count])
        return f"validated on {self.used} of {self.queries}{f' ({asides})' if asides else ''}"


@dataclass(frozen=True)
class TrainedOn:
    """Which queries `fit` learned from; as a string, one line.

    Attributes:
        queries: queries of the training candidates.
        used: those that are trained on.
        candidates: their candidates that may be drawn, judged documents that were added among them.
        relevant: the relevant ones of these.
        added: judged documents that were not retrieved and are added, with the recipe's `judged="all"`.
        unjudged: queries left out because the qrels do not have their qid.
        without_relevant: because the qrels have no relevant document for them.
        not_retrieved: because none of their relevant documents is among the candidates.
        without_negative: because there is no candidate that may be a negative.
        validation: the queries that choose the best weights; None without validation.
    """

    queries: int
    used: int
    candidates: int
    relevant: int
    added: int
    unjudged: int
    without_relevant: int
    not_retrieved: int
    without_negative: int
    validation: ValidatedOn | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.used} of {self.queries} queries are trained on, with {self.candidates} candidates ({self.relevant} "
            f"relevant)"
        ]
        if self.added:
            parts.append(f"judged documents added that were not retrieved: {self.added}")
        reasons = {
            "not in the qrels": self.unjudged,
            "without a relevant document in the qrels": self.without_relevant,
            "with none of their relevant documents among the candidates": self.not_retrieved,
            "without a non-relevant candidate": self.without_negative,
        }
        if self.used < self.queries:
            parts.append("left out: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count))
        if self.validation is not None:
            parts.append(str(self.validation))
        return "; ".join(parts)


def trained_on(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    labels: Sequence[np.ndarray],
    args: TrainingArgs,
    *,
    added: int,
    validation: ValidatedOn | None = None,
) -> TrainedOn:
    """Counts the queries of a training.

    Args:
        results: the training candidates, added ones included.
        qrels: `qid, docno, label`.
        labels: of each query that is trained on, the labels of its candidates.
        args: the recipe.
        added: how many candidates were added.
        validation: what `check_validation` gives; None without validation.
    """
    found = _judged(results, qrels, args.min_label, "qrels")
    unjudged, without_relevant, not_retrieved = map(len, found[1:])
    return TrainedOn(
        queries=len(found.queries),
        used=len(labels),
        candidates=sum(map(len, labels)),
        relevant=sum([int(np.count_nonzero(own > 0)) for own in labels]),
        added=added,
        unjudged=unjudged,
        without_relevant=without_relevant,
        not_retrieved=not_retrieved,
        without_negative=len(found.queries) - len(labels) - unjudged - without_relevant - not_retrieved,
        validation=validation,
    )


def nothing_to_train_on(results: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs) -> ValueError:
    """Why no query of the training candidates can be trained on."""
    found = _judged(results, qrels, args.min_label, "qrels")
    error = _no_relevant_candidate(found, results, qrels, "training", args.min_label)
    if error is not None:
        return error
    having = len(found.queries - found.unjudged - found.without_relevant - found.not_retrieved)
    limits = f"max_negative_rank={args.max_negative_rank}, unjudged={args.unjudged!r}, min_label={args.min_label}"
    return ValueError(
        f"nothing to train on: {having} of {len(found.queries)} queries have a relevant candidate, but none of these "
        f"has a non-relevant one that may be drawn ({limits}): give more candidates for each query"
    )


def check_validation(results: pd.DataFrame, qrels: pd.DataFrame) -> ValidatedOn:
    """Counts the queries of a validation.

    Raises:
        ValueError: if the qrels lack a column, no query has a relevant candidate, so that all weights are equally good,
            or a label is no whole number.
    """
    check_columns(qrels, ("qid", "docno", "label"), "the validation qrels")
    whole_labels(qrels, "the validation qrels")
    found = _judged(results, qrels, 1, "the validation qrels")
    error = _no_relevant_candidate(found, results, qrels, "validation", 1)
    if error is not None:
        raise error
    judged, hopeless = found.queries - found.unjudged, found.without_relevant | found.not_retrieved
    return ValidatedOn(len(found.queries), len(judged), len(hopeless))


def whole_labels(qrels: pd.DataFrame, what: str) -> np.ndarray:
    """The labels as integers, as measures take them.

    Raises:
        ValueError: if one is no whole number.
    """
    labels = labels_of(qrels, what)
    broken = labels[labels % 1 != 0]
    if len(broken):
        raise ValueError(f"{what}: measures take whole numbers as labels, not {broken[0]:g}: round or scale the labels")
    return labels.astype(int)


class _Judged(NamedTuple):
    """Qids of the candidates' queries, and of those that cannot have a relevant candidate."""

    queries: set[str]
    unjudged: set[str]
    without_relevant: set[str]
    not_retrieved: set[str]


def _judged(results: pd.DataFrame, qrels: pd.DataFrame, min_label: float, what: str) -> _Judged:
    labels, qids = _last_labels(qrels, what), as_strings(results["qid"])
    queries, judged = set(qids.unique()), set(labels["qid"].unique())
    having = set(labels.loc[labels["label"] >= min_label, "qid"].unique())
    retrieved = set(qids[labels_of_rows(results, qrels, what) >= min_label].unique())
    return _Judged(queries, queries - judged, (queries & judged) - having, (queries & having) - retrieved)


def labels_of_rows(results: pd.DataFrame, qrels: pd.DataFrame, what: str) -> np.ndarray:
    """The label of each row's query and document, `(R,)` float64; NaN where it has none.

    Args:
        results: R rows with `qid, docno`.
        qrels: `qid, docno, label`; of several labels of a document the last one counts.
        what: whose labels they are, for the error.

    Raises:
        ValueError: if a label is no number.
    """
    return _keys(results).merge(_last_labels(qrels, what), how="left", on=["qid", "docno"])["label"].to_numpy()


def _last_labels(qrels: pd.DataFrame, what: str) -> pd.DataFrame:
    return _keys(qrels).assign(label=labels_of(qrels, what)).drop_duplicates(["qid", "docno"], keep="last")


def _keys(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: as_strings(frame[name]) for name in ("qid", "docno")}).reset_index(drop=True)


def _no_relevant_candidate(
    found: _Judged, results: pd.DataFrame, qrels: pd.DataFrame, task: str, min_label: float
) -> ValueError | None:
    """Why no query has a relevant candidate; None if one has."""
    judged = found.queries - found.unjudged
    if not found.queries:
        return ValueError(f"there are no {task} candidates: the frame has no rows")
    if not judged:
        return ValueError(
            f"the qids of the {task} candidates and of their qrels do not match: none is in both. The candidates have "
            f"{_examples(results['qid'])}, the qrels {_examples(qrels['qid'])}"
        )
    if not judged - found.without_relevant:
        labels = _keys(qrels).assign(label=labels_of(qrels, "qrels"))
        labels = labels[labels["qid"].isin(judged)]
        highest = labels["label"].max()
        if highest >= min_label:
            qid, docno, label = labels[labels["label"] == highest].iloc[0]
            last = labels.loc[(labels["qid"] == qid) & (labels["docno"] == docno), "label"].iloc[-1]
            return ValueError(
                f"the qrels judge the document {docno!r} of the query {qid!r} twice, with the labels {label:g} and "
                f"{last:g}, of which the last counts, so that none is relevant: keep one judgement of each pair"
            )
        return ValueError(
            f"the qrels have no positives: no document of the {len(judged)} {task} queries that they judge has a label "
            f"of at least {min_label}, the highest is {highest:g}"
        )
    if judged - found.without_relevant - found.not_retrieved:
        return None
    if not set(as_strings(results["docno"])) & set(as_strings(qrels["docno"])):
        return ValueError(
            f"the docnos of the {task} candidates and of their qrels do not match: none is in both. The candidates "
            f"have {_examples(results['docno'])}, the qrels {_examples(qrels['docno'])}"
        )
    deepest = int(as_strings(results["qid"]).value_counts().max())
    instead = ", or train on those not retrieved too, TrainingArgs(judged='all')" if task == "training" else ""
    return ValueError(
        f"no positives among the {task} candidates: the qrels have relevant documents for {len(found.not_retrieved)} "
        f"of {len(found.queries)} queries, but none of these is a candidate of its query (which have up to {deepest}): "
        f"retrieve deeper{instead}"
    )


def _examples(ids: pd.Series) -> str:
    """The first distinct values of a column as they are, and their type."""
    first = ", ".join(map(repr, ids.drop_duplicates().head(3).tolist()))
    return f"{first or 'none'} ({ids.dtype})"
