"""Looks for what makes an experiment's numbers doubtful: ties, NaN, missing queries, unequal candidates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .comparisons import Statistics
from .runs import Run

FEW_QUERIES = 25
"""The least number of topics for a comparison by Buckley & Voorhees 2000, who find 50 better."""

COLUMNS = ["check", "name", "queries", "message"]


class ExperimentWarning(UserWarning):
    """Something makes the numbers of an experiment doubtful; `checks` of the results lists it."""


class RunChecks:
    """Looks at runs, one after the other.

    Args:
        qids: the queries that are evaluated; others are not looked at.
    """

    def __init__(self, qids: Sequence[str]) -> None:
        self.qids = list(qids)
        self._counts: dict[str, dict[str, int]] = {}
        self._candidates: dict[str, dict[str, int]] = {}

    def look_at(self, name: str, run: Run) -> None:
        """Looks at one run of a system; of several seeds the worst counts."""
        evaluated = np.isin(np.array(run.qids, dtype=object), np.array(self.qids, dtype=object))
        lengths = np.diff(run.starts)
        query_of = np.repeat(np.arange(len(run.qids)), lengths)
        candidates = {qid: documents for qid, documents in run.documents()}
        sets = {qid: frozenset(documents) for qid, documents in candidates.items()}
        self._candidates.setdefault(name, {qid: hash(documents) for qid, documents in sets.items()})
        found = {
            "missing queries": len(set(self.qids) - set(run.qids)),
            "NaN or infinite scores": _queries(~np.isfinite(run.scores), query_of, evaluated),
            "constant scores": int(_is_constant(run, lengths)[evaluated].sum()),
            "tied scores": int(_has_ties(run, query_of, len(lengths))[evaluated].sum()),
            "repeated documents": sum(len(sets[q]) < len(candidates[q]) for q in self.qids if q in sets),
        }
        worst = self._counts.setdefault(name, dict.fromkeys(found, 0))
        for check, queries in found.items():
            worst[check] = max(worst[check], queries)

    def findings(self, values: Mapping[str, np.ndarray], statistics: Statistics) -> pd.DataFrame:
        """All that was found: `check, name, queries, message`.

        Args:
            values: for each system `(Q, M)` per-query values.
            statistics: what is compared, and how.
        """
        total, rows = len(self.qids), []
        for name, counts in self._counts.items():
            for check, queries in counts.items():
                if queries:
                    rows.append((check, name, queries, f"{check} in {queries} of {total} queries of {name}"))
        for name, reference in _pairs(statistics, list(values)):
            queries = self._different_candidates(name, reference)
            if queries:
                message = f"{name} and {reference} rank different documents in {queries} of {total} queries"
                rows.append(("different candidates", name, queries, message))
            if np.array_equal(values[name], values[reference]):
                rows.append(("equal systems", name, total, f"{name} and {reference} have equal values everywhere"))
        if statistics.baselines or statistics.partner:
            rows += _too_few(total, statistics)
        return pd.DataFrame(rows, columns=COLUMNS)

    def _different_candidates(self, name: str, reference: str) -> int:
        mine, theirs = self._candidates.get(name, {}), self._candidates.get(reference, {})
        return sum(mine.get(qid) != theirs.get(qid) for qid in self.qids)


def warn_of(findings: pd.DataFrame, *, stacklevel: int) -> None:
    """One `ExperimentWarning` for each kind of finding."""
    for check, rows in findings.groupby("check", sort=False):
        messages = rows["message"].tolist()
        more = f" (and {len(messages) - 3} more, see .checks)" if len(messages) > 3 else ""
        warnings.warn(f"{check}: {'; '.join(messages[:3])}{more}", ExperimentWarning, stacklevel=stacklevel)


def _queries(rows: np.ndarray, query_of: np.ndarray, evaluated: np.ndarray) -> int:
    affected = np.zeros(len(evaluated), dtype=bool)
    affected[query_of[rows]] = True
    return int((affected & evaluated).sum())


def _is_constant(run: Run, lengths: np.ndarray) -> np.ndarray:
    scores, starts = run.scores.astype("float32"), run.starts[:-1]
    return (lengths > 1) & (np.maximum.reduceat(scores, starts) == np.minimum.reduceat(scores, starts))


def _has_ties(run: Run, query_of: np.ndarray, queries: int) -> np.ndarray:
    scores = run.scores.astype("float32")  # trec_eval compares in float32
    order = np.lexsort((scores, query_of))
    same = (np.diff(scores[order]) == 0) & (np.diff(query_of[order]) == 0)
    tied = np.zeros(queries, dtype=bool)
    tied[query_of[order][1:][same]] = True
    return tied


def _pairs(statistics: Statistics, names: list[str]) -> list[tuple[str, str]]:
    pairs = [pair for _, _, of_kind in statistics.references(names) for pair in of_kind.items()]
    return list(dict.fromkeys(pairs))


def _too_few(queries: int, statistics: Statistics) -> list[tuple[str, str, int, str]]:
    rows = []
    if queries < FEW_QUERIES:
        message = f"{queries} queries; comparisons need at least {FEW_QUERIES}, better 50 (Buckley & Voorhees 2000)"
        rows.append(("too few queries", "", queries, message))
    # Only signs are random in these tests: no p-value can be below 2 / 2^Q.
    if statistics.test in ("wilcoxon", "randomisation") and 2.0 ** (1 - queries) >= statistics.alpha:
        message = f"with {queries} queries no p-value of test={statistics.test!r} can be below {2.0 ** (1 - queries):g}"
        rows.append(("too few queries", "", queries, message))
    return rows
