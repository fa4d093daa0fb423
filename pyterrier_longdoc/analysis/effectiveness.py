"""How effective systems are where the relevant text begins early, and where it begins late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.arguments import check_choice
from ..common.frames import as_strings, check_columns
from ..experiment.plots import beside, draw_means, finish, label_group, label_mean, marker_meaning, new_axes
from ..experiment.results import ExperimentResults, mean_by_query, query_groups
from ..experiment.significance import p_in_words, p_values, quiet, resampled_means
from .positions import RelevantPositions


@dataclass(frozen=True, eq=False, repr=False)
class PositionEffectiveness:
    """Results of the same systems on several groups of queries, which differ in where the relevant text begins.

    Groups are queries of one collection, as `effectiveness_by_position` makes them, or collections that differ in
    nothing but the position: `PositionEffectiveness({"early": results_1, "far": results_2})`. Groups with the same
    queries are compared query by query; others may also differ because their queries do.

    Args:
        groups: by label, in the order of the positions. The first one's `statistics` say how intervals are made.
        unit: of numbers in the labels, for the axis; None where labels are words.

    Raises:
        ValueError: without groups, or if they differ in systems or measures.
    """

    groups: Mapping[str, ExperimentResults]
    unit: str | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty: give results of at least one group")
        for label, results in self.groups.items():
            for what, attribute in (("systems", "names"), ("measures", "measures")):
                own, others = getattr(results, attribute), getattr(self._first, attribute)
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
                low, high = self._interval(self._resampled(values))
                for m, measure in enumerate(results.measures):
                    rows.append((label, len(values), name, measure, values[:, m].mean(), low[m], high[m]))
        return pd.DataFrame(rows, columns=["group", "queries", "name", "measure", "mean", "low", "high"])

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """In each group every system against the experiment's baselines and partners: see `significance.compare`."""
        frames = {label: results.comparisons for label, results in self.groups.items()}
        return pd.concat(frames, names=["group"]).reset_index(level="group").reset_index(drop=True)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The worst group of each system relative to its best: 1 if the position does not matter.

        Columns: `name, measure`; `worst group, best group`; the means `worst, best` and their `ratio`, with the
        bootstrap interval `low, high` of the ratio of these two groups; `psi`, the position sensitivity index of Zeng
        et al. 2025 (arXiv 2505.13950, over `nDCG@10`), 1 - `ratio`: 0 if the position does not matter, NaN if no group
        has any success; and the `p-value` of their difference: of the paired t-test for the same queries, of Welch's
        t-test for others, in either case multiplied by the number of pairs of groups, since the two were chosen for
        their values.
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
                rows.append((name, measure, worst, best, *means, ratio, low, high, 1 - ratio, p))
        shown = ["worst group", "best group", "worst", "best", "ratio", "low", "high", "psi", "p-value"]
        return pd.DataFrame(rows, columns=["name", "measure", *shown])

    def plot(self, measure: str | None = None, *, ax: Any = None) -> Any:
        """Draws the mean of each system in each group, with intervals.

        A full marker is a system that differs significantly from the experiment's first baseline (or its partner) in
        this group, as the legend says; there is none without a baseline or partner. The legend also gives the ratio of
        worst to best group and its p-value.

        Args:
            measure: one of the experiment's; None for the first.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ValueError: for an unknown measure.
            ImportError: without matplotlib.
        """
        measure = measure or self._first.measures[0]
        check_choice("measure", measure, tuple(self._first.measures))
        table, ratios = (frame[frame["measure"] == measure] for frame in (self.table, self.ratios))
        different, ax = self._different(measure), ax or new_axes(len(self.names))
        places = np.arange(len(self.groups))
        for system, aside in enumerate(beside(places, len(self.names))):
            name = self.names[system]
            rows, ratio = table[table["name"] == name], ratios[ratios["name"] == name].iloc[0]
            full = [(group, name) in different for group in rows["group"]]
            label = f"{name}: {_worst_to_best(ratio)}"
            draw_means(ax, places + aside, rows["mean"], rows, full=full, label=label, system=system)
        ax.set_xticks(places, [label_group(group, len(results.qids)) for group, results in self.groups.items()])
        ax.set_xlabel("where the relevant text begins" + (f" ({self.unit})" if self.unit else ""))
        ax.set_ylabel(label_mean(measure, self._first.statistics.confidence))
        return finish(ax, marker_meaning(self._meaning))

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

    @property
    def _meaning(self) -> str | None:
        """What a full marker means; None where nothing was compared."""
        statistics = self._first.statistics
        if self.comparisons.empty:
            return None
        reference = statistics.baseline[0] if statistics.baseline else "its partner"
        correction = f", {statistics.correction} correction" if statistics.correction else ""
        return f"differs from {reference} (p < {statistics.alpha:g}{correction})"

    def _different(self, measure: str) -> set[tuple[str, str]]:
        """Groups and systems that differ from the first baseline, or from their partner where there is no baseline."""
        of_measure = self.comparisons[self.comparisons["measure"] == measure]
        baselines = of_measure.loc[of_measure["kind"] == "baseline", "reference"]
        chosen = of_measure["reference"] == baselines.iloc[0] if len(baselines) else of_measure["kind"] == "partner"
        rows = of_measure[chosen & of_measure["reject"].eq(True)]
        return set(zip(rows["group"], rows["name"], strict=True))

    def _aligned(self, label: str, name: str) -> np.ndarray:
        """`(Q, M)` values; with paired groups in the order of the first group's queries."""
        values = pd.DataFrame(self.groups[label].query_values[name], index=self.groups[label].qids)
        return (values.loc[self._first.qids] if self._paired else values).to_numpy()

    def _resampled(self, values: np.ndarray, *, draw: int = 0) -> np.ndarray:
        """`(resamples, M)` means of `(Q, M)` values; another `draw` has other queries."""
        statistics = self._first.statistics
        return resampled_means(values, resamples=statistics.resamples, seed=statistics.seed + draw)

    def _interval(self, drawn: np.ndarray) -> np.ndarray:
        confidence = self._first.statistics.confidence
        return np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)

    def _ratio_interval(self, worst: np.ndarray, best: np.ndarray) -> tuple[float, float]:
        # The same queries are drawn for both groups where both have them.
        of_worst, of_best = self._resampled(worst), self._resampled(best, draw=0 if self._paired else 1)
        defined = of_best != 0
        if not defined.any():
            return math.nan, math.nan
        low, high = self._interval(of_worst[defined] / of_best[defined])
        return float(low), float(high)

    def _p_value(self, worst: np.ndarray, best: np.ndarray) -> float:
        p = math.nan
        if self._paired:
            p = p_values(worst[:, None], best[:, None], "t")[0]
        elif min(len(worst), len(best)) > 1:
            with quiet():
                p = stats.ttest_ind(worst, best, equal_var=False).pvalue
        return float(np.minimum(1.0, p * math.comb(len(self.groups), 2)))


