"""Colours, axes and labels for plots with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .files import import_extra

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
"""The colour-blind friendly colours of Okabe & Ito that are visible on white and on black."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_axes(systems: int = 0) -> Any:
    """Create the axes of a new pyplot figure, with additional height for one legend line per system.

    A notebook shows the figure at the end of the cell; without a display, pyplot draws into memory.
    """
    pyplot = import_extra("matplotlib.pyplot", "analysis", "matplotlib is missing")
    return pyplot.subplots(figsize=(6, 4 + 0.2 * systems), layout="constrained")[1]


def line_style(system: int) -> dict[str, str]:
    """Return the colour and marker of a system by index; 42 combinations are distinct, 7 without colours."""
    return {"color": COLOURS[system % len(COLOURS)], "marker": MARKERS[system % len(MARKERS)]}


def offsets(places: Any, systems: int) -> np.ndarray:
    """Return the horizontal offset of each system, `(systems,)`, so that equal values do not hide each other."""
    distinct = np.unique(places)
    distance = np.ptp(distinct) / (len(distinct) - 1) if len(distinct) > 1 else 1.0
    return distance * min(0.08, 0.6 / systems) * (np.arange(systems) - (systems - 1) / 2)


def draw_means(
    ax: Any, at: np.ndarray, means: pd.Series, intervals: pd.DataFrame, *, full: Sequence[bool], label: str, system: int
) -> None:
    """Draw the means of a system at horizontal places, with intervals (`low` and `high`); `full` markers are filled.

    The index of the system determines colour and marker.
    """
    middle = means.to_numpy()
    # A percentile interval need not contain the mean.
    ends = np.maximum([middle - intervals["low"].to_numpy(), intervals["high"].to_numpy() - middle], 0)
    style, significant = line_style(system), np.array(full, dtype=bool)
    ax.errorbar(at, middle, yerr=ends, markerfacecolor=ax.get_facecolor(), capsize=3, label=label, **style)
    ax.scatter(at[significant], middle[significant], zorder=3, **style)


def marker_legend(meaning: str | None) -> Any:
    """Return the legend entry for filled markers, or for empty ones if nothing was tested (None)."""
    lines = import_extra("matplotlib.lines", "analysis", "matplotlib is missing")
    face, label = ("0.4", f"filled marker: {meaning}") if meaning else ("none", "empty markers: not tested")
    return lines.Line2D([], [], linestyle="", marker="o", color="0.4", markerfacecolor=face, label=label)


def finish(ax: Any, *entries: Any) -> Any:
    """Add a legend, with these additional entries, above the axes, where it does not hide bars; return the axes."""
    handles = [*ax.get_legend_handles_labels()[0], *entries]
    ax.legend(handles=handles, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax
