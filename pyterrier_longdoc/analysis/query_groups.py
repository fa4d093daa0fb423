"""Results of an experiment by groups of queries, e.g. by the length of relevant documents."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments
from ..common.frames import as_strings, check_columns, labels_of
from ..common.language import counted
from ..common.plots import draw_means, finish, label_mean, new_axes, offsets
from ..experiment import ExperimentResults
from ..experiment.significance import resampled_means

DEFAULT_EDGES = (0, 512, 1024, 2048)
"""In tokens: the input length of BERT, and two and four times as much."""


def by_document_length(
    results: ExperimentResults,
    qrels: pd.DataFrame,
    lengths: Mapping[str, float],
    *,
    edges: Sequence[float] = DEFAULT_EDGES,
) -> pd.DataFrame:
    """Return results by the mean length of a query's relevant documents.

    Args:
        results: the results of an experiment.
        qrels: `qid, docno, label`; labels above 0 are relevant.
        lengths: the lengths of documents by docno, e.g. in tokens. Relevant documents without a length are ignored.
        edges: the lower bounds of the groups; by default the input length of BERT in tokens, and two and four times as
            much.

    Returns:
        See `by_query_value`. Queries without a relevant document of known length are left out.
    """
    return by_query_value(results, relevant_lengths(qrels, lengths), edges=edges, column="document length")


def relevant_lengths(qrels: pd.DataFrame, lengths: Mapping[str, float]) -> dict[str, float]:
    """Return the mean length of each query's relevant documents; see `by_document_length`."""
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    relevant = qrels[labels_of(qrels, "qrels") > 0].drop_duplicates(["qid", "docno"])
    return mean_by_query(relevant, as_strings(relevant["docno"]).map(dict(lengths)))


def by_query_value(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float], column: str = "group"
) -> pd.DataFrame:
    """Return results by groups of queries, with separate tests for each group.

    Args:
        results: the results of an experiment.
        values: the value of each query, by qid.
        edges: the lower bounds of the groups, ascending; the last group has no upper bound.
        column: the name of the first column.

    Returns:
        `column` (e.g. `"512 to < 1024"`), `queries` and the columns of `results.table`, with one row for each non-empty
        group and system.

    Raises:
        ValueError: if the edges do not ascend, or no evaluated query reaches the first edge.
    """
    tables = []
    for label, group_results in query_groups(results, values, edges=edges).items():
        table = group_results.table
        table.insert(0, column, label)
        table.insert(1, "queries", len(group_results.qids))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def query_groups(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float]
) -> dict[str, ExperimentResults]:
    """Return the results of each non-empty group of queries by label; see `by_query_value`."""
    query_values = {qid: values[qid] for qid in results.qids if qid in values and not np.isnan(values[qid])}
    groups = {}
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        qids = [qid for qid, value in query_values.items() if low <= value < high]
        if qids:
            groups[f">= {low:g}" if high == np.inf else f"{low:g} to < {high:g}"] = results.subset(qids)
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"edges={list(edges)} must ascend")
    if not groups:
        raise ValueError(f"edges={list(edges)} must begin lower: no evaluated query reaches the first one")
    return groups


def mean_by_query(frame: pd.DataFrame, values: pd.Series) -> dict[str, float]:
    """Return the mean value of each query; `values` belong to the rows of `frame`, which has the column `qid`."""
    by_query = values.astype("float64").groupby(as_strings(frame["qid"]), sort=False)
    return {str(qid): float(mean) for qid, mean in by_query.mean().items()}


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
    """Plot the mean of each system by the length of the relevant documents; return the matplotlib axes.

    Args:
        results: the results of an experiment. Its `statistics` set the level of the bootstrap intervals.
        qrels: `qid, docno, label`.
        lengths: the lengths of documents by docno, as in `by_document_length`.
        edges: the lower bounds of the groups.
        measure: a measure of the experiment; None for the first.
        unit: the unit of `lengths`, for the axis.
        ax: axes to draw on; None creates a figure.
    """
    groups = query_groups(results, relevant_lengths(qrels, lengths), edges=edges)
    ax = draw_groups(groups, measure, ax=ax)
    ax.set_xlabel(f"mean length of the relevant documents ({unit})")
    return finish(ax)


def means_by_group(groups: Mapping[str, ExperimentResults]) -> pd.DataFrame:
    """Return `group, queries, name, measure, mean, low, high`: means over queries with bootstrap intervals."""
    statistics = next(iter(groups.values())).statistics
    rows = []
    for label, results in groups.items():
        for name, values in results.query_values.items():
            means = resampled_means(values, resamples=statistics.resamples, seed=statistics.seed)
            low, high = statistics.interval(means)
            for m, measure in enumerate(results.measures):
                rows.append((label, len(values), name, measure, values[:, m].mean(), low[m], high[m]))
    return pd.DataFrame(rows, columns=["group", "queries", "name", "measure", "mean", "low", "high"])


def draw_groups(
    groups: Mapping[str, ExperimentResults],
    measure: str | None,
    *,
    ax: Any,
    labels: Mapping[str, str] | None = None,
    full: Container[tuple[str, str]] = (),
) -> Any:
    """Plot the mean of each system in each group with its interval; return the axes.

    If `measure` is None, the first one is drawn; if `ax` is None, a figure is created. `labels` are the legend entries
    by system; `full` are the groups and systems with a filled marker.
    """
    first = next(iter(groups.values()))
    measure = measure or first.measures[0]
    check_arguments("str", choices=first.measures, measure=measure)
    table = means_by_group(groups)
    table = table[table["measure"] == measure]
    ax, places = ax or new_axes(len(first.names)), np.arange(len(groups))
    for system, (name, shift) in enumerate(zip(first.names, offsets(places, len(first.names)), strict=True)):
        rows = table[table["name"] == name]
        is_full = [(group, name) in full for group in rows["group"]]
        label = name if labels is None else labels[name]
        draw_means(ax, places + shift, rows["mean"], rows, full=is_full, label=label, system=system)
    ticks = [f"{group}\n{counted(len(results.qids), 'query', 'queries')}" for group, results in groups.items()]
    ax.set_xticks(places, ticks)
    ax.set_ylabel(label_mean(measure, first.statistics.confidence))
    return ax
