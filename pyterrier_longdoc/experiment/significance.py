"""Paired comparisons of systems over queries: tests, corrections, equivalence, effect size and intervals.

Shapes: Q queries, K comparisons; `x` and `y` are `(Q, K)` per-query values of systems and of what they are compared to.
Resampling is shared by all K comparisons, so that many cost little more than one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

TESTS = ("t", "wilcoxon", "randomisation", "bootstrap")
CORRECTIONS = ("bonferroni", "holm", "holm-sidak", "fdr_bh", "fdr_by", "sidak")
"""Those in use in the field; any other name of `statsmodels.stats.multitest.multipletests` works too."""

RESAMPLES = 10_000
"""Of the randomisation test and the bootstraps: p-values near 0.05 then have a standard error of 0.002."""

BLOCK_NUMBERS = 4_000_000
"""Most random numbers held at a time."""

Test = str | Callable[[np.ndarray, np.ndarray], Any]


def p_values(
    x: np.ndarray, y: np.ndarray, test: Test = "t", *, resamples: int = RESAMPLES, seed: int = 42
) -> np.ndarray:
    """Two-sided p-values of the paired differences `x - y`.

    - `"t"`, `"wilcoxon"`: `scipy.stats.ttest_rel` and `wilcoxon` with their defaults, as in `pt.Experiment`.
    - `"randomisation"`: Fisher's: signs of the differences are flipped at random (all `2^Q` ways if these are not
      more than `resamples`); statistic: the mean difference. Smucker et al. 2007.
    - `"bootstrap"`: studentised, of the centred differences. Sakai 2006.
    - a callable: like `scipy.stats.ttest_rel`; the second value that it returns is the p-value.

    Args:
        x: `(Q, K)`.
        y: `(Q, K)`.
        test: one of the above.
        resamples: of the last two named tests.
        seed: of their random numbers.

    Returns:
        `(K,)`. For equal systems scipy's tests have no value (NaN); resampling gives 1.

    Raises:
        ValueError: for an unknown test.
    """
    if test == "randomisation":
        return _randomisation(x - y, resamples, seed)
    if test == "bootstrap":
        return _bootstrap(x - y, resamples, seed)
    named: dict[Any, Callable[[np.ndarray, np.ndarray], Any]] = {"t": stats.ttest_rel, "wilcoxon": stats.wilcoxon}
    function = test if callable(test) else named.get(test)
    if function is None:
        raise ValueError(f"test={test!r} is unknown; choose one of {', '.join(TESTS)}, or give a function")
    with _quiet():
        columns = zip(np.ascontiguousarray(x.T), np.ascontiguousarray(y.T), strict=True)
        return np.array([float(function(of_x, of_y)[1]) for of_x, of_y in columns])


def correct(p: np.ndarray, method: str, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Corrects `(K,)` p-values of one family for their number, by statsmodels' `multipletests`.

    NaN counts as one of the comparisons and stays NaN, as in `pt.Experiment`.

    Args:
        p: p-values.
        method: one of `CORRECTIONS`, or another name that statsmodels knows.
        alpha: the family's error rate.

    Returns:
        `(K,)` rejections and `(K,)` corrected p-values.

    Raises:
        ValueError: for an unknown method.
    """
    from statsmodels.stats.multitest import multipletests

    if not len(p):
        return np.zeros(0, dtype=bool), np.zeros(0)
    try:
        rejected, corrected, _, _ = multipletests(p, alpha=alpha, method=method)
    except ValueError:
        raise ValueError(f"correction={method!r} is unknown; choose one of {', '.join(CORRECTIONS)}") from None
    return rejected, corrected


def equivalence_p_values(x: np.ndarray, y: np.ndarray, margin: float) -> np.ndarray:
    """Two one-sided paired t-tests (TOST) of `|mean(x - y)| < margin * mean(y)`; Schuirmann 1987.

    The bounds are taken as known, though they come from the mean of `y`; with few queries that is optimistic.

    Args:
        x: `(Q, K)`.
        y: `(Q, K)`, the reference.
        margin: share of the reference's mean, e.g. 0.05 for "within 5 %".

    Returns:
        `(K,)`: the larger p-value of the two tests. Small values show equivalence.
    """
    difference, bound = x - y, margin * y.mean(0)
    with _quiet():
        above = stats.ttest_1samp(difference + bound, 0.0, alternative="greater").pvalue
        below = stats.ttest_1samp(difference - bound, 0.0, alternative="less").pvalue
    return np.maximum(above, below)


