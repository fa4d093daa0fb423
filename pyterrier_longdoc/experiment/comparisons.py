"""Every system against its partner and against each baseline, as one tidy frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from .significance import (
    RESAMPLES,
    TESTS,
    Test,
    bootstrap_intervals,
    correct,
    effect_sizes,
    equivalence_p_values,
    p_values,
    relative_gain,
)

COLUMNS = [
    "name", "reference", "kind", "measure", "mean", "reference mean", "difference", "low", "high", "gain", "gain low",
    "gain high", "+", "-", "p-value", "reject", "p-value corrected", "effect size", "equivalence p-value", "equivalent",
]  # fmt: skip


@dataclass(frozen=True)
class Statistics:
    """How systems are compared.

    Attributes:
        baselines: every other system is compared to each of them.
        partner: for a system, the one that its gain is relative to, e.g. its own FirstP.
        test: see `significance.p_values`. The papers use the paired t-test.
        correction: over the systems that are compared to one baseline (or to their partners) on one measure; None for
            none. See `significance.correct`.
        alpha: a difference with a p-value below is significant; with a correction, the family's error rate.
        margin: share of the reference's mean within which a system is equivalent; 0.05 is "within 5 %".
        confidence: level of the bootstrap intervals.
        resamples: of randomisation and bootstrap.
        seed: of their random numbers.
    """

    baselines: tuple[str, ...] = ()
    partner: Mapping[str, str] = field(default_factory=dict)
    test: Test = "t"
    correction: str | None = None
    alpha: float = 0.05
    margin: float = 0.05
    confidence: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 42

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError for a baseline or partner that is no system, and for values that can never work."""
        for name in (*self.baselines, *self.partner, *self.partner.values()):
            if name not in names:
                raise ValueError(f"{name!r} is a baseline or partner, but no system; systems are {', '.join(names)}")
        own = sorted(name for name, partner in self.partner.items() if name == partner)
        if own:
            raise ValueError(f"{', '.join(own)} cannot be its own partner; leave it out of partner=")
        if len(set(self.baselines)) < len(self.baselines):
            raise ValueError(f"baselines={list(self.baselines)} names one twice")
        if self.correction is not None and not (self.baselines or self.partner):
            raise ValueError(f"correction={self.correction!r} needs baselines= or partner= to compare with")
        for name in ("alpha", "margin", "confidence"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if not (callable(self.test) or self.test in TESTS):
            raise ValueError(f"test={self.test!r} is unknown; choose one of {', '.join(TESTS)}, or give a function")
        if self.correction is not None:
            correct(np.array([0.5]), self.correction, self.alpha)

    def references(self, names: Sequence[str]) -> list[tuple[str, str | None, dict[str, str]]]:
        """What is compared: `(kind, baseline, {system: what it is compared to})`; partners first, then baselines."""
        kinds: list[tuple[str, str | None, dict[str, str]]] = []
        if self.partner:
            kinds.append(("partner", None, {name: self.partner[name] for name in names if name in self.partner}))
        for baseline in self.baselines:
            kinds.append(("baseline", baseline, {name: baseline for name in names if name != baseline}))
        return kinds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a test that is a function is kept by its name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        named = self.test if isinstance(self.test, str) else getattr(self.test, "__name__", repr(self.test))
        return {**values, "baselines": list(self.baselines), "partner": dict(self.partner), "test": named}


def compare(
    values: Mapping[str, np.ndarray],
    measures: Sequence[str],
    statistics: Statistics,
    aggregate: Callable[[np.ndarray], np.ndarray],
) -> pd.DataFrame:
    """Compares systems as `statistics` says.

    Args:
        values: for each system `(Q, M)` per-query values.
        measures: the M measures' names.
        statistics: what is compared, and how.
        aggregate: `(Q, M)` per-query values to the system's `(M,)`.

    Returns:
        One row for each system, reference and measure, with the columns `COLUMNS`: `kind` is `"partner"` or
        `"baseline"`, `low` and `high` bound the mean difference, `+` and `-` count queries that are better and worse,
        `gain` is relative (0.05 is +5 %).
    """
    frames = [
        _against(values, measures, statistics, aggregate, kind, pairs)
        for kind, _, pairs in statistics.references(list(values))
        if pairs
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS)


def _against(
    values: Mapping[str, np.ndarray],
    measures: Sequence[str],
    statistics: Statistics,
    aggregate: Callable[[np.ndarray], np.ndarray],
    kind: str,
    pairs: Mapping[str, str],
) -> pd.DataFrame:
    s, (K, M) = statistics, (len(pairs), len(measures))
    x = np.concatenate([values[name] for name in pairs], axis=1)  # (Q, K * M)
    y = np.concatenate([values[reference] for reference in pairs.values()], axis=1)
    p = p_values(x, y, s.test, resamples=s.resamples, seed=s.seed)
    intervals = bootstrap_intervals(x, y, level=s.confidence, resamples=s.resamples, seed=s.seed)
    equivalence = equivalence_p_values(x, y, s.margin)
    means = np.concatenate([aggregate(values[name]) for name in pairs])
    reference_means = np.concatenate([aggregate(values[reference]) for reference in pairs.values()])
    frame = pd.DataFrame(
        {
            "name": np.repeat(list(pairs), M),
            "reference": np.repeat(list(pairs.values()), M),
            "kind": kind,
            "measure": list(measures) * K,
            "mean": means,
            "reference mean": reference_means,
            "difference": means - reference_means,
            "low": intervals.low,
            "high": intervals.high,
            "gain": relative_gain(means, reference_means),
            "gain low": intervals.gain_low,
            "gain high": intervals.gain_high,
            "+": (x > y).sum(0),
            "-": (x < y).sum(0),
            "p-value": p,
            "reject": p < s.alpha,
            "p-value corrected": p,
            "effect size": effect_sizes(x, y),
            "equivalence p-value": equivalence,
            "equivalent": equivalence < s.alpha,
        }
    )
    if s.correction is not None:
        families = [correct(p[m::M], s.correction, s.alpha) for m in range(M)]
        frame["reject"] = np.stack([rejected for rejected, _ in families], axis=1).ravel()
        frame["p-value corrected"] = np.stack([corrected for _, corrected in families], axis=1).ravel()
    return frame[COLUMNS]
