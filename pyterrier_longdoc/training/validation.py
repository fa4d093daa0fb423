"""The figure of merit by which epochs are compared."""

from __future__ import annotations

import ir_measures
import pandas as pd


def evaluate(results: pd.DataFrame, qrels: pd.DataFrame, metric: str) -> float:
    """Mean of a measure over the judged queries.

    Args:
        results: `qid, docno, score`.
        qrels: `qid, docno, label`.
        metric: the name of any ir_measures measure, e.g. `"nDCG@10"`.
    """
    measure = ir_measures.parse_measure(metric)
    names = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}
    run = results[["qid", "docno", "score"]].astype({"qid": str, "docno": str}).rename(columns=names)
    judged = qrels[["qid", "docno", "label"]].astype({"qid": str, "docno": str, "label": int}).rename(columns=names)
    return float(ir_measures.calc_aggregate([measure], judged, run)[measure])
