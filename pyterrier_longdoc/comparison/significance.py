"""Paired comparisons of systems over queries: tests, corrections, equivalence, effect size and intervals.

Shapes: Q queries, K comparisons; `x` and `y` are `(Q, K)` per-query values of the systems and of their references. All
K comparisons share the resamples, so many comparisons cost little more than one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..common.arguments import argument, check_arguments, validate

TESTS = ("t", "wilcoxon", "randomisation", "bootstrap")
RESAMPLES = 10_000
"""Resamples of the randomisation test and the bootstraps, for a standard error of 0.002 at p-values near 0.05."""

BLOCK_NUMBERS = 1_000_000
"""Maximum number of random numbers in memory."""

COMPARISON_COLUMNS = [
    "name", "reference", "kind", "measure", "mean", "reference mean", "difference", "low", "high", "gain", "gain low",
    "gain high", "+", "-", "p-value", "reject", "p-value corrected", "effect size", "equivalence p-value", "equivalent",
]  # fmt: skip

COUNTS = ("num_", "NumRet", "NumRel", "NumQ")
"""How the names of counts begin, which are summed over queries instead of averaged."""

Test = str | Callable[[np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Statistics:
    """How systems are compared: the arguments of `compare`, and two more.

    Attributes:
        baseline: the names of all baselines.
        partner: the partner of each system that has one.
        test: the test of paired differences.
        correction: the correction for several comparisons; None for none.
        alpha: the significance level.
        margin: the share of the reference's mean within which a system is equivalent to it.
        confidence: the confidence level of the bootstrap intervals.
        resamples: the number of resamples of the randomisation test and of the bootstraps.
        seed: the random seed of the randomisation test and of the bootstraps.
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
        validate(self, "compare")
        if not callable(self.test):
            check_arguments("str", choices=TESTS, test=self.test)
        if self.correction is None:
            return
        from statsmodels.stats.multitest import multitest_alias

        check_arguments("str", "compare", choices=multitest_alias, correction=self.correction)
        if not (self.baseline or self.partner):
            raise ValueError(f"correction={self.correction!r} has no effect without baseline= or partner=")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if a baseline or partner is not one of the systems."""
        for name in (*self.baseline, *self.partner, *self.partner.values()):
            if name not in names:
                raise ValueError(f"baseline or partner {name!r} must be one of the systems {', '.join(names)}")

    def references(self, names: Sequence[str]) -> list[tuple[str, str | None, dict[str, str]]]:
        """Return the comparisons, partners first, as `(kind, baseline, {system: reference})`."""
        partners = {name: self.partner[name] for name in names if name in self.partner}
        baselines = [("baseline", base, {name: base for name in names if name != base}) for base in self.baseline]
        return [("partner", None, partners), *baselines] if self.partner else [*baselines]

    def interval(self, samples: np.ndarray) -> np.ndarray:
        """Return the bounds, `(2, M)`, of the percentile intervals of `(resamples, M)` samples."""
        return np.quantile(samples, [(1 - self.confidence) / 2, (1 + self.confidence) / 2], axis=0)

    @property
    def test_name(self) -> str:
        """The name of the test or of its function."""
        return self.test if isinstance(self.test, str) else getattr(self.test, "__name__", repr(self.test))


def aggregate(values: np.ndarray, measures: Iterable[str]) -> np.ndarray:
    """Aggregate `(..., Q, M)` per-query values to `(..., M)` means, or sums for counts."""
    is_sum = np.array([measure.startswith(COUNTS) for measure in measures])
    return np.where(is_sum, values.sum(axis=-2), values.mean(axis=-2))


def comparisons(values: Mapping[str, np.ndarray], measures: Sequence[str], statistics: Statistics) -> pd.DataFrame:
    """Compare systems by their `(Q, M)` values; return a row for each system, reference and measure.

    The columns are `COMPARISON_COLUMNS`. `kind` is `"partner"` or `"baseline"`; `low` and `high` bound the difference
    of the means (for counts: of the sums); `+` and `-` are the numbers of better and worse queries; `gain` is relative
    (0.05 is +5 %).
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
        for m in range(M):  # one family of tests: all systems on one measure
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
    """Return the means of `(S, ...)` values over S seeds; the mean of equal values is exactly this value.

    In floating-point numbers, `(0.1 + 0.1 + 0.1) / 3` is not 0.1. Such differences would turn ties into wins and
    losses, with a large effect on the Wilcoxon test.
    """
    ordered = np.sort(values, axis=0)
    return ordered[0] + (ordered - ordered[0]).mean(0)


