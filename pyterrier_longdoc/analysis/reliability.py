"""Whether probabilities of relevance are what they say."""

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
    """How far probabilities are from the shares of relevant documents: see `reliability`.

    Attributes:
        error: the expected calibration error: the mean distance of both in a bin, weighted by its documents.
        low: lower end of its bootstrap interval over queries, which lies high, as drawing anew adds noise.
        high: upper end of that interval.
        table: a row for each bin with documents: `documents`, mean `probability`, share `relevant`.
    """

    error: float
    low: float
    high: float
    table: pd.DataFrame

    def plot(self) -> Any:
        """Draw the share of relevant documents against the probability, larger marks for more; return the axes."""
        ax, (documents, x, y) = new_axes(), (self.table[name] for name in self.table)
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, label="as it should be")
        ax.plot(x, y, label=f"error {self.error:.3f} ({self.low:.3f} to {self.high:.3f})", **line_style(0))
        ax.scatter(x, y, s=300 * documents / documents.max(), alpha=0.3, **line_style(0))
        ax.set(xlabel="probability", ylabel="share of relevant documents", xlim=(0, 1), ylim=(0, 1))
        return finish(ax)


def reliability(
    results: pd.DataFrame, qrels: pd.DataFrame, *, bins: int = 10, judged_only: bool = False
) -> Reliability:
    """Compare the column `probability` of results with judgements.

    Args:
        results: `qid, docno, probability`, of `Calibrated` on queries that its `fit` has not seen.
        qrels: `qid, docno, label`; queries without a label do not count.
        bins: of equal width from 0 to 1.
        judged_only: leave out documents without a label, which otherwise count as not relevant.
    """
    check_arguments("int", at_least=1, bins=bins)
    check_columns(results, ("qid", "docno", "probability"), "results (see ld.Calibrated)")
    relevant = relevance_of(results, qrels, judged_only=judged_only)
    rows, relevant = results[~np.isnan(relevant)], relevant[~np.isnan(relevant)]
    p = numeric(rows, "probability", "results", "probabilities are numbers from 0 to 1")
    if not len(p) or p.min() < 0 or p.max() > 1:
        raise ValueError(f"results hold {len(p)} rows of queries with qrels, and each needs a probability from 0 to 1")
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
