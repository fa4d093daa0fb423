"""Pictures of results, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_choice
from ..common.files import import_extra
from ..common.language import counted
from ..common.presentation import percent
from .results import DEFAULT_EDGES, ExperimentResults, query_groups, relevant_lengths
from .significance import resampled_means

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
"""Of Okabe & Ito's colours, which colour-blind people tell apart, those that are seen on white and on black."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_efficiency(results: ExperimentResults, *, ax: Any = None) -> Any:
    """Draws each system's gain over its partner against its slow-down: Figure 3 of Boytsov et al. 2025.

    Args:
        results: of an experiment with `partner` and `efficiency=True`. The gain is the mean over its measures; systems
            that have no partner, and are none, are named beneath.
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
    partner = results.statistics.partner
    names = [name for name in results.names if name in partner or name not in partner.values()]
    points = pd.DataFrame({"name": names}).merge(gains, how="left")
    points = points.merge(results.efficiency[["name", "slow-down"]], on="name", how="left")
    known = points.dropna()
    ax = ax or new_axes()
    ax.scatter(known["slow-down"], known["gain"], color=COLOURS[0])
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
    unit: str = "tokens",
    ax: Any = None,
) -> Any:
    """Draws each system's mean by the length of the relevant documents; `by_document_length` has the numbers.

    Args:
        results: of an experiment. Its `statistics` say how wide the bootstrap intervals are.
        qrels: see `by_document_length`.
        lengths: see there.
        edges: see there.
        measure: one of the experiment's; None for the first.
        unit: what `lengths` count, for the axis.
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
    for system, aside in enumerate(beside(places, len(results.names))):
        name = results.names[system]
        rows = pd.DataFrame([_mean_with_interval(group, name, measure) for group in groups.values()])
        draw_means(ax, places + aside, rows["mean"], rows, full=[False] * len(rows), label=name, system=system)
    ax.set_xticks(places, [label_group(label, len(group.qids)) for label, group in groups.items()])
    ax.set_xlabel(f"mean length of the relevant documents ({unit})")
    ax.set_ylabel(label_mean(measure, results.statistics.confidence))
    return finish(ax)


def _mean_with_interval(results: ExperimentResults, name: str, measure: str) -> dict[str, float]:
    """Over queries, with its bootstrap interval."""
    statistics, column = results.statistics, results.measures.index(measure)
    values = results.query_values[name][:, [column]]
    drawn = resampled_means(values, resamples=statistics.resamples, seed=statistics.seed)
    low, high = np.quantile(drawn, [(1 - statistics.confidence) / 2, (1 + statistics.confidence) / 2])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


LABEL_OFFSETS = (4, -13, 16, -25, 28, -37, 40)
"""How far above its point a name may stand, in points, in the order in which they are tried."""


def label_points(ax: Any, points: pd.DataFrame) -> None:
    """Writes the names of systems beside their points, with a line where others are in between.

    Args:
        ax: matplotlib axes.
        points: name, horizontal and vertical place, in this order.
    """
    ax.margins(0.1, 0.2)
    ax.figure.draw_without_rendering()  # sets limits and layout
    radius, middle = 4 * ax.figure.dpi / 72, ax.bbox.x0 + ax.bbox.width / 2
    rows = points.sort_values(points.columns[2]).to_numpy().tolist()
    places = [ax.transData.transform(row[1:]) for row in rows]
    bbox = import_extra("matplotlib.transforms", "analysis", "matplotlib is missing").Bbox
    taken = [bbox([place - radius, place + radius]) for place in places]
    for (name, *at), place in zip(rows, places, strict=True):
        aside, side = (5, "left") if place[0] < middle else (-5, "right")
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.8, "relpos": (side == "right", 0.5), "shrinkB": 2}
        label = ax.annotate(name, at, xytext=(aside, 4), textcoords="offset points", ha=side, arrowprops=line)
        for offset in LABEL_OFFSETS:
            label.set_position((aside, offset))
            if _extent(label).count_overlaps(taken) == 0:
                break
        taken.append(_extent(label))


def _extent(label: Any) -> Any:
    """Where the text of an annotation stands, without the line to its point."""
    label.get_window_extent()  # moves it to its place
    return import_extra("matplotlib.text", "analysis", "matplotlib is missing").Text.get_window_extent(label)


def new_axes(systems: int = 0) -> Any:
    """Axes of a new figure of pyplot, as plots of pandas make them: a notebook shows it at the end of the cell.

    Without a display pyplot draws into memory. In a script it holds the figure until `pyplot.close(ax.figure)`.

    Args:
        systems: lines of the legend above the axes, for which the figure is higher.
    """
    pyplot = import_extra("matplotlib.pyplot", "analysis", "matplotlib is missing")
    return pyplot.subplots(figsize=(6, 4 + 0.2 * systems), layout="constrained")[1]


def look_of(system: int) -> dict[str, str]:
    """Colour and marker of the so-manieth line: 42 of them differ, without colours seven."""
    return {"color": COLOURS[system % len(COLOURS)], "marker": MARKERS[system % len(MARKERS)]}


def label_group(group: str, queries: int) -> str:
    """What stands below a group of queries."""
    return f"{group}\n{counted(queries, 'query', 'queries')}"


def label_mean(measure: str, confidence: float) -> str:
    """What stands beside means with their intervals."""
    return f"{measure}: mean and {percent(confidence, 0)} interval"


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
    face, label = ("0.4", f"full marker: {meaning}") if meaning else ("none", "empty markers: nothing to test against")
    return lines.Line2D([], [], linestyle="", marker="o", color="0.4", markerfacecolor=face, label=label)


def finish(ax: Any, *further: Any) -> Any:
    """The axes with a legend above them, within which bars and intervals may be anywhere."""
    handles = [*ax.get_legend_handles_labels()[0], *further]
    ax.legend(handles=handles, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw_means(
    ax: Any, at: np.ndarray, means: pd.Series, rows: pd.DataFrame, *, full: list[bool], label: str, system: int
) -> None:
    """Draws the means of the so-manieth system with their intervals.

    Args:
        ax: matplotlib axes.
        at: horizontal places.
        means: as many.
        rows: have the ends of the intervals, `low` and `high`.
        full: which markers are full.
        label: for the legend.
        system: decides about colour and marker.
    """
    middle = means.to_numpy()
    # A percentile interval need not contain the mean.
    ends = np.maximum([middle - rows["low"].to_numpy(), rows["high"].to_numpy() - middle], 0)
    look, significant = look_of(system), np.array(full, dtype=bool)
    ax.errorbar(at, middle, yerr=ends, markerfacecolor=ax.get_facecolor(), capsize=3, label=label, **look)
    ax.scatter(at[significant], middle[significant], zorder=3, **look)
