"""Outcomes as they are read, and the kinds of comparisons against scipy, statsmodels and by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import Table

from .evidence import (
    COLLECTIONS,
    FIGURES,
    Cell,
    Difference,
    Gains,
    NotRunError,
    Outcomes,
    Spread,
    Trend,
)
from .verdict import above, at_most, below

MAXP, FIRSTP, RANDOM = Cell("MaxP", "early", "far"), Cell("FirstP", "early", "far"), Cell("random", "none", "far")


def frame(values):
    """Outcomes of `{cell: (S, Q) or (Q,) reciprocal ranks}`."""
    rows = [
        {**cell._asdict(), "seed": seed, "qid": f"q{i}", "rr": rr}
        for cell, of_cell in values.items()
        for seed, of_seed in enumerate(np.atleast_2d(of_cell))
        for i, rr in enumerate(of_seed)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_seeds_are_averaged_for_each_query(rng):
    x, y, random = rng.uniform(size=(3, 40)), rng.uniform(size=(2, 40)), rng.uniform(size=40)
    outcomes = Outcomes.read(frame({MAXP: x, FIRSTP: y, RANDOM: random}))
    evidence = Difference(MAXP, FIRSTP, at_most(0.1), of=(MAXP, RANDOM)).evidence(outcomes)
    test = stats.ttest_rel(x.mean(0), y.mean(0))
    assert evidence.estimate.p_value(0.0) == pytest.approx(test.pvalue)
    assert evidence.estimate.interval(0.025) == pytest.approx(tuple(test.confidence_interval()))
    assert (evidence.ours, evidence.reference) == (pytest.approx(x.mean()), pytest.approx(y.mean()))
    assert evidence.scale == pytest.approx(x.mean() - random.mean())
    assert (evidence.queries, evidence.seeds) == (40, 2)  # that of random counts for nothing
    assert outcomes.fewest_seeds([RANDOM]) == 1
    assert Difference(MAXP, FIRSTP, at_most(0.1)).evidence(outcomes).scale == pytest.approx(y.mean())


def test_rows_may_stand_in_any_order(rng):
    rows = frame({MAXP: rng.uniform(size=(3, 12)), FIRSTP: rng.uniform(size=(3, 12))})
    comparison = Difference(MAXP, FIRSTP, above(0.1))
    ordered = comparison.evidence(Outcomes.read(rows))
    assert comparison.evidence(Outcomes.read(rows.sample(frac=1, random_state=1))) == ordered


def test_what_is_missing_is_named():
    outcomes = Outcomes.read(frame({MAXP: [0.5, 0.5]}))
    with pytest.raises(NotRunError, match=r"^FirstP \(early\) on far; random \(none\) on far$"):
        Difference(FIRSTP, RANDOM, at_most(0.1), of=(MAXP, RANDOM)).evidence(outcomes)
    with pytest.raises(NotRunError, match=r"MaxP and FirstP \(early\) on far with the same three .*: there are 0"):
        Spread("MaxP", "FirstP", "early", "far", below(0.5)).evidence(outcomes)
    with pytest.raises(NotRunError, match="study 'BeST': precision"):
        Trend("BeST", "BeST", "precision", above(0.1)).evidence(outcomes)
    with pytest.raises(NotRunError, match="study 'positions'"):
        Gains(0, ("MaxP",), "early", above(0.1)).evidence(outcomes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="rr"), "rr"),
        (lambda rows: rows.assign(rr=rows["rr"] + 1), "rr must be between 0 and 1, and nothing empty: .*'rr': 1.5"),
        (lambda rows: rows.assign(rr=np.nan), "rr must be between 0 and 1"),
        (lambda rows: rows.assign(trained=None), "nothing empty"),
        (lambda rows: pd.concat([rows, rows[:1]]), "two values for one query and seed: .*'qid': 'q0'"),
        (lambda rows: rows[1:], r"the seeds of MaxP \(early\) on far were tested on different queries"),
    ],
)
def test_frames_that_are_no_outcomes(change, message):
    rows = frame({MAXP: np.full((2, 3), 0.5)})
    with pytest.raises(ValueError, match=message):
        Outcomes.read(change(rows))
    with pytest.raises(ValueError, match="figures"):
        Outcomes.read(rows, pd.DataFrame({"study": []}))


def test_cells_of_different_queries_are_refused():
    outcomes = Outcomes.read(frame({MAXP: [0.5, 0.5], FIRSTP: [0.5, 0.5, 0.5]}))
    with pytest.raises(ValueError, match=r"MaxP \(early\) on far and FirstP \(early\) on far were tested on different"):
        Difference(MAXP, FIRSTP, above(0.1)).evidence(outcomes)


def test_spread_is_the_deviation_of_means_over_common_settings(rng):
    settings = ["", " 32/24", " 64/32", " 128/96"]
    values = {
        Cell(f"{name}{s}", "early", "early"): np.clip(rng.normal(0.5 + step * i, 0.1, 300), 0, 1)
        for name, step in (("PRETR", 0.05), ("PRETR-Q", 0.01))
        for i, s in enumerate(settings)
    }
    more = {
        Cell("PRETR 16/8", "early", "early"): np.ones(300),
        Cell("PRETR 16/8, 2 chunks", "early", "early"): np.ones(300),
    }
    evidence = Spread("PRETR-Q", "PRETR", "early", "early", below(0.5)).evidence(Outcomes.read(frame(values | more)))
    means = np.array([v.mean() for v in values.values()]).reshape(2, 4)
    deviations = means.std(axis=1, ddof=1)
    assert (evidence.reference, evidence.ours) == (pytest.approx(deviations[0]), pytest.approx(deviations[1]))
    assert evidence.scale == evidence.reference
    assert evidence.detail == "4 windows and strides"
    data = np.stack(list(values.values()))  # (8, Q), resampled together

    def difference(*x, axis):
        spreads = np.stack([one.mean(axis=axis) for one in x]).reshape(2, 4, -1).std(axis=1, ddof=1)
        return spreads[1] - spreads[0]

    again = stats.bootstrap(data, difference, paired=True, n_resamples=3000, method="percentile", rng=rng, batch=100)
    assert evidence.estimate.error == pytest.approx(again.standard_error, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.0, 0.03, 0.3])
def test_equal_spreads_are_rarely_found_to_differ(rng, deviation):
    spread, found = Spread("PRETR-Q", "PRETR", "early", "early", below(0.5)), 0
    names = [f"{name}{s}" for name in ("PRETR", "PRETR-Q") for s in (" 1/1", " 2/1", " 3/1", " 4/1")]
    for _ in range(200):
        means = deviation * rng.normal(size=4)
        values = np.concatenate([means, rng.permutation(means)])[:, None] + rng.normal(0, 0.3, (8, 100))
        cells = {Cell(name, "early", "early"): pd.Series(v) for name, v in zip(names, values, strict=True)}
        found += spread.evidence(Outcomes(cells, dict.fromkeys(cells, 1), pd.DataFrame())).estimate.p_value(0.0) < 0.05
    assert found <= 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)


def precisions(values, n):
    rows = [("BeST", "BeST", i, "precision", value, n) for i, value in enumerate(values, 1)]
    return pd.DataFrame([*rows, ("BeST", "random", 1, "precision", 0.1, 100)], columns=FIGURES)


def test_trend_is_that_of_cochran_and_armitage():
    trend, n = Trend("BeST", "BeST", "precision", above(0.04)), 250
    values = np.array([0.400, 0.440, 0.500, 0.460])
    figures = precisions(values, n).sample(frac=1, random_state=3)
    evidence = trend.evidence(Outcomes.read(frame({MAXP: [0.5]}), figures))
    counts = np.stack([n * values, n * (1 - values)], axis=1)
    test = Table(counts, shift_zeros=False).test_ordinal_association(
        row_scores=np.arange(4.0), col_scores=np.array([1.0, 0])
    )
    z = evidence.estimate.difference / evidence.estimate.error
    assert z == pytest.approx(test.zscore, rel=1 / n)  # which divides by N - 1
    assert evidence.estimate.difference == pytest.approx(stats.linregress(range(4), values).slope)
    assert (evidence.ours, evidence.reference, evidence.scale, evidence.queries) == (0.46, 0.4, 0.4, n)


def test_trend_without_numbers_of_queries_tells_nothing():
    outcomes = Outcomes.read(frame({MAXP: [0.5]}), precisions([0.1, 0.9], np.nan))
    estimate = Trend("BeST", "BeST", "precision", above(0.04)).evidence(outcomes).estimate
    assert estimate.difference == pytest.approx(0.8)
    assert estimate.interval(0.025) == (-np.inf, np.inf)
    with pytest.raises(NotRunError, match="a second iteration"):
        Trend("BeST", "BeST", "precision", above(0.04)).evidence(
            Outcomes.read(frame({MAXP: [0.5]}), precisions([0.1], 9))
        )


def test_gains_are_compared_in_the_order_of_the_estimator(rng):
    gain = {"early": 0.0, "uniform": 0.1, "far": 0.3}
    values = {Cell("FirstP", "early", test): rng.uniform(0.2, 0.4, 50) for test in COLLECTIONS}
    for name, more in (("MaxP", 0.0), ("AvgP", 0.05)):
        values |= {Cell(name, "early", t): values[Cell("FirstP", "early", t)] + gain[t] + more for t in COLLECTIONS}
    values[Cell("SumP", "early", "early")] = np.ones(50)  # not run on the others
    shares = [("positions", s, t, "share in first window (estimated)", v, 50) for s, t, v in (
        ("best", "far", 0.2), ("best", "uniform", 0.5), ("best", "early", 0.9), ("first", "far", 0.0),
        ("first", "uniform", 0.3), ("first", "early", 0.9),
    )]  # fmt: skip
    outcomes = Outcomes.read(frame(values), pd.DataFrame(shares, columns=FIGURES))
    for pair, (more, less, share) in enumerate([("uniform", "early", 0.5), ("far", "uniform", 0.3)]):
        evidence = Gains(pair, ("SumP", "MaxP", "AvgP"), "early", above(0.5)).evidence(outcomes)
        if pair == 1:
            assert evidence.detail == "far against uniform; models: 2"
            assert (evidence.ours, evidence.reference) == (pytest.approx(0.325), pytest.approx(0.125))
        assert evidence.estimate.difference == pytest.approx(gain[more] - gain[less])
        assert evidence.scale == pytest.approx(share * values[Cell("FirstP", "early", "early")].mean())
    with pytest.raises(NotRunError, match=r"one of the long models \(early\) on early and uniform"):
        Gains(0, ("SumP",), "early", above(0.5)).evidence(outcomes)
    unlike = outcomes.figures.replace({"early": "uniform", "uniform": "early"})  # an estimator that is mistaken
    evidence = Gains(0, ("MaxP",), "early", above(0.5)).evidence(Outcomes.read(frame(values), unlike))
    assert evidence.estimate.difference == pytest.approx(-0.1)
