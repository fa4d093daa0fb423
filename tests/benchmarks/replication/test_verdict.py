"""The five verdicts case by case, and intervals against scipy, statsmodels and simulated experiments."""

from itertools import combinations_with_replacement, product
from math import inf

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from .verdict import (
    CONTRADICTED,
    NOT_REACHED,
    NOT_RUN,
    NOT_SEEN,
    POWER,
    SEEN,
    UNDECIDED,
    Effect,
    Estimate,
    above,
    at_most,
    below,
    holm_levels,
    paired,
    verdict,
    weakest,
    within,
)

POINTS = np.arange(-7, 8) / 4
"""Enough to tell any two regions with whole ends apart; those beyond 1.25 stand for infinity."""


@pytest.mark.parametrize(
    ("effect", "interval", "expected"),
    [
        # More than the reference; the papers have 2 or more.
        (above(2), (0.1, 3), SEEN),
        (above(2), (0.1, 1), SEEN),  # the sentence names no size
        (above(2), (-1, 3), UNDECIDED),
        (above(2), (-1, 1), NOT_SEEN),
        (above(2), (-3, -1), CONTRADICTED),
        # By 2 or more, says the sentence.
        (above(2, named=True), (2.1, 3), SEEN),
        (above(2, named=True), (0.1, 3), UNDECIDED),
        (above(2, named=True), (0.1, 1), NOT_SEEN),
        (above(2, named=True), (-1, 3), UNDECIDED),
        (above(2, named=True), (-3, -1), CONTRADICTED),
        # Costs 1 to 2.
        (below(1, 2, named=True), (-1.9, -1.1), SEEN),
        (below(1, 2, named=True), (-1.5, -0.5), UNDECIDED),  # it may cost less
        (below(1, 2, named=True), (-2.5, -1.5), UNDECIDED),  # it may cost more
        (below(1, 2, named=True), (-4, -3), NOT_SEEN),  # it costs more
        (below(1, 2, named=True), (-0.5, 0.5), NOT_SEEN),
        (below(1, 2, named=True), (-4, 0.5), UNDECIDED),
        (below(1, 2, named=True), (0.5, 1), CONTRADICTED),
        # No more than 1.
        (at_most(1), (-9, -8), SEEN),
        (at_most(1), (0.5, 0.9), SEEN),
        (at_most(1), (0.5, 1.1), UNDECIDED),
        (at_most(1), (1.1, 2), CONTRADICTED),
        # No more than 1 above or below.
        (within(1), (-0.9, 0.9), SEEN),
        (within(1), (0.5, 0.9), SEEN),
        (within(1), (0.5, 1.1), UNDECIDED),
        (within(1), (-1.1, -0.5), UNDECIDED),
        (within(1), (-2, 2), UNDECIDED),
        (within(1), (1.1, 2), CONTRADICTED),
        (within(1), (-9, -8), CONTRADICTED),
        # No difference in any query, and nothing known.
        (above(2), (0.0, 0.0), NOT_SEEN),
        (at_most(1), (0.0, 0.0), SEEN),
        (above(2), (-inf, inf), UNDECIDED),
        (at_most(1), (-inf, inf), UNDECIDED),
        (within(1), (-inf, inf), UNDECIDED),
    ],
)
def test_verdicts_by_hand(effect, interval, expected):
    assert verdict(interval, effect, settled=True) == expected
    # Models that may not have learnt enough, or of few seeds, contradict nothing.
    unsettled = verdict(interval, effect, settled=False)
    assert unsettled == (NOT_REACHED if expected == CONTRADICTED else expected)


def test_verdicts_of_all_intervals_and_regions():
    """Each interval has the one verdict that its points call for."""
    ends = [-1, 0, 1]
    counts = dict.fromkeys((SEEN, NOT_SEEN, CONTRADICTED, UNDECIDED), 0)
    for effect in effects(ends):
        for low, high in combinations_with_replacement([-inf, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, inf], 2):
            within = [points(r) & points((low, high)) for r in (effect.side, effect.named, effect.reported)]
            if not within[0]:
                expected = CONTRADICTED
            elif within[1] == points((low, high)):
                expected = SEEN
            else:
                expected = UNDECIDED if within[2] else NOT_SEEN
            if points((low, high)):
                assert verdict((low, high), effect, settled=True) == expected, (low, high, effect)
                counts[expected] += 1
    assert min(counts.values()) > 20


def effects(ends):
    """All with whole ends whose regions are each within the one before."""
    sides = [(end, inf) for end in ends] + [(-inf, end) for end in ends] + [(-1, 1), (-1, 0), (0, 1)]
    for side in sides:
        regions = [r for r in combinations_with_replacement([-inf, *ends, inf], 2) if points(r) <= points(side)]
        regions = [r for r in regions if r[0] < r[1] and r[0] >= side[0] and r[1] <= side[1]]
        yield from (Effect(side, a, b) for a, b in product(regions, regions) if a[0] <= b[0] and b[1] <= a[1])