def effect_sizes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`(K,)` standardised mean differences, Cohen's d_z: mean / standard deviation of the paired differences.

    NaN where all differences are equal.
    """
    difference = x - y
    with _quiet():
        spread = difference.std(0, ddof=1)
        return np.where(spread > 0, difference.mean(0) / spread, np.nan)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Bootstrap confidence intervals, `(K,)` each.

    Attributes:
        low: of the mean difference.
        high: of the mean difference.
        gain_low: of the relative gain, `mean(x) / mean(y) - 1`.
        gain_high: of the relative gain.
    """

    low: np.ndarray
    high: np.ndarray
    gain_low: np.ndarray
    gain_high: np.ndarray


def bootstrap_intervals(
    x: np.ndarray, y: np.ndarray, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 42
) -> Intervals:
    """Percentile intervals from resampled queries (Efron & Tibshirani 1993, chapter 13).

    Args:
        x: `(Q, K)`.
        y: `(Q, K)`.
        level: of confidence.
        resamples: of the queries.
        seed: of the random numbers.
    """
    of_x, of_y = (resampled_means(values, resamples=resamples, seed=seed) for values in (x, y))
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(of_x - of_y, ends, axis=0)
    gain_low, gain_high = np.quantile(relative_gain(of_x, of_y), ends, axis=0)
    return Intervals(low, high, gain_low, gain_high)


def resampled_means(x: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 42) -> np.ndarray:
    """`(resamples, K)` means of queries drawn with replacement; equal seeds draw the same queries for equal Q.

    Args:
        x: `(Q, K)`.
        resamples: of the queries.
        seed: of the random numbers.
    """
    return np.concatenate([counts @ x for counts in _resampled_counts(len(x), resamples, seed)]) / len(x)


def relative_gain(mean: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """`mean / reference - 1`; NaN where the reference is 0."""
    with _quiet():
        return np.where(reference != 0, mean / reference - 1.0, np.nan)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of equal systems or single queries: their statistics are NaN, and the checks name them."""
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _randomisation(difference: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    queries = len(difference)
    observed = np.abs(difference.sum(0))
    # Sums of equal terms in another order differ in their last bits and still are the same outcome.
    reached = observed * (1 - 1e-12) - 1e-15
    if queries < 63 and 2**queries <= resamples:
        bits = np.arange(2**queries)[:, None] >> np.arange(queries)
        return (np.abs((1.0 - 2.0 * (bits & 1)) @ difference) >= reached).mean(0)
    generator, as_extreme = np.random.default_rng(seed), np.zeros(difference.shape[1])
    for rows in _blocks(resamples, queries):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (rows, queries), dtype=np.int8)
        as_extreme += (np.abs(signs @ difference) >= reached).sum(0)
    return (as_extreme + 1) / (resamples + 1)


def _bootstrap(difference: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    queries = len(difference)
    observed = np.abs(_t_statistics(difference.mean(0), (difference**2).mean(0), queries))
    centred = difference - difference.mean(0)
    as_extreme = np.zeros(difference.shape[1])
    for counts in _resampled_counts(queries, resamples, seed):
        t = _t_statistics(counts @ centred / queries, counts @ centred**2 / queries, queries)
        as_extreme += (np.abs(t) >= observed).sum(0)
    return np.where(np.isnan(observed), 1.0, (as_extreme + 1) / (resamples + 1))


def _t_statistics(mean: np.ndarray, mean_square: np.ndarray, queries: int) -> np.ndarray:
    with _quiet():
        variance = np.maximum(mean_square - mean**2, 0.0) / np.float64(queries - 1)
        return mean / np.sqrt(variance)


def _resampled_counts(queries: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """`(rows, Q)` blocks: how often each query is in a resample of Q queries with replacement."""
    generator = np.random.default_rng(seed)
    for rows in _blocks(resamples, queries):
        drawn = generator.integers(0, queries, (rows, queries)) + queries * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * queries).reshape(rows, queries).astype("float64")


def _blocks(resamples: int, queries: int) -> Iterator[int]:
    size = max(1, BLOCK_NUMBERS // queries)
    for start in range(0, resamples, size):
        yield min(size, resamples - start)
