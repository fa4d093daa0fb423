"""Paired comparisons of systems over queries: tests, corrections, equivalence, effect size and intervals.

Shapes: Q queries, K comparisons; `x` and `y` are `(Q, K)` per-query values of systems and of their references. All K
comparisons share the resamples, so that many cost little more than one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.arguments import argument, check_arguments, validate
from .runs import aggregate

TESTS = ("t", "wilcoxon", "randomisation", "bootstrap")
RESAMPLES = 10_000
"""Of the randomisation test and the bootstraps: p-values near 0.05 then have a standard error of 0.002."""

BLOCK_NUMBERS = 1_000_000
"""Most random numbers held at a time."""

COMPARISON_COLUMNS = [
    "name", "reference", "kind", "measure", "mean", "reference mean", "difference", "low", "high", "gain", "gain low",
    "gain high", "+", "-", "p-value", "reject", "p-value corrected", "effect size", "equivalence p-value", "equivalent",
]  # fmt: skip

Test = str | Callable[[np.ndarray, np.ndarray], Any]
Baseline = str | int | Sequence[str | int] | None
"""A system's name or position, or several of them."""


@dataclass(frozen=True)
class Statistics:
    """How systems are compared: arguments of `Experiment`, explained there, and two more.

    Attributes:
        baseline: the names of all baselines.
        confidence: level of the bootstrap intervals.
        seed: of the random numbers of randomisation and bootstrap.
    """

    baseline: tuple[str, ...] = ()
    partner: Mapping[str, str] = field(default_factory=dict)
    test: Test = "t"
    correction: str | None = None
    alpha: float = argument(0.05, above=0, below=1)
    margin: float = argument(0.05, above=0, below=1)
    confidence: float = argument(0.95, above=0, below=1)
    resamples: int = argument(RESAMPLES, at_least=1)
    seed: int = 42

    def __post_init__(self) -> None:
        validate(self, "Experiment")
        if not callable(self.test):
            check_arguments("str", choices=TESTS, test=self.test)
        if self.correction is None:
            return
        from statsmodels.stats.multitest import multitest_alias

        check_arguments("str", "Experiment", choices=multitest_alias, correction=self.correction)
        if not (self.baseline or self.partner):
            raise ValueError(f"correction={self.correction!r} has no effect without baseline= or partner=")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError for a baseline or partner that is no system."""
        for name in (*self.baseline, *self.partner, *self.partner.values()):
            if name not in names:
                raise ValueError(f"{name!r} is a baseline or partner, but no system; systems are {', '.join(names)}")

    def references(self, names: Sequence[str]) -> list[tuple[str, str | None, dict[str, str]]]:
        """Return the comparisons, partners first: `(kind, baseline, {system: its reference})`."""
        partners = {name: self.partner[name] for name in names if name in self.partner}
        baselines = [("baseline", base, {name: base for name in names if name != base}) for base in self.baseline]
        return [("partner", None, partners), *baselines] if self.partner else [*baselines]

    def interval(self, samples: np.ndarray) -> np.ndarray:
        """Return the ends, `(2, M)`, of the percentile intervals of `(resamples, M)` samples."""
        return np.quantile(samples, [(1 - self.confidence) / 2, (1 + self.confidence) / 2], axis=0)

    @property
    def test_name(self) -> str:
        """The name of the test, or of the function that is one."""
        return self.test if isinstance(self.test, str) else getattr(self.test, "__name__", repr(self.test))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; a function as test is stored by its name."""
        return {**asdict(self), "test": self.test_name}