def points(region):
    return {float(point) for point in POINTS if region[0] <= point <= region[1]}


@pytest.mark.parametrize("margin", [at_most(1), within(1)])
def test_a_margin_has_three_verdicts(margin):
    seen = {verdict(i, margin, settled=True) for i in combinations_with_replacement(np.arange(-12, 13) / 4, 2)}
    assert seen == {SEEN, CONTRADICTED, UNDECIDED}


def test_the_weakest_of_several():
    assert weakest([SEEN, SEEN]) == SEEN
    assert weakest([SEEN, UNDECIDED]) == UNDECIDED
    assert weakest([NOT_SEEN, UNDECIDED, SEEN]) == NOT_SEEN
    assert weakest([SEEN, NOT_SEEN, NOT_REACHED]) == NOT_REACHED
    assert weakest([SEEN, NOT_REACHED, NOT_SEEN, CONTRADICTED]) == CONTRADICTED
    assert weakest([]) == NOT_RUN


def test_shares_become_differences():
    costs = below(0.05, 0.3, named=True).times(0.5)
    assert costs == Effect((-inf, 0.0), (-0.15, -0.025), (-0.15, -0.025))
    assert at_most(0.05).times(0.5).bounds == (0.025,)
    assert within(0.05).times(0.5).bounds == (-0.025, 0.025)
    assert above(0.1).times(0.0).side == (0, inf)  # and no NaN
    assert [str(e.times(0.5)) for e in (
        above(0.1), above(0.1, named=True), below(0.1, 0.2), at_most(0.1), within(0.1)
    )] == [
        "above 0; papers +0.050", "above 0; says +0.050", "below 0; papers -0.100 to -0.050", "at most +0.050",
        "-0.050 to +0.050",
    ]  # fmt: skip


@pytest.fixture
def values():
    """(Q, K) = (60, 5) values of systems and references, the differences small to large."""
    rng = np.random.default_rng(0)
    y = rng.uniform(size=(60, 5))
    return y + rng.normal(np.linspace(0, 0.1, 5), 0.15, size=(60, 5)), y


def test_estimates_are_those_of_the_paired_t_test(values):
    for x, y in zip(*(v.T for v in values), strict=True):
        estimate, test = paired(x, y), stats.ttest_rel(x, y)
        assert estimate.p_value(0.0) == pytest.approx(test.pvalue)
        assert estimate.interval(0.025) == pytest.approx(tuple(test.confidence_interval(0.95)))
        margin = stats.ttest_1samp(x - y, 0.03, alternative="less")
        nearer = min(margin.pvalue, 1 - margin.pvalue)
        assert estimate.p_value(0.03) / 2 == pytest.approx(nearer)


def test_smallest_difference_is_that_of_statsmodels(values):
    for x, y in zip(*(v.T for v in values), strict=True):
        found = paired(x, y).detectable(0.025)
        power = TTestPower().power(found / (x - y).std(ddof=1), nobs=60, alpha=0.05, alternative="two-sided")
        assert power == pytest.approx(POWER, abs=1e-6)
    assert Estimate(0.0, 0.1).detectable(0.025) == pytest.approx(0.1 * (1.959964 + 0.841621), abs=1e-6)


@pytest.mark.slow
def test_smallest_difference_is_found_in_80_percent_of_experiments():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.3, size=(4000, 100))
    found = Estimate(0.0, 0.3 / 10, 99).detectable(0.025)
    rejected = stats.ttest_1samp(noise + found, 0.0, axis=1).pvalue < 0.05
    assert rejected.mean() == pytest.approx(POWER, abs=4 * np.sqrt(0.16 / 4000))


def test_no_difference_and_a_single_query():
    x = np.linspace(0.1, 0.9, 20)
    same = paired(x, x)
    assert (same.p_value(0.0), same.interval(0.025), same.detectable(0.025)) == (1.0, (0.0, 0.0), 0.0)
    assert paired(x + 1e-17, x).p_value(0.0) == 1.0
    assert (same.p_value(0.1), same.p_value(-0.1)) == (0.0, 0.0)
    single = paired(x[:1] + 0.2, x[:1])
    assert (single.difference, single.p_value(0.0)) == (pytest.approx(0.2), 1.0)
    assert single.interval(0.025) == (-inf, inf)
    assert single.detectable(0.025) == inf


@pytest.mark.slow
def test_levels_are_those_of_holm():
    rng = np.random.default_rng(0)
    for alpha in (0.05, 0.3):
        for _ in range(8):
            p = rng.choice(rng.uniform(size=6) ** 4, rng.integers(1, 9))  # with ties
            rejected = multipletests(p, alpha=alpha, method="holm")[0]
            levels = holm_levels(p, alpha)
            assert (p < levels).tolist() == rejected.tolist()
            assert min(levels) == alpha / len(p)


def test_levels_by_hand():
    assert holm_levels([0.03, 0.001, 0.5], 0.05) == pytest.approx([0.05 / 2, 0.05 / 3, 0.05 / 2])
    assert holm_levels([], 0.05) == []
