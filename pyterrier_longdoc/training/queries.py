"""The queries used for training and validation, and the reasons why others are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, integer_labels, labels_of


class LeftOutWarning(UserWarning):
    """Training queries or judged documents are left out; `trained_on` of the model shows why."""


@dataclass(frozen=True)
class TrainedOn:
    """The queries from which `fit` learned, with a summary line as its string.

    Attributes:
        queries: queries of the training candidates.
        used: queries used for training.
        candidates: their candidates that can be sampled, including added judged documents.
        relevant: relevant documents among these candidates.
        added: judged documents that were not retrieved and were added by `judged="all"`.
        not_found: judged documents that were neither retrieved nor found by the text loader.
        unjudged: queries left out because their qid is not in the qrels.
        without_relevant: queries left out because the qrels have no relevant document for them.
        not_retrieved: queries left out because none of their relevant documents is among the candidates.
        without_negative: queries left out because no candidate can be a negative.
        validated: validation queries; 0 without validation.
        longest_input: tokens of the longest input of the backbone in training.
    """

    queries: int = 0
    used: int = 0
    candidates: int = 0
    relevant: int = 0
    added: int = 0
    not_found: int = 0
    unjudged: int = 0
    without_relevant: int = 0
    not_retrieved: int = 0
    without_negative: int = 0
    validated: int = 0
    longest_input: int = 0

    def __str__(self) -> str:
        if not self.queries:
            return f"inputs of up to {self.longest_input} tokens"
        parts = [
            f"{self.used} of {self.queries} queries are trained on, with {self.candidates} candidates ({self.relevant} "
            f"relevant)"
        ]
        parts += [f"judged documents added that were not retrieved: {self.added}"] if self.added else []
        parts += [f"judged documents left out without a text: {self.not_found}"] if self.not_found else []
        parts += [f"left out: {self.left_out}"] if self.left_out else []
        parts += [f"validated on {self.validated}"] if self.validated else []
        return "; ".join(parts)

    @property
    def left_out(self) -> str:
        """The numbers of queries that are left out, by reason."""
        reasons = {
            "not in the qrels": self.unjudged,
            "without a relevant document in the qrels": self.without_relevant,
            "with none of their relevant documents among the candidates": self.not_retrieved,
            "without a non-relevant candidate": self.without_negative,
        }
        return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


def labels_and_counts(
    results: pd.DataFrame, qrels: pd.DataFrame, min_label: float, owner: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """Join R candidates with their qrels.

    Returns `(R,)` labels, NaN for unjudged candidates, and the numbers of all queries and of those left out, by reason.
    """
    check_columns(qrels, ("qid", "docno", "label"), owner)
    keys = _keys(results)
    judged = _keys(qrels).assign(label=labels_of(qrels, owner)).drop_duplicates()
    labels = keys.merge(judged, how="left", on=["qid", "docno"])["label"].to_numpy()
    queries, judged_qids = set(keys["qid"]), set(judged["qid"])
    relevant_qids = set(judged["qid"][judged["label"] >= min_label])
    retrieved_qids = set(keys["qid"][labels >= min_label])
    return labels, {
        "queries": len(queries),
        "unjudged": len(queries - judged_qids),
        "without_relevant": len((queries & judged_qids) - relevant_qids),
        "not_retrieved": len((queries & relevant_qids) - retrieved_qids),
    }


def nothing_to_learn(task: str, counts: TrainedOn, results: pd.DataFrame, qrels: pd.DataFrame) -> NoReturn:
    """Raise ValueError if no query can be used, with counts by reason and ids of both frames."""
    ids = [
        f"the {name} have {column}s such as {', '.join(map(repr, frame[column].unique()[:3].tolist())) or 'none'}"
        for column in ("qid", "docno")
        for name, frame in (("candidates", results), ("qrels", qrels))
    ]
    raise ValueError(
        f"there is nothing to {task} on: of {counts.queries} queries {counts.left_out or 'none'}; check ids and labels "
        f"or retrieve deeper: {', '.join(ids)}"
    )


def check_validation(results: pd.DataFrame, qrels: pd.DataFrame) -> int:
    """Return the number of validation queries; refuse data without a relevant candidate."""
    labels, counts = labels_and_counts(results, qrels, 1, "the validation qrels")
    integer_labels(qrels, "the validation qrels")
    used, relevant = counts["queries"] - counts["unjudged"], int(np.count_nonzero(labels >= 1))
    if not relevant:
        validated_on = TrainedOn(**counts, used=used, candidates=len(results), relevant=relevant)
        nothing_to_learn("validate", validated_on, results, qrels)
    return used


def _keys(frame: pd.DataFrame) -> pd.DataFrame:
    keys = {"qid": as_strings(frame["qid"]), "docno": as_strings(frame["docno"])}
    return pd.DataFrame(keys).reset_index(drop=True)
