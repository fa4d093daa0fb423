"""What an interval of a difference says about a claim: five verdicts, and the intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from scipy import stats

from pyterrier_longdoc.experiment.significance import without_rounding, without_warnings

SEEN, NOT_SEEN, CONTRADICTED, UNDECIDED, NOT_RUN = "seen", "not seen", "contradicted", "undecided", "not run"
NOT_REACHED = "not reached"
WEAKEST_FIRST = (CONTRADICTED, NOT_REACHED, NOT_SEEN, UNDECIDED, SEEN)

SEEDS = 3
"""The fewest with which a trained system can contradict a paper: no interval here knows of seeds."""
UNCHANGED = 0.05
"""Share of a mean by which another epoch may change it, if the training counts as converged."""

POWER = 0.8
"""With which the smallest difference that a test could have found is found; Cohen 1988."""

Region = tuple[float, float]
"""Ends of a range of differences; either may be infinite."""


# What a claim says, and whether it is seen.


@dataclass(frozen=True)
class Effect:
    """Where a claim says that a difference lies: three regions, each within the one before.

    Of a claim they are shares of something, see `Comparison`; `times` makes differences of them.

    Attributes:
        side: all differences that do not speak against the claim; its finite ends are the bounds that are tested.
        named: those that make its sentence true: the side itself, if it names no size.
        reported: those as large as the papers' figures: at least the smallest effect that they show for it.
        tails: 2 for a difference from 0, of which both signs are tested; 1 for margins that are not to be exceeded.
    """

    side: Region
    named: Region
    reported: Region
    tails: int = 2

    @property
    def bounds(self) -> tuple[float, ...]:
        """The finite ends of the side."""
        return tuple(end for end in self.side if np.isfinite(end))

    def times(self, scale: float) -> Effect:
        """The regions as differences, if this is a share of `scale`."""
        side, named, reported = (
            (_times(low, scale), _times(high, scale)) for low, high in (self.side, self.named, self.reported)
        )
        return Effect(side, named, reported, self.tails)

    def __str__(self) -> str:
        if self.tails == 1:
            ends = " to ".join(f"{end:+.3f}" for end in self.bounds)
            return ends if len(self.bounds) == 2 else f"at most {ends}"
        sign, of = ("above" if self.side[1] == inf else "below"), ("says" if self.named != self.side else "papers")
        return f"{sign} 0; {of} {' to '.join(f'{end:+.3f}' for end in self.reported if np.isfinite(end))}"


def above(least: float, *, named: bool = False) -> Effect:
    """More than the reference.

    Args:
        least: the smallest effect in the papers' figures.
        named: the claim's sentence itself says that it is at least so large.
    """
    return Effect((0.0, inf), (least, inf) if named else (0.0, inf), (least, inf))


def below(least: float, most: float = inf, *, named: bool = False) -> Effect:
    """Less than the reference, by at least and at most so much; see `above`."""
    return Effect((-inf, 0.0), (-most, -least) if named else (-inf, 0.0), (-most, -least))


def at_most(margin: float) -> Effect:
    """Not above the reference by more than a margin."""
    return Effect((-inf, margin), (-inf, margin), (-inf, margin), tails=1)


def within(margin: float) -> Effect:
    """Equivalent: neither above nor below the reference by more than a margin."""
    return Effect((-margin, margin), (-margin, margin), (-margin, margin), tails=1)


def verdict(interval: Region, effect: Effect, *, settled: bool) -> str:
    """What an interval of a difference says about a claim.

    - *contradicted*: the interval lies beside the claim's side. The difference is significantly of the other sign, or
      significantly beyond the margin.
    - *not reached*: the same of models that are not settled, which more training, or other seeds, may change.
    - *seen*: it lies within what the claim's sentence names. The difference is significantly of the claimed sign, or
      within the margin, or, where a size is named, of that size.
    - *not seen*: neither, and it does not reach the effect that the papers report (of a claim that names a size: that
      size). Nothing significant speaks against the claim's direction, but an effect such as theirs is excluded.
    - *undecided*: the interval allows both, the effect and its absence; or the effect, and a smaller or larger one
      than is named.

    A claim of a margin names nothing but the margin: within it it is seen, beyond contradicted, and else undecided.

    Args:
        interval: both ends, at the level of the test.
        effect: as differences.
        settled: whether the models have `SEEDS` seeds, and another epoch leaves them `UNCHANGED`.
    """
    (low, high), (least, most) = interval, effect.side
    if high < least or low > most:
        return CONTRADICTED if settled else NOT_REACHED
    inside = (low > least or least == -inf) and (high < most or most == inf)
    if inside and effect.named[0] <= low and high <= effect.named[1]:
        return SEEN
    return UNDECIDED if _meet(interval, effect.reported) else NOT_SEEN


def weakest(verdicts: Iterable[str]) -> str:
    """The verdict of a claim that says several things: it is no better than that of any of them that was run."""
    given = set(verdicts)
    return next((one for one in WEAKEST_FIRST if one in given), NOT_RUN)


def _times(end: float, scale: float) -> float:
    return end * scale if np.isfinite(end) else end  # infinity times 0 is no number


def _meet(one: Region, other: Region) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


# Estimates.


@dataclass(frozen=True)
class Estimate:
    """A difference, and Student's t about it.

    Attributes:
        difference: as observed.
        error: its standard error; infinite where nothing is known of it.
        degrees: of freedom; infinite for a normal distribution.
    """

    difference: float
    error: float
    degrees: float = inf

    def p_value(self, bound: float) -> float:
        """Two-sided, of the true difference being `bound`; 1 where all differences are equal to it."""
        with without_warnings():
            t = np.float64(self.difference - bound) / self.error
        return 1.0 if np.isnan(t) else float(2 * stats.t.sf(abs(t), self.degrees))

    def interval(self, tail: float) -> Region:
        """Ends beyond either of which the true difference is with the probability `tail`."""
        reach = self.error * stats.t.isf(tail, self.degrees)
        return float(self.difference - reach), float(self.difference + reach)

    def detectable(self, tail: float) -> float:
        """The smallest distance from the bound that a test of a tail of this size finds in `POWER` of all cases."""
        if not np.isfinite(self.degrees):
            return float(self.error * (stats.norm.isf(tail) + stats.norm.ppf(POWER)))
        from statsmodels.stats.power import TTestPower

        queries = self.degrees + 1
        size = TTestPower().solve_power(nobs=queries, alpha=tail, power=POWER, alternative="larger")
        return float(size * self.error * np.sqrt(queries))


def paired(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Of the mean of `(Q,)` paired differences `x - y`: that of the paired t-test."""
    differences = without_rounding(x[:, None], y[:, None])[:, 0] - y
    if len(differences) < 2:
        return Estimate(float(differences.mean()), inf)
    return Estimate(float(differences.mean()), float(stats.sem(differences)), len(differences) - 1)


def holm_levels(p: Sequence[float], alpha: float) -> list[float]:
    """The level at which Holm's method tests each of several comparisons: intervals of these levels agree with it.

    The smallest p-value is tested at `alpha / K`, the next at `alpha / (K - 1)`, and so on to the first that is not
    rejected; all later ones, which are not rejected either, have its level. Holm 1979.
    """
    order = np.argsort(p, kind="stable")
    levels = alpha / np.arange(len(order), 0, -1)
    kept = np.flatnonzero(np.asarray(p)[order] >= levels)
    if len(kept):
        levels[kept[0] :] = levels[kept[0]]
    return [float(level) for level in levels[np.argsort(order)]]
