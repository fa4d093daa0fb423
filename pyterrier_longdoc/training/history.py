"""The history of a training as a table and as a learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

_COLUMNS = ("epoch", "step", "loss", "learning_rate", "documents_per_second", "validation")


def history_frame(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The entries that `train` makes as a table, without columns that none of them has."""
    columns = [name for name in _COLUMNS if any(name in entry for entry in entries)]
    return pd.DataFrame(entries, columns=columns or list(_COLUMNS[:3]))


def plot_history(history: pd.DataFrame, *, ax: Any = None) -> Any:
    """Draws loss and validation figure over optimiser steps.

    Args:
        history: a reranker's `history`; of several trainings one after the other.
        ax: matplotlib axes to draw on; None makes a figure.

    Returns:
        The axes; `ax.figure.savefig(...)` writes the picture.

    Raises:
        ValueError: if there is no history.
        ImportError: without matplotlib.
    """
    from ..experiment.plots import new_axes

    if history.empty:
        raise ValueError("there is no history: this model has not been trained")
    steps = _all_steps(history["step"].to_numpy())
    ax = ax or new_axes()
    lines = ax.plot(steps, history["loss"], marker=".", color="C0", label="loss")
    ax.set_xlabel("optimiser steps")
    ax.set_ylabel("loss")
    if "validation" in history.columns and history["validation"].notna().any():
        seen = history["validation"].notna().to_numpy()
        right = ax.twinx()
        lines += right.plot(steps[seen], history["validation"][seen], marker=".", color="C1", label="validation")
        right.set_ylabel("validation")
        right.spines["top"].set_visible(False)
    ax.legend(handles=lines)
    ax.spines["top"].set_visible(False)
    return ax


def _all_steps(steps: np.ndarray) -> np.ndarray:
    """Steps of all trainings: each began to count at 1."""
    begins = np.concatenate([[False], np.diff(steps) < 0])
    before = np.cumsum(np.where(begins, np.concatenate([[0], steps[:-1]]), 0))
    return steps + before