def baseline_names(baseline: Baseline, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the baselines in the argument of `Experiment`."""
    items = [] if baseline is None else [baseline] if isinstance(baseline, str | int) else baseline
    by_position = dict(enumerate(names))
    return tuple(dict.fromkeys(by_position.get(item, str(item)) if isinstance(item, int) else item for item in items))


def compare(values: Mapping[str, np.ndarray], measures: Sequence[str], statistics: Statistics) -> pd.DataFrame:
    """Return a row for each system, reference and measure, with the columns `COMPARISON_COLUMNS`, of `(Q, M)` values.

    `kind` is `"partner"` or `"baseline"`, `low` and `high` bound the difference of the means (of counts: of the sums),
    `+` and `-` count queries that are better and worse, `gain` is relative (0.05 is +5 %).
    """
    references = statistics.references(list(values))
    frames = [_against(values, measures, statistics, kind, pairs) for kind, _, pairs in references if pairs]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COMPARISON_COLUMNS)


def _against(
    values: Mapping[str, np.ndarray], measures: Sequence[str], s: Statistics, kind: str, pairs: Mapping[str, str]
) -> pd.DataFrame:
    M = len(measures)
    y = np.concatenate([values[reference] for reference in pairs.values()], axis=1)  # (Q, K), K = pairs * M
    x = without_rounding(np.concatenate([values[name] for name in pairs], axis=1), y)
    names = list(measures) * len(pairs)
    means, reference_means = aggregate(x, names), aggregate(y, names)
    scale = aggregate(np.ones_like(x), names)  # Q for counts, 1 for means
    x_means, y_means = (resampled_means(values, resamples=s.resamples, seed=s.seed) for values in (x, y))
    low, high = s.interval(x_means - y_means)
    gain_low, gain_high = s.interval(relative_gain(x_means, y_means))
    equivalence = equivalence_p_values(x, y, s.margin)
    p = p_values(x, y, s.test, resamples=s.resamples, seed=s.seed)
    reject, corrected = p < s.alpha, p.copy()
    if s.correction is not None:
        for m in range(M):  # a family: all systems on one measure
            reject[m::M], corrected[m::M] = correct(p[m::M], s.correction, s.alpha)
    return pd.DataFrame(
        {
            "name": np.repeat(list(pairs), M),
            "reference": np.repeat(list(pairs.values()), M),
            "kind": kind,
            "measure": names,
            "mean": means,
            "reference mean": reference_means,
            "difference": means - reference_means,
            "low": low * scale,
            "high": high * scale,
            "gain": relative_gain(means, reference_means),
            "gain low": gain_low,
            "gain high": gain_high,
            "+": (x > y).sum(0),
            "-": (x < y).sum(0),
            "p-value": p,
            "reject": reject,
            "p-value corrected": corrected,
            "effect size": effect_sizes(x, y),
            "equivalence p-value": equivalence,
            "equivalent": equivalence < s.alpha,
        },
        columns=COMPARISON_COLUMNS,
    )


def mean_over_seeds(values: np.ndarray) -> np.ndarray:
    """Return the means of `(S, ...)` values over S seeds; the mean of equal values is exactly their value.

    `(0.1 + 0.1 + 0.1) / 3` is not 0.1: ties with another system would become wins and losses, which weigh much in the
    Wilcoxon test.
    """
    ordered = np.sort(values, axis=0)
    return ordered[0] + (ordered - ordered[0]).mean(0)


def without_rounding(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return `x`, with the columns that equal `y` up to rounding set to `y`: tests find 1e-17 highly significant.

    If only some queries of a column differ so little, they stay, as in `pt.Experiment`.
    """
    return np.where(np.isclose(x, y, rtol=1e-12, atol=0.0).all(0), y, x)


def p_values(
    x: np.ndarray, y: np.ndarray, test: Test = "t", *, resamples: int = RESAMPLES, seed: int = 42
) -> np.ndarray:
    """Return the two-sided p-values of the paired differences `x - y`.

    - `"t"`, `"wilcoxon"`: `scipy.stats.ttest_rel` and `wilcoxon` with their defaults, as in `pt.Experiment`.
    - `"randomisation"`: Fisher's: signs of the differences are flipped at random, or in all `2^Q` ways if `resamples`
      allows so many; the statistic is the mean difference. Smucker et al. 2007.
    - `"bootstrap"`: studentised, of the centred differences. Sakai 2006.
    - a callable: like `scipy.stats.ttest_rel`; its second value is the p-value.

    Where all differences are 0 the p-value is 1, whatever the test; scipy and `pt.Experiment` give NaN. A test
    that is undefined for other reasons, as the t-test of a single query, gives NaN.
    """
    if test == "randomisation":
        return _randomisation(x - y, resamples, seed)
    if test == "bootstrap":
        return _bootstrap(x - y, resamples, seed)
    function = test if callable(test) else {"t": stats.ttest_rel, "wilcoxon": stats.wilcoxon}[test]
    with without_warnings():
        columns = zip(np.ascontiguousarray(x.T), np.ascontiguousarray(y.T), strict=True)
        p = [1.0 if np.array_equal(a, b) else float(function(a, b)[1]) for a, b in columns]
    return np.array(p)


def p_in_words(p: float) -> str:
    """Return a p-value as one writes it: "p = 0.013", "p < 0.001", or "p undefined"."""
    return "p undefined" if np.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def correct(p: np.ndarray, method: str, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return rejections and corrected p-values, `(K,)` each, of a family with the error rate `alpha`, by statsmodels.

    NaN stays NaN and is never rejected; in the correction of the others it counts as a p-value of 1.
    """
    from statsmodels.stats.multitest import multipletests

    missing = np.isnan(p)
    with without_warnings():
        rejected, corrected, _, _ = multipletests(np.where(missing, 1.0, p), alpha=alpha, method=method)
    return rejected & ~missing, np.where(missing, np.nan, corrected)


def equivalence_p_values(x: np.ndarray, y: np.ndarray, margin: float) -> np.ndarray:
    """Test `|mean(x - y)| < margin * mean(y)` by two one-sided paired t-tests (TOST) of statsmodels; Schuirmann 1987.

    The test takes the bounds as known, though they come from the mean of `y`: with few queries it is optimistic. The
    larger p-value of the two tests is returned: small values show equivalence. It is 0 if all differences are 0, and
    NaN for a single query.
    """
    from statsmodels.stats.weightstats import ttost_paired

    bound = margin * y.mean(0)
    with without_warnings():
        p = ttost_paired(x, y, -bound, bound)[0]
    # Otherwise equal systems with the mean 0 would have bounds of width 0.
    return np.where((x == y).all(0) & (len(x) > 1), 0.0, p)


def effect_sizes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the `(K,)` standardised mean differences, Cohen's d_z: mean / standard deviation of the differences.

    NaN where all differences are equal.
    """
    difference = x - y
    with without_warnings():
        spread = difference.std(0, ddof=1)
        return np.where(spread > 0, difference.mean(0) / spread, np.nan)


def resampled_means(x: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 42) -> np.ndarray:
    """Return the `(resamples, K)` means of resampled queries; equal seeds draw the same queries for equal Q.

    Their quantiles bound percentile intervals (Efron & Tibshirani 1993, chapter 13). `scipy.stats.bootstrap` takes 8 to
    19 times as long: it copies the values of all comparisons for each resample.
    """
    return np.concatenate([counts @ x for counts in _resampled_counts(len(x), resamples, seed)]) / len(x)


def relative_gain(mean: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return `mean / reference - 1`; NaN where the reference is 0."""
    with without_warnings():
        return np.where(reference != 0, mean / reference - 1.0, np.nan)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Mute warnings of equal systems and single queries, as the checks report them."""
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _randomisation(difference: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    queries = len(difference)
    if queries == 1:  # scipy wants two
        return np.ones(difference.shape[1])

    def statistic(signs: np.ndarray, axis: int) -> np.ndarray:
        # Sums of the same terms in another order are the same outcome but for the last bits.
        return np.abs(signs @ difference).round(12)

    # scipy flips the signs of ones, so that each draw serves all comparisons.
    test = {"permutation_type": "samples", "alternative": "greater", "vectorized": True, "n_resamples": resamples}
    batch, rng = max(1, BLOCK_NUMBERS // queries), np.random.default_rng(seed)
    return stats.permutation_test((np.ones(queries),), statistic, batch=batch, rng=rng, **test).pvalue


def _bootstrap(difference: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    queries = len(difference)
    observed = np.abs(_t_statistics(difference.mean(0), (difference**2).mean(0), queries))
    centred = difference - difference.mean(0)
    exceedances = np.zeros(difference.shape[1])
    for counts in _resampled_counts(queries, resamples, seed):
        t = _t_statistics(counts @ centred / queries, counts @ centred**2 / queries, queries)
        exceedances += (np.abs(t) >= observed).sum(0)
    return np.where(np.isnan(observed), 1.0, (exceedances + 1) / (resamples + 1))


def _t_statistics(mean: np.ndarray, mean_square: np.ndarray, queries: int) -> np.ndarray:
    with without_warnings():
        variance = np.maximum(mean_square - mean**2, 0.0) / np.float64(queries - 1)
        return mean / np.sqrt(variance)


def _resampled_counts(queries: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield `(rows, Q)` blocks: how often each query is in a resample of Q queries, with replacement."""
    generator, size = np.random.default_rng(seed), max(1, BLOCK_NUMBERS // queries)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        indices = generator.integers(0, queries, (rows, queries)) + queries * np.arange(rows)[:, None]
        yield np.bincount(indices.ravel(), minlength=rows * queries).reshape(rows, queries).astype("float64")
