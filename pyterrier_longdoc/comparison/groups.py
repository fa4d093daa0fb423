"""The same systems on several groups of queries, e.g. by the position of the relevant text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.arguments import check_arguments
from ..common.language import counted
from ..common.plots import draw_means, finish, marker_legend, new_axes, offsets
from ..common.presentation import percent
from .significance import p_in_words, p_values, resampled_means, without_warnings

Results = Any
"""`Comparison`, which imports this module."""


@dataclass(frozen=True, eq=False, repr=False)
class PositionEffectiveness:
    """Comparisons of the same systems on several groups of queries, e.g. by the position of the relevant text.

    The groups are subsets of the queries of one collection (see `Comparison.by`), or collections that differ only in
    the position: `PositionEffectiveness({"early": results_1, "far": results_2})`. Groups with the same queries are
    compared query by query. Other groups can also differ because their queries differ.

    Args:
        groups: the comparisons by name of the group, in order. The `statistics` of the first define the intervals.
        label: what the groups differ in, for the axis of the plot.
    """

    groups: Mapping[str, Results]
    label: str = "where the relevant text begins"

    def __repr__(self) -> str:
        return f"PositionEffectiveness({', '.join(self._first.names)}; {', '.join(self.groups)})"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """`group, queries, name, measure, mean, low, high`: means over queries with bootstrap intervals."""
        statistics, rows = self._first.statistics, []
        for group, results in self.groups.items():
            for name, values in results.query_values.items():
                means = resampled_means(values, resamples=statistics.resamples, seed=statistics.seed)
                low, high = statistics.interval(means)
                for m, measure in enumerate(results.measures):
                    rows.append((group, len(values), name, measure, values[:, m].mean(), low[m], high[m]))
        return pd.DataFrame(rows, columns=["group", "queries", "name", "measure", "mean", "low", "high"])

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Comparisons of every system to baselines and partners within each group; see `Comparison.comparisons`."""
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
                values = {label: results.query_values[name][:, m] for label, results in self.groups.items()}
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
            measure: a measure of the comparisons; None for the first.
            ax: axes to draw on; None creates a figure.
        """
        first, statistics = self._first, self._first.statistics
        measure = measure or first.measures[0]
        check_arguments("str", choices=first.measures, measure=measure)
        rows, meaning = self.comparisons[self.comparisons["measure"] == measure], None
        if len(rows):
            reference = statistics.baseline[0] if statistics.baseline else "its partner"
            correction = f", {statistics.correction} correction" if statistics.correction else ""
            meaning = f"differs from {reference} (p < {statistics.alpha:g}{correction})"
            rows = rows[rows["reference"] == reference] if statistics.baseline else rows[rows["kind"] == "partner"]
        rows = rows[rows["reject"].eq(True)]
        significant = set(zip(rows["group"], rows["name"], strict=True))
        ax, places = ax or new_axes(len(first.names)), np.arange(len(self.groups))
        means, ratios = (frame[frame["measure"] == measure] for frame in (self.table, self.ratios))
        shifts = offsets(places, len(first.names))
        for system, (ratio, shift) in enumerate(zip(ratios.to_dict("records"), shifts, strict=True)):
            name, own = ratio["name"], means[means["name"] == ratio["name"]]
            change = f"worst/best {ratio['ratio']:.2f} ({p_in_words(ratio['p-value'])})"
            if ratio["worst group"] == ratio["best group"]:
                change = f"{ratio['best']:.2f} in all groups"
            full = [(group, name) in significant for group in own["group"]]
            draw_means(ax, places + shift, own["mean"], own, full=full, label=f"{name}: {change}", system=system)
        queries = [counted(len(results.qids), "query", "queries") for results in self.groups.values()]
        ax.set_xticks(places, [f"{group}\n{number}" for group, number in zip(self.groups, queries, strict=True)])
        ax.set_ylabel(f"{measure}: mean and {percent(statistics.confidence, 0)} interval")
        ax.set_xlabel(self.label)
        return finish(ax, marker_legend(meaning))

    @property
    def _first(self) -> Results:
        return next(iter(self.groups.values()))

    @cached_property
    def _is_paired(self) -> bool:
        return all(results.qids == self._first.qids for results in self.groups.values())

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
