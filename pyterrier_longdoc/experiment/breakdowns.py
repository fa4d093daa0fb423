"""Results by groups of queries: by the length of relevant documents, by where the relevant passage stands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .perquery import check_columns
from .results import ExperimentResults
from .runs import as_strings

DEFAULT_EDGES = (0, 512, 1024, 2048)
"""In tokens: what a BERT reads at once, and twice and four times that."""


def by_document_length(
    results: ExperimentResults,
    qrels: pd.DataFrame,
    lengths: Mapping[str, float],
    *,
    edges: Sequence[float] = DEFAULT_EDGES,
) -> pd.DataFrame:
    """Results by the mean length of a query's relevant documents.

    Args:
        results: of an experiment.
        qrels: `qid, docno, label`; a label above 0 is relevant.
        lengths: of documents by docno, e.g. in tokens. Relevant documents that are missing here do not count.
        edges: lower ends of the groups.

    Returns:
        See `by_query_value`; queries without a relevant document of known length are left out.
    """
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    relevant = qrels[qrels["label"] > 0]
    known = dict(lengths)
    of_document = pd.Series([known.get(docno, np.nan) for docno in as_strings(relevant["docno"])], dtype="float64")
    return by_query_value(results, mean_by_query(relevant, of_document), edges=edges, column="document length")


def by_relevant_position(
    results: ExperimentResults, positions: pd.DataFrame, *, edges: Sequence[float] = DEFAULT_EDGES
) -> pd.DataFrame:
    """Results by the position of the relevant passage in its document, e.g. in tokens from the start.

    Args:
        results: of an experiment.
        positions: `qid, position`, and any other columns; several rows of a query (for several relevant documents)
            count as their mean.
        edges: lower ends of the groups.

    Returns:
        See `by_query_value`; queries without a position are left out.
    """
    check_columns(positions, ("qid", "position"), "positions")
    of_query = mean_by_query(positions, positions["position"].reset_index(drop=True))
    return by_query_value(results, of_query, edges=edges, column="relevant position")


def by_query_value(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float], column: str = "group"
) -> pd.DataFrame:
    """Results by groups of queries, each tested on its own.

    Args:
        results: of an experiment.
        values: by qid.
        edges: lower ends of the groups, ascending; the last group has no upper end.
        column: name of the first column.

    Returns:
        `column` (e.g. `"512-1023"`), `queries`, and the columns of `results.table`: one row for each group that has
        queries and each system.

    Raises:
        ValueError: if edges do not ascend, or no evaluated query falls into any group.
    """
    tables = []
    for label, of_group in query_groups(results, values, edges=edges).items():
        table = of_group.table
        table.insert(0, column, label)
        table.insert(1, "queries", len(of_group.qids))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def query_groups(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float]
) -> dict[str, ExperimentResults]:
    """The results of each group of queries that is not empty, by its label.

    Args:
        results: of an experiment.
        values: by qid.
        edges: lower ends of the groups, ascending; the last group has no upper end.

    Raises:
        ValueError: if edges do not ascend, or no evaluated query falls into any group.
    """
    if not len(edges) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"edges={list(edges)} must ascend")
    evaluated = {qid: values[qid] for qid in results.qids if qid in values and not np.isnan(values[qid])}
    groups = {}
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        qids = [qid for qid, value in evaluated.items() if low <= value < high]
        if qids:
            groups[f">= {low:g}" if high == np.inf else f"{low:g} to < {high:g}"] = results.subset(qids)
    if not groups:
        raise ValueError(f"no evaluated query has a value of at least {edges[0]:g}")
    return groups


def mean_by_query(frame: pd.DataFrame, values: pd.Series) -> dict[str, float]:
    """The mean of the values of each query; `frame` has the column `qid`, `values` the index 0, 1, ..."""
    of_query = values.astype("float64").groupby(as_strings(frame["qid"]).reset_index(drop=True), sort=False)
    return {str(qid): float(value) for qid, value in of_query.mean().items()}
