"""What systems cost, as a table and as a plot of gains over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..common.plots import COLOURS, label_points, new_axes
from .cost import Cost
from .results import ExperimentResults


def efficiency_table(costs: Mapping[str, list[Cost]], partner: Mapping[str, str]) -> pd.DataFrame:
    """Return one row for each system that was run: its costs, averaged over seeds (one `Cost` each).

    `ms/query` is for the whole pipeline; `slow-down` is the rerank time per document relative to the partner's.
    """
    rows = {name: _row(runs) for name, runs in costs.items() if runs}
    for name, row in rows.items():
        reference = rows.get(partner.get(name, ""), {}).get("rerank ms/document")
        row["slow-down"] = row["rerank ms/document"] / reference if reference else np.nan
    return pd.DataFrame([{"name": name, **row} for name, row in rows.items()])


def _row(costs: list[Cost]) -> dict[str, float]:
    total = Cost.total(costs)
    documents, texts, tokens = (number or np.nan for number in (total.documents, total.texts, total.tokens))
    return {
        "ms/query": 1000 * total.seconds / total.queries,
        "rerank ms/query": 1000 * total.rerank_seconds / total.queries,
        "rerank ms/document": 1000 * total.rerank_seconds / documents,
        "tokens read/document": total.tokens_read / texts,
        "share read": total.tokens_read / tokens,
        "windows/document": total.windows / texts,
        "peak memory MB": total.memory / 2**20,
        "peak GPU memory MB": total.gpu_memory / 2**20 if total.gpu_memory else np.nan,
    }


def plot_efficiency(results: ExperimentResults, *, ax: Any = None) -> Any:
    """Draw each system's gain over its partner over its slow-down (Figure 3 of Boytsov et al. 2025); return the axes.

    Args:
        results: of an experiment with `partner` and `efficiency=True`. The gain is the mean over its measures; a note
            names systems that neither have nor are a partner.
        ax: matplotlib axes to draw on; None makes a figure.
    """
    if results.efficiency is None or not results.statistics.partner:
        raise ValueError("gains over time need Experiment with partner={system: its FirstP}, efficiency=True")
    rows = results.comparisons[results.comparisons["kind"] == "partner"]
    gains = rows.groupby("name", sort=False)["gain"].mean().mul(100).reset_index()
    partner = results.statistics.partner
    names = [name for name in results.names if name in partner or name not in partner.values()]
    points = pd.DataFrame({"name": names}).merge(gains, how="left")
    points = points.merge(results.efficiency[["name", "slow-down"]], on="name", how="left")
    complete = points.dropna()
    ax = ax or new_axes()
    ax.scatter(complete["slow-down"], complete["gain"], color=COLOURS[0])
    ax.axhline(0, color="0.6", linewidth=0.8)
    label_points(ax, complete[["name", "slow-down", "gain"]])
    missing = ", ".join(points.loc[points.isna().any(axis=1), "name"])
    note = f"\nnot drawn, as time or gain is unknown: {missing}" if missing else ""
    ax.set_xlabel(f"time per document relative to the partner{note}", wrap=True)
    ax.set_ylabel("mean gain over the partner (%)")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
