"""How effective systems are where the relevant text begins early, and where it begins late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.frames import check_columns
from ..experiment.results import DEFAULT_EDGES, ExperimentResults, mean_by_query, query_groups
from ..experiment.significance import RESAMPLES, p_values, resampled_means
from .positions import RelevantPositions

TABLE_COLUMNS = ["group", "queries", "name", "measure", "mean", "low", "high"]
RATIO_COLUMNS = ["name", "measure", "worst group", "best group", "worst", "best", "ratio", "low", "high", "p-value"]


@dataclass(frozen=True, eq=False, repr=False)
class PositionEffectiveness:
    """Results of the same systems on several groups of queries, which differ in where the relevant text begins.

    Groups are queries of one collection, as `effectiveness_by_position` makes them, or collections that differ in
    nothing but the position: `PositionEffectiveness({"early": results_1, "far": results_2})`. Groups with the same
    queries are compared query by query; others may also differ because their queries do.

    Args:
        groups: by label, in the order of the positions.
        confidence: level of the bootstrap intervals.
        resamples: of the queries.
        seed: of the random numbers.

    Raises:
        ValueError: without groups, or if they differ in systems or measures.
    """

    groups: Mapping[str, ExperimentResults]
    _: KW_ONLY
    confidence: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 42

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty: give results of at least one group")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must be between 0 and 1")
        for label, results in self.groups.items():
            for what, own, others in (
                ("systems", results.names, self._first.names),
                ("measures", results.measures, self._first.measures),
            ):
                if own != others:
                    raise ValueError(
                        f"group {label!r} has the {what} {', '.join(own)}, but the first one {', '.join(others)}"
                    )

    def __repr__(self) -> str:
        return f"PositionEffectiveness({', '.join(self._first.names)}; {', '.join(self.groups)})"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """`group, queries, name, measure, mean, low, high`: means over queries with their intervals."""
        rows = []
        for label, results in self.groups.items():
            for name, values in results.query_values.items():
                low, high = self._interval(resampled_means(values, resamples=self.resamples, seed=self.seed))
                for m, measure in enumerate(results.measures):
                    rows.append((label, len(values), name, measure, values[:, m].mean(), low[m], high[m]))
        return pd.DataFrame(rows, columns=TABLE_COLUMNS)

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """In each group every system against the experiment's baselines and partners: see `significance.compare`."""
        frames = []
        for label, results in self.groups.items():
            frame = results.comparisons.copy()
            frame.insert(0, "group", label)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The worst group of each system relative to its best: 1 if the position does not matter.

        Columns: `name, measure`; `worst group, best group`; the means `worst, best` and their `ratio`, with the
        bootstrap interval `low, high` of the ratio of these two groups; and the `p-value` of their difference: of the
        paired t-test for the same queries, of Welch's t-test for others, in either case multiplied by the number of
        pairs of groups, since the two were chosen for their values.
        """
        rows = []
        for name in self._first.names:
            for m, measure in enumerate(self._first.measures):
                values = {label: self._aligned(label, name)[:, m] for label in self.groups}
                worst, best = (choice(values, key=lambda label: values[label].mean()) for choice in (min, max))
                means = values[worst].mean(), values[best].mean()
                ratio = means[0] / means[1] if means[1] else math.nan
                low, high = self._ratio_interval(values[worst], values[best])
                p = self._p_value(values[worst], values[best]) if worst != best else math.nan
                rows.append((name, measure, worst, best, *means, ratio, low, high, p))
        return pd.DataFrame(rows, columns=RATIO_COLUMNS)

    def plot(self, measure: str | None = None, *, ax: Any = None) -> Any:
        """Draws the mean of each system in each group, with intervals.

        A full marker is a system that differs significantly from the experiment's first baseline (or its partner) in
        this group; the legend gives the ratio of worst to best group and its p-value.

        Args:
            measure: one of the experiment's; None for the first.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ValueError: for an unknown measure.
            ImportError: without matplotlib.
        """
        from .plots import plot_effectiveness

        measure = measure or self._first.measures[0]
        if measure not in self._first.measures:
            raise ValueError(f"measure={measure!r} was not evaluated; choose one of {', '.join(self._first.measures)}")
        return plot_effectiveness(self, measure, ax=ax)

    @property
    def names(self) -> list[str]:
        """Names of the systems."""
        return self._first.names

    @property
    def _first(self) -> ExperimentResults:
        return next(iter(self.groups.values()))

    @cached_property
    def _paired(self) -> bool:
        return all(sorted(results.qids) == sorted(self._first.qids) for results in self.groups.values())

    def _aligned(self, label: str, name: str) -> np.ndarray:
        """`(Q, M)` values; with paired groups in the order of the first group's queries."""
        results = self.groups[label]
        if not self._paired:
            return results.query_values[name]
        row = {qid: i for i, qid in enumerate(results.qids)}
        return results.query_values[name][[row[qid] for qid in self._first.qids]]

    def _interval(self, drawn: np.ndarray) -> np.ndarray:
        return np.quantile(drawn, [(1 - self.confidence) / 2, (1 + self.confidence) / 2], axis=0)

    def _ratio_interval(self, worst: np.ndarray, best: np.ndarray) -> tuple[float, float]:
        seeds = self.seed, self.seed if self._paired else self.seed + 1
        of_worst, of_best = (
            resampled_means(values[:, None], resamples=self.resamples, seed=seed)[:, 0]
            for values, seed in zip((worst, best), seeds, strict=True)
        )
        defined = of_best != 0
        if not defined.any():
            return math.nan, math.nan
        low, high = self._interval(of_worst[defined] / of_best[defined])
        return float(low), float(high)

    def _p_value(self, worst: np.ndarray, best: np.ndarray) -> float:
        pairs = math.comb(len(self.groups), 2)
        if self._paired:
            p = float(p_values(worst[:, None], best[:, None], "t")[0])
        elif min(len(worst), len(best)) < 2:
            p = math.nan
        else:
            with np.errstate(invalid="ignore", divide="ignore"):
                p = float(stats.ttest_ind(worst, best, equal_var=False).pvalue)
        return min(1.0, p * pairs) if not math.isnan(p) else p


def effectiveness_by_position(
    results: ExperimentResults, positions: RelevantPositions | pd.DataFrame, *, edges: Sequence[float] = DEFAULT_EDGES
) -> PositionEffectiveness:
    """Groups the queries of an experiment by where their relevant text begins.

    Args:
        results: of an experiment.
        positions: of `relevant_positions`, or a frame with `qid, first_token`, such as the gold positions of a
            collection; several rows of a query (for several relevant documents) count as their mean.
        edges: lower ends of the groups in tokens, ascending; the last group has no upper end.

    Returns:
        The results by group; queries without a position are left out.

    Raises:
        ValueError: if a column is missing, edges do not ascend, or no evaluated query falls into any group.
    """
    frame = positions.matched if isinstance(positions, RelevantPositions) else positions
    check_columns(frame, ("qid", "first_token"), "positions")
    known = frame[frame["first_token"].notna()].reset_index(drop=True)
    return PositionEffectiveness(
        query_groups(results, mean_by_query(known, known["first_token"]), edges=edges),
        confidence=results.statistics.confidence,
        resamples=results.statistics.resamples,
        seed=results.statistics.seed,
    )
