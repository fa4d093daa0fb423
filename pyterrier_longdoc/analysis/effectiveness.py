"""Effectiveness by the position at which the relevant text begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.frames import as_strings, check_columns
from ..common.plots import finish, marker_legend
from ..experiment import ExperimentResults
from ..experiment.significance import p_in_words, p_values, resampled_means, without_warnings
from .positions import RelevantPositions
from .query_groups import draw_groups, mean_by_query, means_by_group, query_groups


@dataclass(frozen=True, eq=False, repr=False)
class PositionEffectiveness:
    """Results of the same systems on groups of queries, by the position of the relevant text.

    The groups are subsets of the queries of one collection (see `effectiveness_by_position`), or collections that
    differ only in the position: `PositionEffectiveness({"early": results_1, "far": results_2})`. Groups with the same
    queries are compared query by query. Other groups can also differ because their queries differ.

    Args:
        groups: the results by label, in the order of positions. The `statistics` of the first define the intervals.
        unit: the unit of numbers in the labels, shown on the axis; None if the labels are words.
    """

    groups: Mapping[str, ExperimentResults]
    unit: str | None = None

    def __repr__(self) -> str:
        return f"PositionEffectiveness({', '.join(self._first.names)}; {', '.join(self.groups)})"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """`group, queries, name, measure, mean, low, high`: means over queries with bootstrap intervals."""
        return means_by_group(self.groups)

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Comparisons of every system to baselines and partners within each group; see `significance.compare`."""
        frames = {label: results.comparisons for label, results in self.groups.items()}
        return pd.concat(frames, names=["group"]).reset_index(level="group").reset_index(drop=True)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The ratio of each system's worst group to its best: 1 if the position does not matter.

        Columns:

        - `name, measure`, `worst group, best group`;
        - `worst, best`: the means of these two groups;
        - `ratio`: worst / best, with its bootstrap interval `low, high`;
        - `psi`: 1 - `ratio`, the position sensitivity index of Zeng et al. 2025 (arXiv 2505.13950, with `nDCG@10`); NaN
          if the best mean is 0;
        - `p-value` of the difference: paired t-test for the same queries, otherwise Welch's t-test. It is multiplied by
          the number of pairs of groups, because the two groups are the extremes.
        """
        rows = []
        for name in self._first.names:
            for m, measure in enumerate(self._first.measures):
                values = {label: self._values(label, name)[:, m] for label in self.groups}
                worst, best = (extreme(values, key=lambda label: values[label].mean()) for extreme in (min, max))
                means = values[worst].mean(), values[best].mean()
                ratio = means[0] / means[1] if means[1] else math.nan
                low, high = self._ratio_interval(values[worst], values[best])
                p = math.nan
                if worst != best and self._is_paired:
                    p = p_values(values[worst][:, None], values[best][:, None], "t")[0]
                elif worst != best and min(len(values[worst]), len(values[best])) > 1:
                    with without_warnings():
                        p = stats.ttest_ind(values[worst], values[best], equal_var=False).pvalue
                p = float(np.minimum(1.0, p * math.comb(len(self.groups), 2)))
                rows.append((name, measure, worst, best, *means, ratio, low, high, 1 - ratio, p))
        columns = ["worst group", "best group", "worst", "best", "ratio", "low", "high", "psi", "p-value"]
        return pd.DataFrame(rows, columns=["name", "measure", *columns])

    def plot(self, measure: str | None = None, *, ax: Any = None) -> Any:
        """Plot the mean of each system in each group, with intervals; return the matplotlib axes.

        A filled marker means a significant difference from the first baseline (or the partner) in this group. The
        legend shows the ratio of the worst to the best group and its p-value.

        Args:
            measure: a measure of the experiment; None for the first.
            ax: axes to draw on; None creates a figure.
        """
        measure = measure or self._first.measures[0]
        ratios = self.ratios[self.ratios["measure"] == measure]
        labels = {}
        for ratio in ratios.to_dict("records"):
            change = f"worst/best {ratio['ratio']:.2f} ({p_in_words(ratio['p-value'])})"
            if ratio["worst group"] == ratio["best group"]:
                change = f"{ratio['best']:.2f} in all groups"
            labels[ratio["name"]] = f"{ratio['name']}: {change}"
        rows = self.comparisons[self.comparisons["measure"] == measure]
        statistics, meaning = self._first.statistics, None
        if len(rows):
            reference = statistics.baseline[0] if statistics.baseline else "its partner"
            correction = f", {statistics.correction} correction" if statistics.correction else ""
            meaning = f"differs from {reference} (p < {statistics.alpha:g}{correction})"
            rows = rows[rows["reference"] == reference] if statistics.baseline else rows[rows["kind"] == "partner"]
        rows = rows[rows["reject"].eq(True)]
        significant = set(zip(rows["group"], rows["name"], strict=True))
        ax = draw_groups(self.groups, measure, ax=ax, labels=labels, full=significant)
        ax.set_xlabel("where the relevant text begins" + (f" ({self.unit})" if self.unit else ""))
        return finish(ax, marker_legend(meaning))

    @property
    def _first(self) -> ExperimentResults:
        return next(iter(self.groups.values()))

    @cached_property
    def _is_paired(self) -> bool:
        return all(sorted(results.qids) == sorted(self._first.qids) for results in self.groups.values())

    def _values(self, label: str, name: str) -> np.ndarray:
        """Return `(Q, M)` values; paired groups are in the order of the first group's queries."""
        values = pd.DataFrame(self.groups[label].query_values[name], index=self.groups[label].qids)
        return (values.loc[self._first.qids] if self._is_paired else values).to_numpy()

    def _ratio_interval(self, worst: np.ndarray, best: np.ndarray) -> tuple[float, float]:
        # Groups with the same queries share the resamples.
        statistics, other = self._first.statistics, 0 if self._is_paired else 1
        worst_means = resampled_means(worst, resamples=statistics.resamples, seed=statistics.seed)
        best_means = resampled_means(best, resamples=statistics.resamples, seed=statistics.seed + other)
        nonzero = best_means != 0
        if not nonzero.any():
            return math.nan, math.nan
        low, high = statistics.interval(worst_means[nonzero] / best_means[nonzero])
        return float(low), float(high)


