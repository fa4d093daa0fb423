"""Pictures of results, with matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..common.files import import_extra
from .results import ExperimentResults


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
    gains = rows.groupby("name")["gain"].mean().mul(100).reset_index()
    points = results.efficiency[["name", "slow-down"]].merge(gains, on="name")
    ax = ax or new_axes()
    ax.scatter(points["slow-down"], points["gain"])
    for name, slow_down, gain in points.to_numpy().tolist():
        ax.annotate(name, (slow_down, gain), xytext=(4, 4), textcoords="offset points")
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xlabel("time per document relative to the partner")
    ax.set_ylabel("mean gain over the partner (%)")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def new_axes() -> Any:
    """Axes of a new figure, which no window shows and pyplot does not hold on to."""
    figure = import_extra("matplotlib.figure", "analysis", "matplotlib.figure is missing")
    return figure.Figure(figsize=(6, 4), layout="constrained").subplots()


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
