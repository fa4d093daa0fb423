"""Pictures of results, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .extras import required

if TYPE_CHECKING:
    from .results import ExperimentResults


def gains_and_costs(results: ExperimentResults) -> pd.DataFrame:
    """`name, slow-down, gain` of the systems with a partner: mean gain over measures, and relative time.

    Raises:
        ValueError: if there are no partners, or time was not measured.
    """
    if not results.statistics.partner:
        raise ValueError("gains need partners: give Experiment partner={system: its FirstP}")
    if results.efficiency is None:
        raise ValueError("time was not measured: give Experiment efficiency=True")
    rows = results.comparisons[results.comparisons["kind"] == "partner"]
    gains = rows.groupby("name", sort=False)["gain"].mean().rename("gain").reset_index()
    return results.efficiency[["name", "slow-down"]].merge(gains, on="name")


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
    points = gains_and_costs(results)
    ax = ax or new_axes()
    ax.scatter(points["slow-down"], 100 * points["gain"])
    for row in points.to_dict("records"):
        at = (row["slow-down"], 100 * row["gain"])
        ax.annotate(row["name"], at, xytext=(4, 4), textcoords="offset points")
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xlabel("time per document relative to the partner")
    ax.set_ylabel("mean gain over the partner (%)")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_settings(table: pd.DataFrame, parameters: list[str], measure: str, *, ax: Any = None) -> Any:
    """Draws a measure over the first parameter, one line for each value of the second.

    Args:
        table: one row for each setting: the parameters, the measure and perhaps `<measure> std`.
        parameters: one or two columns.
        measure: a column.
        ax: matplotlib axes to draw on; None makes a figure.

    Returns:
        The axes.
    """
    ax = ax or new_axes()
    first, *rest = parameters
    groups = table.groupby(rest[0], sort=True) if rest else [("", table)]
    for value, rows in groups:
        rows = rows.sort_values(first)
        spread = rows[f"{measure} std"] if f"{measure} std" in rows.columns else np.zeros(len(rows))
        label = f"{rest[0]} {value}" if rest else None
        ax.errorbar(rows[first], rows[measure], yerr=spread, marker="o", capsize=3, label=label)
    ax.set_xticks(sorted(table[first].unique()))
    ax.set_xlabel(first)
    ax.set_ylabel(measure)
    if rest:
        ax.legend()
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def new_axes() -> Any:
    """Axes of a new figure, which no window shows and pyplot does not hold on to."""
    figure = required("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    return figure.subplots()


def finish(ax: Any) -> Any:
    """The axes with a legend above them, within which bars and intervals may be anywhere."""
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
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
