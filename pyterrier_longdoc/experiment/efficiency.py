"""The cost of systems, as a table and as a plot of effectiveness over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..common.plots import COLOURS, label_points, new_axes
from .cost import Cost
from .results import ExperimentResults


def efficiency_table(costs: Mapping[str, list[Cost]], partner: Mapping[str, str]) -> pd.DataFrame:
    """Return the costs of each system that was run, averaged over seeds (one `Cost` per seed).

    `ms/query` covers the whole pipeline. `slow-down` is the reranking time per document, relative to the partner's.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, total in ((name, Cost.total(runs)) for name, runs in costs.items() if runs):
        documents, texts, tokens = (number or np.nan for number in (total.documents, total.texts, total.tokens))
        rows[name] = {
            "ms/query": 1000 * total.seconds / total.queries,
            "rerank ms/query": 1000 * total.rerank_seconds / total.queries,
            "rerank ms/document": 1000 * total.rerank_seconds / documents,
            "tokens read/document": total.tokens_read / texts,
            "share read": total.tokens_read / tokens,
            "windows/document": total.windows / texts,
            "peak memory MB": total.memory / 2**20,
            "peak GPU memory MB": total.gpu_memory / 2**20 if total.gpu_memory else np.nan,
        }
    for name, row in rows.items():
        reference = rows.get(partner.get(name, ""), {}).get("rerank ms/document")
        row["slow-down"] = row["rerank ms/document"] / reference if reference else np.nan
    return pd.DataFrame([{"name": name, **row} for name, row in rows.items()])


def plot_efficiency(results: ExperimentResults, *, ax: Any = None) -> Any:
    """Plot the effectiveness of systems over the time they take.

    If every system has a partner or is one, the plot shows the gain of each system over its partner against its
    slow-down (Figure 3 of Boytsov et al. 2025). The gain is averaged over the measures; partners that have no partner
    themselves are at (1, 0). Otherwise the plot shows the mean of the first measure against the milliseconds per query
    of the whole pipeline. A note lists systems with unknown time.

    Args:
        results: the results of an experiment with `efficiency=True`.
        ax: matplotlib axes to draw on; None creates a figure.

    Returns:
        The axes.
    """
    if results.efficiency is None:
        raise ValueError("plot_efficiency needs the results of Experiment(..., efficiency=True)")
    partner, costs, ax = results.statistics.partner, results.efficiency.set_index("name"), ax or new_axes()
    points = pd.DataFrame(index=pd.Index(results.names, name="name"))
    if partner and set(results.names) <= {*partner, *partner.values()}:
        labels = "time per document relative to the partner", "mean gain over the partner (%)"
        gains = results.comparisons.query("kind == 'partner'").groupby("name")["gain"].mean().mul(100)
        points = points.assign(time=costs["slow-down"], worth=gains)
        points.loc[~points.index.isin(partner.keys())] = 1.0, 0.0
        ax.axhline(0, color="0.6", linewidth=0.8)
    else:
        labels = "milliseconds per query", f"mean {results.measures[0]}"
        points = points.assign(time=costs["ms/query"], worth=results.means.iloc[:, 0])
    complete = points.dropna()
    ax.scatter(complete["time"], complete["worth"], color=COLOURS[0])
    label_points(ax, complete.reset_index())
    missing = ", ".join(points.index[points.isna().any(axis=1)])
    note = f"\nnot drawn, because time or gain is unknown: {missing}" if missing else ""
    ax.set_xlabel(f"{labels[0]}{note}", wrap=True)
    ax.set_ylabel(labels[1])
    ax.spines[["top", "right"]].set_visible(False)
    return ax
