"""The statistics against textbooks, other libraries and hand."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multitest_alias

from pyterrier_longdoc.comparison import Comparison, Statistics
from pyterrier_longdoc.comparison.significance import (
    TESTS,
    correct,
    effect_sizes,
    equivalence_p_values,
    mean_over_seeds,
    p_values,
    relative_gain,
    resampled_means,
    without_rounding,
)

# Student's ten patients, 1908: additional hours of sleep by two drugs.
SLEEP_1 = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])[:, None]
SLEEP_2 = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])[:, None]

# Darwin's maize, in eighths of an inch: differences of 15 pairs; Fisher 1935 enumerates their 2^15 signs.
DARWIN = np.array([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48], dtype=float)[:, None]


@pytest.fixture
def pairs():
    """(Q, K) = (40, 6) values of systems and references, the differences small to large."""
    rng = np.random.default_rng(0)
    y = rng.uniform(size=(40, 6))
    return y + rng.normal(np.linspace(0, 0.1, 6), 0.15, size=(40, 6)), y


def test_the_t_test_gives_students_result_for_the_sleep_data():
    # t = -1.58 / sqrt(1.513 / 10) = -4.062 with 9 degrees of freedom, p = 0.0028; d_z = t / sqrt(10).
    assert p_values(SLEEP_1, SLEEP_2, "t")[0] == pytest.approx(0.00283, abs=5e-6)
    assert effect_sizes(SLEEP_1, SLEEP_2)[0] == pytest.approx(-4.0621 / math.sqrt(10), abs=1e-4)


def test_the_randomisation_test_gives_fishers_result_for_darwins_maize():
    # Fisher 1935, section 21: 1,726 of 2^15 = 32,768 sums are at least as large in size as the observed 314.
    zeros = np.zeros_like(DARWIN)
    assert p_values(DARWIN, zeros, "randomisation", resamples=2**15)[0] == 1726 / 2**15
    # In tenths, sums of equal terms differ in their last bits.
    assert p_values(DARWIN / 10, zeros, "randomisation", resamples=2**15)[0] == 1726 / 2**15
    sampled = p_values(DARWIN, zeros, "randomisation", resamples=10_000)[0]
    assert 0 < abs(sampled - 1726 / 2**15) < 4 * math.sqrt(0.05 / 10_000)
    assert p_values(DARWIN, zeros, "randomisation", resamples=10_000)[0] == sampled


def test_the_bootstrap_test_is_studentised(pairs):
    difference = pairs[0][:, 3] - pairs[1][:, 3]
    centred, rng = difference - difference.mean(), np.random.default_rng(1)
    samples = rng.choice(centred, (20_000, 40))
    t = samples.mean(1) / (samples.std(1, ddof=1) / math.sqrt(40))
    observed = difference.mean() / (difference.std(ddof=1) / math.sqrt(40))
    expected = (np.abs(t) >= abs(observed)).mean()
    assert p_values(*pairs, "bootstrap")[3] == pytest.approx(expected, abs=4 * math.sqrt(expected / 10_000))


@pytest.mark.parametrize("test", [*TESTS, stats.ttest_rel, stats.mannwhitneyu])
def test_no_difference_has_the_p_value_1(test):
    x = np.random.default_rng(0).uniform(size=(30, 1)) * [1, 0, 1]
    y = x - [0, 0, 0.5]
    p = p_values(x, y, test)
    assert p[:2].tolist() == [1.0, 1.0]
    assert p[2] < 0.001
    assert np.isnan(effect_sizes(x, y)[:2]).all()
    assert equivalence_p_values(x, y, 0.05).tolist()[:2] == [0.0, 0.0]


def test_values_that_differ_by_rounding_count_as_equal():
    values = {"one": np.full((1, 30, 1), 0.1), "thrice": np.full((3, 30, 1), 0.1)}
    values["thrice"] = np.nextafter(values["thrice"], 1)
    results = Comparison(values, list(map(str, range(30))), ["AP"], Statistics(baseline=("one",)))
    [row] = results.comparisons.to_dict("records")
    assert (row["p-value"], row["reject"], row["+"], row["-"], row["difference"]) == (1.0, False, 0, 0, 0.0)
    assert without_rounding(np.array([0.1 + 1e-9]), np.array([0.1])) == 0.1 + 1e-9


def test_the_mean_over_seeds_does_not_depend_on_their_order():
    values = np.random.default_rng(0).random((5, 1000)).round(1)
    mean = mean_over_seeds(values)
    assert mean.tolist() == mean_over_seeds(values[::-1]).tolist() == mean_over_seeds(values[[2, 0, 4, 1, 3]]).tolist()
    assert mean == pytest.approx(values.mean(0), rel=1e-14)
    assert mean_over_seeds(np.stack([values[0]] * 3)).tolist() == values[0].tolist()


def test_corrections_equal_values_computed_by_hand():
    p = np.array([0.01, 0.04, 0.03])
    assert correct(p, "bonferroni", 0.05)[1] == pytest.approx([3 * 0.01, 3 * 0.04, 3 * 0.03])
    assert correct(p, "holm", 0.05)[1] == pytest.approx([3 * 0.01, 2 * 0.03, 2 * 0.03])  # made monotone
    assert correct(p, "fdr_bh", 0.05)[1] == pytest.approx([3 / 1 * 0.01, 3 / 3 * 0.04, 3 / 3 * 0.04])
    assert correct(p, "holm", 0.05)[0].tolist() == [True, False, False]
    sidak = correct(np.array([0.01, np.nan, 0.04]), "sidak", 0.05)[1]
    assert sidak[[0, 2]] == pytest.approx([1 - 0.99**3, 1 - 0.96**3])


@pytest.mark.parametrize("method", multitest_alias)
def test_a_missing_p_value_counts_as_a_comparison_in_every_correction(method):
    with_nan, with_one = (correct(np.array([0.001, p, 0.04]), method, 0.05) for p in (np.nan, 1.0))
    assert with_nan[1][[0, 2]].tolist() == with_one[1][[0, 2]].tolist()
    assert np.isnan(with_nan[1][1])
    assert with_nan[0][:2].tolist() == [True, False]
    assert Statistics(baseline=("a",), correction=method).correction == method


def test_equivalence_equals_values_computed_by_hand():
    # Mean difference 0.01, standard deviation s of n = 100 differences, bounds +-0.05 * 0.5 = +-0.025.
    noise = np.random.default_rng(0).normal(size=100)
    noise = 0.05 * (noise - noise.mean()) / noise.std(ddof=1)
    y = np.full((100, 2), 0.5)
    x = y + 0.01 + noise[:, None] * [1, -1]
    upper = stats.t.cdf((0.01 - 0.025) / (0.05 / math.sqrt(100)), 99)  # t = -3, the larger of both p-values
    assert equivalence_p_values(x, y, 0.05) == pytest.approx([upper, upper], rel=1e-9)
    assert upper == pytest.approx(0.0017, abs=1e-4)


def test_bootstrap_intervals_equal_those_of_scipy(pairs):
    x, y = pairs
    x_means, y_means = (resampled_means(values, resamples=10_000, seed=3) for values in (x, y))
    low, high = Statistics().interval(x_means - y_means)
    theirs = stats.bootstrap(
        (x - y,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(5)
    ).confidence_interval
    # A 2.5 % quantile of 10,000 means has a standard error of about 2.7 % of the mean's own.
    tolerance = 5 * 0.027 * (x - y).std(0) / math.sqrt(40)
    assert (np.abs(low - theirs.low) < tolerance).all()
    assert (np.abs(high - theirs.high) < tolerance).all()
    gain, (gain_low, gain_high) = relative_gain(x.mean(0), y.mean(0)), Statistics().interval(x_means / y_means - 1)
    assert ((gain_low < gain) & (gain < gain_high)).all()
    # They do not depend on what else is compared.
    assert resampled_means(x[:, [2]], seed=3)[:, 0] == pytest.approx(x_means[:, 2], abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("test", ["t", "randomisation", "bootstrap"])
def test_a_single_query_has_no_statistics_and_no_warnings(test):
    x, y = np.array([[0.5, 0.5]]), np.array([[0.3, 0.5]])
    p = p_values(x, y, test)
    assert p[1] == 1.0
    assert np.isnan(p[0]) or p[0] == 1.0
    assert np.isnan(effect_sizes(x, y)).all()
    assert np.isnan(equivalence_p_values(x, y, 0.05)).all()
    assert Statistics().interval(resampled_means(x - y))[0] == pytest.approx([0.2, 0.0])
