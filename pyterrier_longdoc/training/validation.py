"""The figure of merit by which epochs are compared."""

from __future__ import annotations

from typing import Any

import ir_measures
import pandas as pd


def measure_named(name: str) -> Any:
    """The ir_measures measure of this name.

    Raises:
        ValueError: if there is none.
    """
    try:
        return ir_measures.parse_measure(name)
    except (NameError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"metric={name!r} is no measure that ir_measures knows: name it as in pt.Experiment, e.g. 'nDCG@10', "
            f"'RR@10' or 'AP'"
        ) from error


def evaluate(results: pd.DataFrame, qrels: pd.DataFrame, metric: str) -> float:
    """Mean of a measure over the judged queries among the results.

    Args:
        results: `qid, docno, score`.
        qrels: `qid, docno, label`.
        metric: the name of any ir_measures measure, e.g. `"nDCG@10"`.
    """
    measure = measure_named(metric)
    names = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}
    run = results[["qid", "docno", "score"]].astype({"qid": str, "docno": str}).rename(columns=names)
    qrels = qrels[qrels["qid"].astype(str).isin(set(run["query_id"]))]
    judged = qrels[["qid", "docno", "label"]].astype({"qid": str, "docno": str, "label": int}).rename(columns=names)
    return float(ir_measures.calc_aggregate([measure], judged, run)[measure])
