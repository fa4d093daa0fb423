"""Pictures of positions, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..experiment.plots import new_axes

if TYPE_CHECKING:
    from .positions import RelevantPositions


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
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
