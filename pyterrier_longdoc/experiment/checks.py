"""What makes the numbers of an experiment doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from .runner import RUN_CHECKS, EvaluatedRun
from .significance import Statistics, mean_over_seeds, without_rounding

FEW_QUERIES = 25
"""The least topics for a comparison by Buckley & Voorhees 2000, who find 50 better."""

CHECK_COLUMNS = ["check", "name", "queries", "message"]

Check = tuple[str, str, int, str]
"""Check, name of the system, number of queries, message."""


def check_runs(
    outcomes: Mapping[str, Sequence[EvaluatedRun]], qids: Sequence[str], statistics: Statistics
) -> pd.DataFrame:
    """Return a row for each check that fails; the worst of several seeds counts, for candidates the first one."""
    rows: list[Check] = []
    for name, runs in outcomes.items():
        rows += _of_system(name, runs, len(qids))
    rows += _without_relevant_candidate(outcomes, len(qids))
    rows += _of_pairs(outcomes, qids, statistics)
    if statistics.baseline or statistics.partner:
        rows += _too_few(len(qids), statistics)
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def _of_system(name: str, runs: Sequence[EvaluatedRun], queries: int) -> Iterator[Check]:
    for check in RUN_CHECKS:
        number = max(run.doubtful[check] for run in runs)
        if number:
            yield check, name, number, f"{check} in {number} of {queries} queries of {name}"
    distinct = len({run.values.tobytes() for run in runs})
    if distinct < len(runs):
        message = f"{len(runs) - distinct} of {len(runs)} seeds of {name} have the values of another one"
        yield "equal seeds", name, queries, message


def _without_relevant_candidate(outcomes: Mapping[str, Sequence[EvaluatedRun]], queries: int) -> Iterator[Check]:
    """Yield a row for each system with such queries; systems with the same queries share the message."""
    systems: dict[tuple[str, ...], list[str]] = {}
    for name, runs in outcomes.items():
        qids = tuple(qid for qid, standing in runs[0].standings.items() if not standing.ranks)
        systems.setdefault(qids, []).append(name)
    for qids, names in systems.items():
        if qids:
            check = "no relevant candidate"
            message = f"{check} in {len(qids)} of {queries} queries of {', '.join(names)}"
            yield from ((check, name, len(qids), message) for name in names)


def _of_pairs(
    outcomes: Mapping[str, Sequence[EvaluatedRun]], qids: Sequence[str], statistics: Statistics
) -> Iterator[Check]:
    """Yield the problems of systems and their references."""
    values = {name: mean_over_seeds(np.stack([run.values for run in runs])) for name, runs in outcomes.items()}
    pairs = [pair for _, _, references in statistics.references(list(outcomes)) for pair in references.items()]
    for name, reference in dict.fromkeys(pairs):
        candidates, other = outcomes[name][0].candidates, outcomes[reference][0].candidates
        queries = sum(candidates.get(qid) != other.get(qid) for qid in qids)
        if queries:
            message = f"{name} and {reference} rank different documents in {queries} of {len(qids)} queries"
            yield "different candidates", name, queries, message
        if np.array_equal(without_rounding(values[name], values[reference]), values[reference]):
            yield "equal systems", name, len(qids), f"{name} and {reference} have equal values everywhere"


def _too_few(queries: int, statistics: Statistics) -> Iterator[Check]:
    if queries < FEW_QUERIES:
        message = f"{queries} queries; comparisons need at least {FEW_QUERIES}, better 50 (Buckley & Voorhees 2000)"
        yield "too few queries", "", queries, message
    # Only signs are random in these tests: no p-value can be below 2 / 2^Q.
    least = 2.0 ** (1 - queries)
    if statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
        message = f"with {queries} queries no p-value of test={statistics.test!r} can be below {least:g}"
        yield "too few queries", "", queries, message
