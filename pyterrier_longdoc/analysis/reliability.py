"""Reliability of probabilities of relevance: expected calibration error and reliability diagram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments
from ..common.frames import check_columns, numeric, relevance_of
from ..common.plots import finish, line_style, new_axes
from ..experiment.significance import Statistics, resampled_means


@dataclass(frozen=True, eq=False)
class Reliability:
    """The difference between probabilities and shares of relevant documents; see `reliability`.

    Attributes:
        error: the expected calibration error: the mean absolute difference over bins, weighted by their documents.
        low: the lower bound of its bootstrap interval over queries. Resampling adds noise, so the interval is too high.
        high: the upper bound of the interval.
        table: one row per non-empty bin: `documents`, mean `probability`, share `relevant`.
    """

    error: float
    low: float
    high: float
    table: pd.DataFrame

    def plot(self) -> Any:
        """Plot the share of relevant documents against the probability; return the axes.

        The size of a marker is the number of documents.
        """
        ax, (documents, x, y) = new_axes(), (self.table[name] for name in self.table)
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, label="perfectly calibrated")
        ax.plot(x, y, label=f"error {self.error:.3f} ({self.low:.3f} to {self.high:.3f})", **line_style(0))
        ax.scatter(x, y, s=300 * documents / documents.max(), alpha=0.3, **line_style(0))
        ax.set(xlabel="probability", ylabel="share of relevant documents", xlim=(0, 1), ylim=(0, 1))
        return finish(ax)


def reliability(
    results: pd.DataFrame, qrels: pd.DataFrame, *, bins: int = 10, judged_only: bool = False
) -> Reliability:
    """Compare the column `probability` of results with relevance judgements.

    Args:
        results: `qid, docno, probability` from `Calibrated`, for queries that were not used in `fit`.
        qrels: `qid, docno, label`; queries without any label are ignored.
        bins: the number of bins of equal width from 0 to 1.
        judged_only: ignore documents without a label, which otherwise count as non-relevant.

    Returns:
        The expected calibration error with its interval, and the table of bins.
    """
    check_arguments("int", at_least=1, bins=bins)
    check_columns(results, ("qid", "docno", "probability"), "results (see ld.Calibrated)")
    relevant = relevance_of(results, qrels, judged_only=judged_only)
    rows, relevant = results[~np.isnan(relevant)], relevant[~np.isnan(relevant)]
    p = numeric(rows, "probability", "results", "probabilities are numbers from 0 to 1")
    if not len(p) or p.min() < 0 or p.max() > 1:
        raise ValueError(f"results must have rows for queries of qrels (found: {len(p)}) and a probability from 0 to 1")
    values = pd.DataFrame({"documents": 1, "probability": p, "relevant": relevant})
    sums = values.groupby([rows["qid"].to_numpy(), np.minimum((p * bins).astype(int), bins - 1)]).sum()
    gaps = (sums["probability"] - sums["relevant"]).unstack(fill_value=0.0)  # (queries, bins)
    counts = sums["documents"].unstack(fill_value=0).sum(axis=1)
    drawn = resampled_means(np.column_stack([gaps, counts]))
    low, high = Statistics().interval(np.abs(drawn[:, :-1]).sum(axis=1) / drawn[:, -1])
    table = sums.groupby(level=1).sum()
    table[["probability", "relevant"]] = table[["probability", "relevant"]].div(table["documents"], axis=0)
    error = float(gaps.sum().abs().sum() / len(p))
    return Reliability(error, float(low), float(high), table.reset_index(drop=True))