def effectiveness_by_position(
    results: ExperimentResults, positions: RelevantPositions | pd.DataFrame, *, edges: Sequence[float] | None = None
) -> PositionEffectiveness:
    """Group the queries of an experiment by the position at which their relevant text begins.

    Args:
        results: the results of an experiment.
        positions: the result of `relevant_positions`, or a frame with `qid, first_token` and, for the default edges,
            `length` (of the document in tokens), such as the gold positions of a collection. Several rows of a query
            (several relevant documents) are averaged.
        edges: the lower bounds of the groups in tokens, ascending; the last group has no upper bound. None uses 0 and
            the quarters of the median document length, which gives several groups for documents of 1,000 as well as
            10,000 tokens.

    Returns:
        The results by group, without queries of unknown position.

    Example:
        `ld.effectiveness_by_position(results, dataset.gold).plot()`
    """
    frame = positions.matched if isinstance(positions, RelevantPositions) else positions
    check_columns(frame, ("qid", "first_token"), "positions")
    rows = frame[frame["first_token"].notna()].reset_index(drop=True)
    if edges is None:
        check_columns(rows, ("length",), "positions (or set edges=)")
        lengths = rows.loc[as_strings(rows["qid"]).isin(results.qids), "length"].astype("float64")
        median = lengths.median() if lengths.notna().any() else 0.0
        edges = sorted({float(round(median * share)) for share in (0, 0.25, 0.5, 0.75)})
    groups = query_groups(results, mean_by_query(rows, rows["first_token"]), edges=edges)
    return PositionEffectiveness(groups, unit="tokens")
