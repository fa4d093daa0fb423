"""What makes the numbers of an experiment doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from .runner import DOUBTS, EvaluatedRun
from .significance import Statistics, mean_over_seeds, without_rounding

FEW_QUERIES = 25
"""The least number of topics for a comparison by Buckley & Voorhees 2000, who find 50 better."""

CHECK_COLUMNS = ["check", "name", "queries", "message"]

Finding = tuple[str, str, int, str]
"""Check, name of the system, number of queries, message."""


def findings(
    evaluated: Mapping[str, Sequence[EvaluatedRun]], qids: Sequence[str], statistics: Statistics
) -> pd.DataFrame:
    """Return a row for each finding; of several seeds the worst counts, and the first for its candidates."""
    rows: list[Finding] = []
    for name, runs in evaluated.items():
        rows += _of_system(name, runs, len(qids))
    rows += _without_relevant_candidate(evaluated, len(qids))
    rows += _of_pairs(evaluated, qids, statistics)
    if statistics.baseline or statistics.partner:
        rows += _too_few(len(qids), statistics)
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def _of_system(name: str, runs: Sequence[EvaluatedRun], queries: int) -> Iterator[Finding]:
    for doubt in DOUBTS:
        number = max(run.doubts[doubt] for run in runs)
        if number:
            yield doubt, name, number, f"{doubt} in {number} of {queries} queries of {name}"
    distinct = len({run.values.tobytes() for run in runs})
    if distinct < len(runs):
        equal = f"{len(runs) - distinct} of {len(runs)} seeds of {name} have the values of another one"
        yield "equal seeds", name, queries, equal
    unchecked = list(dict.fromkeys(part for run in runs for part in run.unchecked))
    if unchecked:
        same = f"the saved run of {name} was read; nobody can tell if as before: {', '.join(unchecked)}"
        yield "unchecked", name, queries, same
    differs = list(dict.fromkeys(part for run in runs for part in run.differs))
    if differs:
        more = f" and {len(differs) - 3} more" if len(differs) > 3 else ""
        anew = f"the saved run of {name} is not known to be of the same {', '.join(differs[:3])}{more}"
        yield "made anew", name, queries, anew


def _without_relevant_candidate(evaluated: Mapping[str, Sequence[EvaluatedRun]], queries: int) -> Iterator[Finding]:
    """Yield a row for each system that has such queries; those that rerank the same candidates share the message."""
    systems: dict[tuple[str, ...], list[str]] = {}
    for name, runs in evaluated.items():
        without = tuple(qid for qid, standing in runs[0].standings.items() if not standing.ranks)
        systems.setdefault(without, []).append(name)
    for without, names in systems.items():
        if without:
            what = "no relevant candidate"
            message = f"{what} in {len(without)} of {queries} queries of {', '.join(names)}"
            yield from ((what, name, len(without), message) for name in names)


def _of_pairs(
    evaluated: Mapping[str, Sequence[EvaluatedRun]], qids: Sequence[str], statistics: Statistics
) -> Iterator[Finding]:
    """Yield what is wrong with systems and what they are compared to."""
    values = {name: mean_over_seeds(np.stack([run.values for run in runs])) for name, runs in evaluated.items()}
    pairs = [pair for _, _, of_kind in statistics.references(list(evaluated)) for pair in of_kind.items()]
    for name, reference in dict.fromkeys(pairs):
        own, other = evaluated[name][0].candidates, evaluated[reference][0].candidates
        queries = sum(own.get(qid) != other.get(qid) for qid in qids)
        if queries:
            message = f"{name} and {reference} rank different documents in {queries} of {len(qids)} queries"
            yield "different candidates", name, queries, message
        if np.array_equal(without_rounding(values[name], values[reference]), values[reference]):
            yield "equal systems", name, len(qids), f"{name} and {reference} have equal values everywhere"


def _too_few(queries: int, statistics: Statistics) -> Iterator[Finding]:
    if queries < FEW_QUERIES:
        message = f"{queries} queries; comparisons need at least {FEW_QUERIES}, better 50 (Buckley & Voorhees 2000)"
        yield "too few queries", "", queries, message
    # Only signs are random in these tests: no p-value can be below 2 / 2^Q.
    least = 2.0 ** (1 - queries)
    if statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
        message = f"with {queries} queries no p-value of test={statistics.test!r} can be below {least:g}"
        yield "too few queries", "", queries, message