def without_rounding(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return `x`, with the columns that equal `y` up to rounding set to `y`: tests would find 1e-17 significant.

    If only some queries of a column differ by rounding, the column stays as it is, as in `pt.Experiment`.
    """
    return np.where(np.isclose(x, y, rtol=1e-12, atol=0.0).all(0), y, x)


def p_values(
    x: np.ndarray, y: np.ndarray, test: Test = "t", *, resamples: int = RESAMPLES, seed: int = 42
) -> np.ndarray:
    """Return the two-sided p-values of the paired differences `x - y`.

    - `"t"`, `"wilcoxon"`: `scipy.stats.ttest_rel` and `wilcoxon` with their defaults, as in `pt.Experiment`.
    - `"randomisation"`: Fisher's randomisation test of the mean difference. The signs of the differences are flipped at
      random, or in all `2^Q` ways if `resamples` is large enough. Smucker et al. 2007.
    - `"bootstrap"`: studentised, of the centred differences. Sakai 2006.
    - a callable like `scipy.stats.ttest_rel`, whose second return value is the p-value.

    If all differences are 0, the p-value is 1 for every test, where scipy and `pt.Experiment` return NaN. A test that
    is undefined for other reasons, such as the t-test of a single query, returns NaN.
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
    """Format a p-value: "p = 0.013", "p < 0.001" or "p undefined"."""
    return "p undefined" if np.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def correct(p: np.ndarray, method: str, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Correct the p-values of a family by statsmodels; return rejections and corrected p-values, `(K,)` each.

    NaN stays NaN and is never rejected; in the correction of the others it counts as a p-value of 1.
    """
    from statsmodels.stats.multitest import multipletests

    missing = np.isnan(p)
    with without_warnings():
        rejected, corrected, _, _ = multipletests(np.where(missing, 1.0, p), alpha=alpha, method=method)
    return rejected & ~missing, np.where(missing, np.nan, corrected)


def equivalence_p_values(x: np.ndarray, y: np.ndarray, margin: float) -> np.ndarray:
    """Test `|mean(x - y)| < margin * mean(y)` by two one-sided paired t-tests (TOST) of statsmodels; Schuirmann 1987.

    Returns the larger p-value of the two tests: small values indicate equivalence. It is 0 if all differences are 0,
    and NaN for a single query. The test treats the bounds as known although they are estimated from `y`, so it is
    optimistic with few queries.
    """
    from statsmodels.stats.weightstats import ttost_paired

    bound = margin * y.mean(0)
    with without_warnings():
        p = ttost_paired(x, y, -bound, bound)[0]
    # Equal systems with a mean of 0 would have bounds of width 0.
    return np.where((x == y).all(0) & (len(x) > 1), 0.0, p)


def effect_sizes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Cohen's d_z, `(K,)`: the mean divided by the standard deviation of the differences.

    It is NaN if all differences are equal.
    """
    difference = x - y
    with without_warnings():
        spread = difference.std(0, ddof=1)
        return np.where(spread > 0, difference.mean(0) / spread, np.nan)


def resampled_means(x: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 42) -> np.ndarray:
    """Return the `(resamples, K)` means of resampled queries; with equal seed and Q, the same queries are drawn.

    Their quantiles are the bounds of percentile intervals (Efron & Tibshirani 1993, chapter 13).
    `scipy.stats.bootstrap` takes 8 to 19 times as long, because it copies the values of all comparisons for each
    resample.
    """
    return np.concatenate([counts @ x for counts in _resampled_counts(len(x), resamples, seed)]) / len(x)


def relative_gain(mean: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return `mean / reference - 1`, or NaN if the reference is not above 0, as means of scores can be."""
    with without_warnings():
        return np.where(reference > 0, mean / reference - 1.0, np.nan)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Mute numerical warnings about equal systems and single queries, of which `compare` warns."""
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _randomisation(difference: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    queries = len(difference)
    if queries == 1:  # scipy needs at least two
        return np.ones(difference.shape[1])

    def statistic(signs: np.ndarray, axis: int) -> np.ndarray:
        # Rounded, because sums of the same terms in another order can differ in the last bits.
        return np.abs(signs @ difference).round(12)

    # scipy flips the signs of a vector of ones, so that all comparisons share each draw.
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
    """Yield `(rows, Q)` blocks with the count of each query in a resample of Q queries with replacement."""
    generator, size = np.random.default_rng(seed), max(1, BLOCK_NUMBERS // queries)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        indices = generator.integers(0, queries, (rows, queries)) + queries * np.arange(rows)[:, None]
        yield np.bincount(indices.ravel(), minlength=rows * queries).reshape(rows, queries).astype("float64")
