"""The statistics against scipy, statsmodels, textbooks and simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from pyterrier_longdoc.experiment.significance import (
    bootstrap_intervals,
    correct,
    effect_sizes,
    equivalence_p_values,
    p_values,
    relative_gain,
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


def each(function, x, y):
    return np.array([function(x[:, k], y[:, k]) for k in range(x.shape[1])])


def test_t_and_wilcoxon_are_scipys(pairs):
    assert np.array_equal(p_values(*pairs, "t"), each(lambda x, y: stats.ttest_rel(x, y).pvalue, *pairs))
    assert np.array_equal(p_values(*pairs, "wilcoxon"), each(lambda x, y: stats.wilcoxon(x, y).pvalue, *pairs))
    assert np.array_equal(p_values(*pairs, lambda x, y: (0.0, x[0])), pairs[0][0])


def test_students_sleep():
    # t = -1.58 / sqrt(1.513 / 10) = -4.062 with 9 degrees of freedom, p = 0.0028; d_z = t / sqrt(10).
    assert p_values(SLEEP_1, SLEEP_2, "t")[0] == pytest.approx(0.00283, abs=5e-6)
    assert effect_sizes(SLEEP_1, SLEEP_2)[0] == pytest.approx(-4.0621 / math.sqrt(10), abs=1e-4)


def test_randomisation_of_darwins_maize_is_fishers():
    # Fisher 1935, section 21: 1,726 of 2^15 = 32,768 sums are at least as large in size as the observed 314.
    p = p_values(DARWIN, np.zeros_like(DARWIN), "randomisation", resamples=2**15)
    assert p[0] == 1726 / 2**15


def test_randomisation_is_scipys(pairs):
    x, y = pairs[0][:10], pairs[1][:10]

    def permutation(x, y):
        mean = stats.permutation_test((x - y,), np.mean, permutation_type="samples", n_resamples=np.inf)
        return mean.pvalue

    assert p_values(x, y, "randomisation") == pytest.approx(each(permutation, x, y), abs=1e-12)
    sampled = p_values(x, y, "randomisation", resamples=1000)
    exact = p_values(x, y, "randomisation", resamples=1024)
    assert not np.array_equal(sampled, exact)
    # Standard error of a share of 1,000: sqrt(0.25 / 1000) = 0.016 at most.
    assert np.abs(sampled - exact).max() < 4 * math.sqrt(0.25 / 1000)


def test_bootstrap_test_agrees_with_the_t_test_on_normal_differences(pairs):
    # Both are tests of the mean; with 40 normal differences they differ little.
    assert np.abs(p_values(*pairs, "bootstrap") - p_values(*pairs, "t")).max() < 0.03


def test_bootstrap_test_is_the_studentised_one(pairs):
    difference = pairs[0][:, 3] - pairs[1][:, 3]
    centred, rng = difference - difference.mean(), np.random.default_rng(1)
    samples = rng.choice(centred, (20_000, 40))
    t = samples.mean(1) / (samples.std(1, ddof=1) / math.sqrt(40))
    observed = difference.mean() / (difference.std(ddof=1) / math.sqrt(40))
    expected = (np.abs(t) >= abs(observed)).mean()
    assert p_values(*pairs, "bootstrap")[3] == pytest.approx(expected, abs=4 * math.sqrt(expected / 10_000))


def test_equal_systems():
    x = np.random.default_rng(0).uniform(size=(30, 1))
    assert np.isnan(p_values(x, x, "t")[0])
    assert [p_values(x, x, test)[0] for test in ("randomisation", "bootstrap")] == [1.0, 1.0]
    assert np.isnan(effect_sizes(x, x)[0])
    assert equivalence_p_values(x, x, 0.05)[0] == 0.0


@pytest.mark.parametrize("method", ["bonferroni", "holm", "fdr_bh"])
def test_corrections_are_statsmodels(pairs, method):
    p = p_values(*pairs, "t")
    rejected, corrected = correct(p, method, 0.05)
    expected = multipletests(p, alpha=0.05, method=method)
    assert np.array_equal(rejected, expected[0])
    assert np.array_equal(corrected, expected[1])


def test_corrections_by_hand():
    p = np.array([0.01, 0.04, 0.03])
    assert correct(p, "bonferroni", 0.05)[1] == pytest.approx([3 * 0.01, 3 * 0.04, 3 * 0.03])
    assert correct(p, "holm", 0.05)[1] == pytest.approx([3 * 0.01, 2 * 0.03, 2 * 0.03])  # made monotone
    assert correct(p, "fdr_bh", 0.05)[1] == pytest.approx([3 / 1 * 0.01, 3 / 3 * 0.04, 3 / 3 * 0.04])
    with_nan = correct(np.array([0.01, np.nan, 0.04]), "holm", 0.05)[1]
    assert with_nan[[0, 2]] == pytest.approx([3 * 0.01, 2 * 0.04])
    with pytest.raises(ValueError, match="correction='tukey' is unknown"):
        correct(p, "tukey", 0.05)


def test_equivalence_is_statsmodels(pairs):
    x, y = pairs
    for margin in (0.05, 0.1, 0.3):
        expected = [
            ttost_paired(x[:, k], y[:, k], -margin * y[:, k].mean(), margin * y[:, k].mean())[0]
            for k in range(x.shape[1])
        ]
        assert equivalence_p_values(x, y, margin) == pytest.approx(expected, rel=1e-9)


def test_equivalence_by_hand():
    # Mean difference 0.01, standard deviation s of n = 100 differences, bounds +-0.05 * 0.5 = +-0.025.
    rng = np.random.default_rng(0)
    noise = rng.normal(size=100)
    noise = 0.05 * (noise - noise.mean()) / noise.std(ddof=1)
    y = np.full((100, 1), 0.5)
    x = y + 0.01 + noise[:, None]
    upper = stats.t.cdf((0.01 - 0.025) / (0.05 / math.sqrt(100)), 99)  # t = -3, the larger of both p-values
    assert equivalence_p_values(x, y, 0.05)[0] == pytest.approx(upper, rel=1e-9)
    assert upper == pytest.approx(0.0017, abs=1e-4)


def test_bootstrap_intervals_are_scipys(pairs):
    x, y = pairs
    ours = bootstrap_intervals(x, y, resamples=10_000, seed=3)
    for k in range(x.shape[1]):
        theirs = stats.bootstrap(
            (x[:, k] - y[:, k],), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(5)
        ).confidence_interval
        # A 2.5 % quantile of 10,000 means has a standard error of about 2.7 % of the mean's own.
        tolerance = 5 * 0.027 * (x[:, k] - y[:, k]).std() / math.sqrt(40)
        assert ours.low[k] == pytest.approx(theirs.low, abs=tolerance)
        assert ours.high[k] == pytest.approx(theirs.high, abs=tolerance)
    assert (ours.gain_low < relative_gain(x.mean(0), y.mean(0))).all()
    assert (ours.gain_high > relative_gain(x.mean(0), y.mean(0))).all()


def test_intervals_do_not_depend_on_what_else_is_compared(pairs):
    x, y = pairs
    alone = bootstrap_intervals(x[:, [2]], y[:, [2]])
    assert alone.low[0] == pytest.approx(bootstrap_intervals(x, y).low[2], abs=1e-12)


@pytest.mark.parametrize("test", ["t", "wilcoxon", "randomisation", "bootstrap"])
def test_false_positives_come_at_the_rate_promised(test):
    # Two systems of equal quality, values between 0 and 1 with many exact ties, as for a measure of rank.
    simulations, queries, alpha = 400, 50, 0.05
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 4, (queries, simulations))
    x, y = (np.minimum(shared + rng.integers(0, 4, (queries, simulations)), 5) / 5 for _ in range(2))
    false = (p_values(x, y, test, resamples=2000) < alpha).sum()
    # Binomial: 400 * 0.05 = 20 expected, standard deviation sqrt(400 * 0.05 * 0.95) = 4.4.
    assert abs(false - simulations * alpha) < 3 * math.sqrt(simulations * alpha * (1 - alpha))


def test_holm_keeps_the_error_of_a_family():
    simulations, systems = 100, 5
    rng = np.random.default_rng(11)
    y = rng.uniform(size=(50, simulations))
    p = np.stack([p_values(y + rng.normal(0, 0.1, y.shape), y, "t") for _ in range(systems)])
    in_question = np.flatnonzero((p < 0.05).any(0))
    assert len(in_question) > 0.15 * simulations  # 1 - 0.95^5 = 0.23 without a correction
    false = sum(correct(p[:, s], "holm", 0.05)[0].any() for s in in_question)
    assert false < simulations * 0.05 + 3 * math.sqrt(simulations * 0.05 * 0.95)


def test_equivalence_is_rarely_claimed_at_the_bound():
    simulations = 400
    rng = np.random.default_rng(13)
    y = np.full((50, simulations), 0.5)
    x = y + 0.025 + rng.normal(0, 0.05, y.shape)  # the true difference is the bound itself
    claimed = (equivalence_p_values(x, y, 0.05) < 0.05).sum()
    assert abs(claimed - simulations * 0.05) < 3 * math.sqrt(simulations * 0.05 * 0.95)


def test_an_unknown_test_is_refused(pairs):
    with pytest.raises(ValueError, match="test='sign' is unknown; choose one of t, wilcoxon"):
        p_values(*pairs, "sign")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("test", ["t", "randomisation", "bootstrap"])
def test_a_single_query_has_no_statistics_and_no_warnings(test):
    x, y = np.array([[0.5, 0.5]]), np.array([[0.3, 0.5]])
    p = p_values(x, y, test)
    assert np.isnan(p).all() or p.min() == 1.0
    assert np.isnan(effect_sizes(x, y)).all()
    assert np.isnan(equivalence_p_values(x, y, 0.05)).all()
    assert bootstrap_intervals(x, y).low == pytest.approx([0.2, 0.0])
