"""Checks for problems that make the results of an experiment unreliable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from .runner import RUN_CHECKS, EvaluatedRun
from .significance import Statistics, mean_over_seeds, without_rounding

FEW_QUERIES = 25
"""The minimum number of topics for a comparison according to Buckley & Voorhees 2000, who recommend 50."""

CHECK_COLUMNS = ["check", "name", "queries", "message"]

Check = tuple[str, str, int, str]
"""Check, name of the system, number of queries, message."""


def check_runs(
    outcomes: Mapping[str, Sequence[EvaluatedRun]], qids: Sequence[str], topics: pd.DataFrame, statistics: Statistics
) -> pd.DataFrame:
    """Return a row for each failed check, for the worst seed of a system (candidates: for the first seed)."""
    rows: list[Check] = list(_repeated(topics))
    queries = len(qids)
    without_relevant: dict[tuple[str, ...], list[str]] = {}
    for name, runs in outcomes.items():
        for check in RUN_CHECKS:
            doubtful = max(run.doubtful[check] for run in runs)
            if doubtful:
                rows.append((check, name, doubtful, f"{check} in {doubtful} of {queries} queries of {name}"))
        distinct = len({run.values.tobytes() for run in runs})
        if distinct < len(runs):
            message = f"{len(runs) - distinct} of {len(runs)} seeds of {name} have the same values as another seed"
            rows.append(("equal seeds", name, queries, message))
        lacking = tuple(qid for qid in runs[0].candidates if qid not in runs[0].with_relevant)
        without_relevant.setdefault(lacking, []).append(name)
    for lacking, names in without_relevant.items():  # systems with the same queries share the message
        message = f"no relevant candidate in {len(lacking)} of {queries} queries of {', '.join(names)}"
        rows += [("no relevant candidate", name, len(lacking), message) for name in names if lacking]

    values = {name: mean_over_seeds(np.stack([run.values for run in runs])) for name, runs in outcomes.items()}
    pairs = [pair for _, _, references in statistics.references(list(outcomes)) for pair in references.items()]
    for name, reference in dict.fromkeys(pairs):
        candidates, other = outcomes[name][0].candidates, outcomes[reference][0].candidates
        different = sum(candidates.get(qid) != other.get(qid) for qid in qids)
        if different:
            message = f"{name} and {reference} rank different documents in {different} of {queries} queries"
            rows.append(("different candidates", name, different, message))
        if np.array_equal(without_rounding(values[name], values[reference]), values[reference]):
            rows.append(("equal systems", name, queries, f"{name} and {reference} have equal values everywhere"))

    if statistics.baseline or statistics.partner:
        rows += _too_few(queries, statistics)
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def _repeated(topics: pd.DataFrame) -> Iterator[Check]:
    qids = topics["qid"][topics["qid"].duplicated()].unique()
    if len(qids):
        yield "repeated topics", "", len(qids), f"{len(qids)} qids have several rows in the topics, e.g. {qids[0]!r}"


def _too_few(queries: int, statistics: Statistics) -> Iterator[Check]:
    if queries < FEW_QUERIES:
        message = f"{queries} queries; comparisons need at least {FEW_QUERIES}, ideally 50 (Buckley & Voorhees 2000)"
        yield "too few queries", "", queries, message
    # Only the signs are random in these tests, so no p-value can be below 2 / 2^Q.
    least = 2.0 ** (1 - queries)
    if statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
        message = f"with {queries} queries no p-value of test={statistics.test!r} can be below {least:g}"
        yield "too few queries", "", queries, message
