"""Pictures of positions, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..experiment.plots import new_axes

if TYPE_CHECKING:
    from .effectiveness import PositionEffectiveness
    from .positions import RelevantPositions
    from .sensitivity import PositionSensitivity


def plot_positions(positions: RelevantPositions, *, bin_tokens: int, max_tokens: int | None, ax: Any = None) -> Any:
    """See `RelevantPositions.plot`."""
    if bin_tokens < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"bin_tokens={bin_tokens} and max_tokens={max_tokens} must be at least 1")
    lengths = positions.frame["length"].dropna().to_numpy(dtype="float64")
    if not len(lengths):
        raise ValueError("there is nothing to draw: no relevant document was in the corpus")
    starts = positions.matched["first_token"].to_numpy(dtype="float64")
    end = max_tokens or float(np.percentile(lengths, 99)) + 1
    bins = max(1, int(np.ceil(end / bin_tokens)))
    edges = bin_tokens * np.arange(bins + 1)
    ax = ax or new_axes()
    for values, color, label in (
        (lengths, "tab:blue", f"length of {len(lengths)} relevant documents"),
        (starts, "tab:red", f"first relevant position ({positions.unmatched:.0%} unmatched)"),
    ):
        # Shares, so that what is unmatched does not make the positions look rarer.
        weights = np.full(len(values), 1 / max(1, len(values)))
        ax.hist(np.minimum(values, edges[-1] - 0.5), bins=edges, weights=weights, color=color, alpha=0.6, label=label)
    ax.set_xlim(0, edges[-1])
    if max(lengths.max(), starts.max(initial=0)) >= edges[-1]:
        ax.annotate(
            "and beyond", (1, 0), xytext=(0, -24), xycoords="axes fraction", textcoords="offset points", ha="right"
        )
    ax.set_xlabel("tokens")
    ax.set_ylabel("share")
    return _finished(ax)


def plot_effectiveness(effectiveness: PositionEffectiveness, measure: str, *, ax: Any = None) -> Any:
    """See `PositionEffectiveness.plot`."""
    table, ratios = (frame[frame["measure"] == measure] for frame in (effectiveness.table, effectiveness.ratios))
    different = _different(effectiveness.comparisons, measure)
    ax = ax or new_axes()
    count = len(effectiveness.names)
    for number, name in enumerate(effectiveness.names):
        rows, ratio = table[table["name"] == name], ratios[ratios["name"] == name].iloc[0]
        # Side by side, so that intervals do not hide each other.
        at = np.arange(len(rows)) + 0.12 * (number / max(1, count - 1) - 0.5)
        label = f"{name}: worst/best {ratio['ratio']:.2f} (p {_p(ratio['p-value'])})"
        full = [(group, name) in different for group in rows["group"]]
        _line(ax, at, rows["mean"], rows, full=full, label=label)
    labels = [f"{group}\n{len(of_group.qids)} queries" for group, of_group in effectiveness.groups.items()]
    ax.set_xticks(np.arange(len(labels)), labels)
    ax.set_xlabel("where the relevant text begins")
    ax.set_ylabel(measure)
    return _finished(ax)


def plot_sensitivity(sensitivity: PositionSensitivity, *, ax: Any = None) -> Any:
    """See `PositionSensitivity.plot`."""
    table = sensitivity.table
    ax = ax or new_axes()
    for name, rows in table.groupby("name", sort=False):
        _line(ax, rows["place"].to_numpy(), rows["change"], rows, full=rows["reject"].tolist(), label=str(name))
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xlabel("place of the relevant passage (0: start, 1: end)")
    ax.set_ylabel("change of the score (standard deviations)")
    return _finished(ax)


def _line(ax: Any, at: np.ndarray, means: pd.Series, rows: pd.DataFrame, *, full: list[bool], label: str) -> None:
    """One system: means with intervals, and full markers where `full` says."""
    middle = means.to_numpy()
    # A percentile interval need not contain the mean.
    ends = np.maximum([middle - rows["low"].to_numpy(), rows["high"].to_numpy() - middle], 0)
    line = ax.errorbar(at, middle, yerr=ends, marker="o", markerfacecolor="white", capsize=3, label=label)
    significant = np.array(full, dtype=bool)
    ax.scatter(at[significant], middle[significant], color=line[0].get_color(), zorder=3)


def _different(comparisons: pd.DataFrame, measure: str) -> set[tuple[str, str]]:
    """Groups and systems that differ from the first baseline, or from their partner where there is no baseline."""
    # Equal systems have no p-value, which corrections may take for a rejection.
    rejected = comparisons["reject"].eq(True) & comparisons["p-value"].notna()
    rows = comparisons[(comparisons["measure"] == measure) & rejected]
    baselines = comparisons.loc[comparisons["kind"] == "baseline", "reference"]
    chosen = rows["reference"] == baselines.iloc[0] if len(baselines) else rows["kind"] == "partner"
    return set(zip(rows.loc[chosen, "group"], rows.loc[chosen, "name"], strict=True))


def _p(value: float) -> str:
    return "undefined" if np.isnan(value) else "< 0.001" if value < 0.001 else f"= {value:.3f}"


def _finished(ax: Any) -> Any:
    """With a legend above the axes, within which bars and intervals may be anywhere."""
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax
