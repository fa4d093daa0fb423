"""Pictures of results, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_choice
from ..common.files import import_extra
from .results import DEFAULT_EDGES, ExperimentResults, query_groups, relevant_lengths
from .significance import resampled_means


def plot_efficiency(results: ExperimentResults, *, ax: Any = None) -> Any:
    """Draws each system's gain over its partner against its slow-down: Figure 3 of Boytsov et al. 2025.

    Args:
        results: of an experiment with `partner` and `efficiency=True`. The gain is the mean over its measures.
        ax: matplotlib axes to draw on; None makes a figure.

    Returns:
        The axes; `ax.figure.savefig(...)` writes the picture.

    Raises:
        ValueError: if there are no partners, or time was not measured.
        ImportError: without matplotlib.
    """
    if not results.statistics.partner:
        raise ValueError("gains need partners: give Experiment partner={system: its FirstP}")
    if results.efficiency is None:
        raise ValueError("time was not measured: give Experiment efficiency=True")
    rows = results.comparisons[results.comparisons["kind"] == "partner"]
    gains = rows.groupby("name", sort=False)["gain"].mean().mul(100).reset_index()
    points = gains.merge(results.efficiency[["name", "slow-down"]], on="name", how="left")
    known = points.dropna()
    ax = ax or new_axes()
    ax.scatter(known["slow-down"], known["gain"])
    ax.axhline(0, color="0.6", linewidth=0.8)
    label_points(ax, known[["name", "slow-down", "gain"]])
    without = ", ".join(points.loc[points.isna().any(axis=1), "name"])
    note = f"\nnot drawn, as time or gain are not known: {without}" if without else ""
    ax.set_xlabel(f"time per document relative to the partner{note}", wrap=True)
    ax.set_ylabel("mean gain over the partner (%)")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_document_length(
    results: ExperimentResults,
    qrels: pd.DataFrame,
    lengths: Mapping[str, float],
    *,
    edges: Sequence[float] = DEFAULT_EDGES,
    measure: str | None = None,
    ax: Any = None,
) -> Any:
    """Draws each system's mean by the length of the relevant documents; `by_document_length` has the numbers.

    Args:
        results: of an experiment. Its `statistics` say how wide the bootstrap intervals are.
        qrels: see `by_document_length`.
        lengths: see there.
        edges: see there.
        measure: one of the experiment's; None for the first.
        ax: matplotlib axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ValueError: for an unknown measure, or if no evaluated query falls into any group.
        ImportError: without matplotlib.
    """
    measure = measure or results.measures[0]
    check_choice("measure", measure, tuple(results.measures))
    groups = query_groups(results, relevant_lengths(qrels, lengths), edges=edges)
    ax, places = ax or new_axes(len(results.names)), np.arange(len(groups))
    for name, aside in zip(results.names, beside(places, len(results.names)), strict=True):
        rows = pd.DataFrame([_mean_with_interval(group, name, measure) for group in groups.values()])
        draw_means(ax, places + aside, rows["mean"], rows, full=[False] * len(rows), label=name)
    ax.set_xticks(places, [f"{label}\n{len(group.qids)} queries" for label, group in groups.items()])
    ax.set_xlabel("mean length of the relevant documents")
    ax.set_ylabel(measure)
    return finish(ax)


def _mean_with_interval(results: ExperimentResults, name: str, measure: str) -> dict[str, float]:
    """Over queries, with its bootstrap interval."""
    statistics, column = results.statistics, results.measures.index(measure)
    values = results.query_values[name][:, [column]]
    drawn = resampled_means(values, resamples=statistics.resamples, seed=statistics.seed)
    low, high = np.quantile(drawn, [(1 - statistics.confidence) / 2, (1 + statistics.confidence) / 2])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


LABEL_HEIGHT, LABEL_WIDTH = 11, 60
"""In points: what a system's name takes up."""


def label_points(ax: Any, points: pd.DataFrame) -> None:
    """Writes the names of systems beside their points, and above the names of lower points that are as near.

    Args:
        ax: matplotlib axes.
        points: name, horizontal and vertical place, in this order.
    """
    to_points = 72 / ax.figure.dpi
    placed: list[tuple[float, float]] = []
    for name, across, up in points.sort_values(points.columns[2]).to_numpy().tolist():
        x, y = ax.transData.transform((across, up)) * to_points
        near = [above for other, above in placed if abs(other - x) < LABEL_WIDTH]
        at = max([y + 4, *(above + LABEL_HEIGHT for above in near)])
        placed.append((x, at))
        ax.annotate(name, (across, up), xytext=(4, at - y), textcoords="offset points")


def new_axes(systems: int = 0) -> Any:
    """Axes of a new figure of pyplot, as plots of pandas make them: a notebook shows it at the end of the cell.

    Without a display pyplot draws into memory. In a script it holds the figure until `pyplot.close(ax.figure)`.

    Args:
        systems: lines of the legend above the axes, for which the figure is higher.
    """
    pyplot = import_extra("matplotlib.pyplot", "analysis", "matplotlib is missing")
    return pyplot.subplots(figsize=(6, 4 + 0.2 * systems), layout="constrained")[1]


def beside(places: Any, systems: int) -> np.ndarray:
    """How far to the side each system is drawn, `(systems,)`, so that those with equal values do not hide each other.

    Args:
        places: all places on the horizontal axis.
        systems: how many there are.
    """
    distinct = np.unique(places)
    distance = np.ptp(distinct) / (len(distinct) - 1) if len(distinct) > 1 else 1.0
    return distance * min(0.08, 0.6 / systems) * (np.arange(systems) - (systems - 1) / 2)


def marker_meaning(meaning: str | None) -> Any:
    """What the legend says of full markers; None if nothing was tested, so that all are empty."""
    lines = import_extra("matplotlib.lines", "analysis", "matplotlib is missing")
    face, label = ("0.4", f"full marker: {meaning}") if meaning else ("white", "empty markers: nothing to test against")
    return lines.Line2D([], [], linestyle="", marker="o", color="0.4", markerfacecolor=face, label=label)


def finish(ax: Any, *further: Any) -> Any:
    """The axes with a legend above them, within which bars and intervals may be anywhere."""
    handles = [*ax.get_legend_handles_labels()[0], *further]
    ax.legend(handles=handles, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw_means(ax: Any, at: np.ndarray, means: pd.Series, rows: pd.DataFrame, *, full: list[bool], label: str) -> None:
    """Draws means with their intervals, the columns `low` and `high` of `rows`, and full markers where `full` says."""
    middle = means.to_numpy()
    # A percentile interval need not contain the mean.
    ends = np.maximum([middle - rows["low"].to_numpy(), rows["high"].to_numpy() - middle], 0)
    line = ax.errorbar(at, middle, yerr=ends, marker="o", markerfacecolor="white", capsize=3, label=label)
    significant = np.array(full, dtype=bool)
    ax.scatter(at[significant], middle[significant], color=line[0].get_color(), zorder=3)