def _worst_to_best(ratio: pd.Series) -> str:
    """What the legend says of a system, by its row of `ratios`."""
    if ratio["worst group"] == ratio["best group"]:
        return f"{ratio['best']:.2f} in all groups"
    return f"worst/best {ratio['ratio']:.2f} ({p_in_words(ratio['p-value'])})"


def effectiveness_by_position(
    results: ExperimentResults, positions: RelevantPositions | pd.DataFrame, *, edges: Sequence[float] | None = None
) -> PositionEffectiveness:
    """Groups the queries of an experiment by where their relevant text begins.

    Args:
        results: of an experiment.
        positions: of `relevant_positions`, or a frame with `qid, first_token` and, for the default edges, `length` (of
            the document in tokens), such as the gold positions of a collection; several rows of a query (for several
            relevant documents) count as their mean.
        edges: lower ends of the groups in tokens, ascending; the last group has no upper end. None follows the
            documents: the start and the quarters of their median length, so that documents of 1,000 and of 10,000
            tokens both have their queries in several groups.

    Returns:
        The results by group; queries without a position are left out.

    Raises:
        ValueError: if a column is missing, edges do not ascend, or no evaluated query falls into any group.
    """
    frame = positions.matched if isinstance(positions, RelevantPositions) else positions
    check_columns(frame, ("qid", "first_token"), "positions")
    known = frame[frame["first_token"].notna()].reset_index(drop=True)
    if edges is None:
        edges = _quarters(known, results.qids)
    groups = query_groups(results, mean_by_query(known, known["first_token"]), edges=edges)
    return PositionEffectiveness(groups, unit="tokens")


def _quarters(known: pd.DataFrame, qids: Sequence[str]) -> list[float]:
    """The start and the quarters of the median length of these queries' documents."""
    if "length" not in known.columns:
        raise ValueError("positions lack the column length, by which groups are made: add it, or give edges=")
    lengths = known.loc[as_strings(known["qid"]).isin(qids), "length"].astype("float64")
    median = lengths.median() if lengths.notna().any() else 0.0
    return sorted({float(round(median * share)) for share in (0, 0.25, 0.5, 0.75)})
