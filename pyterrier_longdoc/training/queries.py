"""Which queries a model is trained and validated on, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, labels_of


class LeftOutWarning(UserWarning):
    """Some queries of the training candidates are not trained on; `trained_on` of the model says why."""


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
        validated: queries that choose the best weights; 0 without validation.
    """

    queries: int = 0
    used: int = 0
    candidates: int = 0
    relevant: int = 0
    added: int = 0
    unjudged: int = 0
    without_relevant: int = 0
    not_retrieved: int = 0
    without_negative: int = 0
    validated: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.used} of {self.queries} queries are trained on, with {self.candidates} candidates ({self.relevant} "
            f"relevant)"
        ]
        parts += [f"judged documents added that were not retrieved: {self.added}"] if self.added else []
        parts += [f"left out: {self.left_out}"] if self.left_out else []
        parts += [f"validated on {self.validated}"] if self.validated else []
        return "; ".join(parts)

    @property
    def left_out(self) -> str:
        """How many queries are not trained on, by reason."""
        reasons = {
            "not in the qrels": self.unjudged,
            "without a relevant document in the qrels": self.without_relevant,
            "with none of their relevant documents among the candidates": self.not_retrieved,
            "without a non-relevant candidate": self.without_negative,
        }
        return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


def labelled(
    results: pd.DataFrame, qrels: pd.DataFrame, min_label: float, what: str
) -> tuple[np.ndarray, dict[str, int]]:
    """Join R candidates with their qrels, of which the last label of a document counts.

    Return `(R,)` labels, NaN where there is none, and counts of the queries and of those without a relevant candidate.
    """
    check_columns(qrels, ("qid", "docno", "label"), what)
    keys = _keys(results)
    judged = _keys(qrels).assign(label=labels_of(qrels, what)).drop_duplicates(["qid", "docno"], keep="last")
    labels = keys.merge(judged, how="left", on=["qid", "docno"])["label"].to_numpy()
    queries, known = set(keys["qid"]), set(judged["qid"])
    having = set(judged["qid"][judged["label"] >= min_label])
    retrieved = set(keys["qid"][labels >= min_label])
    return labels, {
        "queries": len(queries),
        "unjudged": len(queries - known),
        "without_relevant": len((queries & known) - having),
        "not_retrieved": len((queries & having) - retrieved),
    }


def nothing_to_learn(task: str, counts: TrainedOn, results: pd.DataFrame, qrels: pd.DataFrame) -> ValueError:
    """Return the error where no query serves to train or validate: counts by reason, and some ids of both frames."""
    ids = [
        f"the {what} have {column}s such as {', '.join(map(repr, frame[column].unique()[:3].tolist())) or 'none'}"
        for column in ("qid", "docno")
        for what, frame in (("candidates", results), ("qrels", qrels))
    ]
    return ValueError(
        f"there is nothing to {task} on: of {counts.queries} queries {counts.left_out or 'none'}; check ids and labels "
        f"or retrieve deeper: {', '.join(ids)}"
    )


def check_validation(results: pd.DataFrame, qrels: pd.DataFrame) -> int:
    """Return how many queries the figure of merit is a mean of; refuse data by which all weights are equally good."""
    labels, counts = labelled(results, qrels, 1, "the validation qrels")
    whole_labels(qrels, "the validation qrels")
    used, relevant = counts["queries"] - counts["unjudged"], int(np.count_nonzero(labels >= 1))
    if not relevant:
        told = TrainedOn(**counts, used=used, candidates=len(results), relevant=relevant)
        raise nothing_to_learn("validate", told, results, qrels)
    return used


def whole_labels(qrels: pd.DataFrame, what: str) -> np.ndarray:
    """Return the labels as integers, as measures take them; refuse others."""
    labels = labels_of(qrels, what)
    broken = labels[labels % 1 != 0]
    if len(broken):
        raise ValueError(f"{what}: measures take whole numbers as labels, not {broken[0]:g}: round or scale the labels")
    return labels.astype(int)


def _keys(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: as_strings(frame[name]) for name in ("qid", "docno")}).reset_index(drop=True)
