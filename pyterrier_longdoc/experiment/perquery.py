"""Per-query values of measures, exactly as `pt.Experiment` computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt

from .runs import Run, as_strings

SUMMED = ("num_q", "num_rel", "num_ret", "num_rel_ret", "NumQ", "NumRel", "NumRet", "NumRelRet")
"""Counts, whose value over all queries is their sum, not their mean: as in `pt.Experiment`."""


class QueryEvaluator:
    """Evaluates runs on the queries that have judgements.

    A judged query for which a system returned nothing counts as the measure's default, 0 for all common ones. Topics
    without judgements do not count. Documents of equal score (in float32) rank by docno, descending: trec_eval's rule.

    Args:
        topics: `qid` (strings) and any other columns.
        qrels: `qid` (strings), `docno, label`.
        metrics: ir_measures measures, or their names in ir_measures' (`"nDCG@10"`) or trec_eval's words (`"map"`).
        filter_by_topics: leave out the judgements of other queries, which would count as 0 otherwise. As in
            `pt.Experiment`.

    Attributes:
        qids: the Q queries that count, in the qrels' order.
        names: the M measures' names.

    Raises:
        ValueError: if nothing is judged, or a measure is unknown.
    """

    def __init__(
        self, topics: pd.DataFrame, qrels: pd.DataFrame, metrics: Iterable[Any], *, filter_by_topics: bool = True
    ) -> None:
        judged = qrels[["qid", "docno", "label"]].assign(docno=as_strings(qrels["docno"]))
        if filter_by_topics:
            judged = judged[judged["qid"].isin(set(topics["qid"]))]
        if not len(judged):
            raise ValueError("qrels and topics have no qid in common: no topic can be evaluated")
        measures = _named_measures(metrics)
        self.qids: tuple[str, ...] = tuple(dict.fromkeys(judged["qid"].tolist()))
        self.names: tuple[str, ...] = tuple(measures)
        self._row = {qid: row for row, qid in enumerate(self.qids)}
        self._column = {measure: column for column, measure in enumerate(measures.values())}
        self._evaluator = ir_measures.evaluator(list(self._column), pt.model.to_ir_measures(judged))

    def __call__(self, run: Run) -> np.ndarray:
        """`(Q, M)` values of a run."""
        values = np.full((len(self.qids), len(self.names)), np.nan)
        for metric in self._evaluator.iter_calc(run.as_dict()):
            values[self._row[metric.query_id], self._column[metric.measure]] = metric.value
        return values


def aggregate(values: np.ndarray, names: Iterable[str]) -> np.ndarray:
    """`(..., Q, M)` per-query values to `(..., M)` values of the system: means, and sums of counts."""
    summed = np.array([name in SUMMED for name in names])
    return np.where(summed, values.sum(axis=-2), values.mean(axis=-2))


def check_columns(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Raises ValueError, naming them, if columns are missing."""
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"{what} must be a DataFrame, not {type(frame).__name__}")
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}; they have {', '.join(map(str, frame))}")


def _named_measures(metrics: Iterable[Any]) -> dict[str, Any]:
    """Measures by the name that `pt.Experiment` gives them: a trec_eval name stays as it was written."""
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise ValueError(f"metrics={metrics!r} must be a list of measures, e.g. [nDCG@10, 'map']")
    names: dict[Any, str] = {}  # by measure: "map" and AP are one
    for metric in metrics:
        if isinstance(metric, ir_measures.Measure):
            names.setdefault(metric, str(metric))
            continue
        if metric == "mrt":
            raise ValueError("'mrt' is no measure here: efficiency=True gives milliseconds per query and document")
        family = _parse(metric)
        for measure in family:
            names.setdefault(measure, metric if len(family) == 1 else str(measure))
    if not names:
        raise ValueError("metrics is empty: name at least one measure, e.g. [nDCG@10]")
    return {name: measure for measure, name in names.items()}


def _parse(metric: Any) -> list[Any]:
    for parse in (ir_measures.parse_trec_measure, lambda name: [ir_measures.parse_measure(name)]):
        try:
            return parse(metric)
        except (ValueError, NameError, TypeError, AttributeError):
            continue
    raise ValueError(f"unknown measure {metric!r}: use ir_measures' names (nDCG@10) or trec_eval's (ndcg_cut_10)")
