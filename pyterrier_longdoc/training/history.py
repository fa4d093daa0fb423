"""The history of a training: validation measure, table of entries, and learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ir_measures
import pandas as pd

from ..common.frames import integer_labels
from ..common.measures import measure_named
from ..common.plots import COLOURS, new_axes


def evaluate(results: pd.DataFrame, qrels: pd.DataFrame, metric: str) -> float:
    """Return the mean of a measure (as in `pt.Experiment`, e.g. `"nDCG@10"`) over the judged queries.

    Args:
        results: `qid, docno, score`; the last score of a repeated document counts.
        qrels: `qid, docno, label`; labels are whole numbers.
        metric: the measure.
    """
    measure = measure_named(metric)
    names = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}
    run = results[["qid", "docno", "score"]].astype({"qid": str, "docno": str}).rename(columns=names)
    run = run.drop_duplicates(["query_id", "doc_id"], keep="last")  # as in experiments
    qrels = qrels[qrels["qid"].astype(str).isin(set(run["query_id"]))]
    judged = qrels[["qid", "docno"]].astype(str).assign(label=integer_labels(qrels, "qrels")).rename(columns=names)
    return float(ir_measures.calc_aggregate([measure], judged, run)[measure])


def history_frame(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the entries of `train` as a table, without empty columns.

    Args:
        entries: the rows, with `epoch`, `step`, `loss` and so on, as `train` adds them to its `history`.
    """
    names = {name for entry in entries for name in entry}
    rates = sorted(name for name in names if name.startswith("learning_rate"))
    last = [name for name in ("documents_per_second", "validation") if name in names]
    return pd.DataFrame(entries, columns=["epoch", "step", "loss", *rates, *last])


def plot_history(history: pd.DataFrame, *, ax: Any = None) -> Any:
    """Plot the loss and validation of a training; return the axes.

    Args:
        history: the `history` of a reranker after `fit`.
        ax: the axes of matplotlib to draw on; None for those of a new figure.
    """
    if not len(history):
        raise ValueError("history is empty: fit the model first")
    ax = ax or new_axes()
    lines = ax.plot(history["step"], history["loss"], marker=".", color=COLOURS[0], label="loss")
    ax.set_xlabel("optimiser steps")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("loss")
    if "validation" in history.columns:
        validated = history.dropna(subset="validation")
        right = ax.twinx()
        # Not filled, so that a point of the loss behind it is visible.
        look = {"marker": "o", "fillstyle": "none", "color": COLOURS[1]}
        lines += right.plot(validated["step"], validated["validation"], label="validation", **look)
        right.set_ylabel("validation")
        right.spines["top"].set_visible(False)
    ax.legend(handles=lines, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    ax.spines["top"].set_visible(False)
    return ax
