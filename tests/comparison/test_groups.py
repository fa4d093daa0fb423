"""The same systems on several groups of queries."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.comparison import Comparison, PositionEffectiveness

# The groups are too small for real comparisons.
pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ComparisonWarning")


def compared(values: dict[str, list[float]], **arguments) -> Comparison:
    """A comparison with these values of the queries q00, q01 ..."""
    rows = [(name, f"q{i:02}", "RR", value) for name, given in values.items() for i, value in enumerate(given)]
    return ld.compare(pd.DataFrame(rows, columns=["name", "qid", "measure", "value"]), **arguments)


MIXED, FALLING = [1.0, 0.5] * 10, [1.0, 0.5] * 5 + [0.1, 0.125] * 5
POSITIONS = {f"q{i:02}": 50 if i < 10 else 900 for i in range(20)}


@pytest.fixture(scope="module")
def found() -> PositionEffectiveness:
    """Of "full", which finds every document alike, and "start", which loses those from token 512 on."""
    results = compared({"full": MIXED, "start": FALLING}, baseline=["start"])
    return results.by(POSITIONS, [0, 512, 1024], label="tokens before the answer")


def test_each_group_has_means_with_intervals(found):
    table = found.table.set_index(["group", "name"])
    assert table["queries"].tolist() == [10] * 4
    assert table.loc[("0 to < 512", "start"), "mean"] == pytest.approx(0.75)
    assert table.loc[("512 to < 1024", "start"), "mean"] == pytest.approx(0.1125)
    assert ((table["low"] <= table["mean"]) & (table["mean"] <= table["high"])).all()


def test_systems_are_compared_with_the_baseline_in_each_group(found):
    rows = found.comparisons.set_index(["group", "name"])
    p = stats.ttest_rel(MIXED[10:], FALLING[10:]).pvalue
    assert rows.loc[("512 to < 1024", "full"), "p-value"] == pytest.approx(p)
    assert rows["reject"].to_dict() == {("0 to < 512", "full"): False, ("512 to < 1024", "full"): True}


def test_the_ratio_of_the_worst_to_the_best_group_has_an_interval_and_a_test(found):
    ratios = found.ratios.set_index("name")
    start = ratios.loc["start"]
    assert (start["worst group"], start["best group"]) == ("512 to < 1024", "0 to < 512")
    assert start["ratio"] == pytest.approx(0.15)
    assert 0.1 < start["low"] < 0.15 < start["high"] < 0.25
    assert start["p-value"] == pytest.approx(stats.ttest_ind(FALLING[:10], FALLING[10:], equal_var=False).pvalue)
    assert start["psi"] == pytest.approx(1 - (0.1 + 0.125) / (1 + 0.5))
    assert ratios.loc["full", ["ratio", "psi"]].tolist() == [1, 0]


def test_the_plot_shows_means_by_group_and_fills_significant_ones(found):
    ax = found.plot()
    assert [label.get_text().split("\n")[0] for label in ax.get_xticklabels()] == list(found.groups)
    assert ax.get_xlabel() == "tokens before the answer"
    of_full, of_start = (container[0].get_xdata() for container in ax.containers)
    assert (of_full < of_start).all()
    np.testing.assert_allclose(ax.containers[1][0].get_ydata(), [0.75, 0.1125])
    filled = [len(c.get_offsets()) for c in ax.collections if hasattr(c, "get_sizes") and len(c.get_sizes())]
    assert filled == [1, 0]  # "full" differs from the baseline in one group
    with pytest.raises(ValueError, match="measure='AP'"):
        found.plot("AP")


def test_groups_with_the_same_queries_are_compared_by_a_paired_test():
    early = 1 / np.random.default_rng(0).integers(1, 4, 20)
    later = [1 / (round(1 / value) + 1) for value in early]  # always one rank lower
    results = {"early": compared({"m": early}), "far": compared({"m": later}), "also early": compared({"m": early})}
    (row,) = PositionEffectiveness(results).ratios.to_dict("records")
    assert (row["worst group"], row["best group"]) == ("far", "early")
    assert row["p-value"] == pytest.approx(3 * stats.ttest_rel(later, early).pvalue)  # three pairs of groups
    assert row["p-value"] < stats.ttest_ind(later, early, equal_var=False).pvalue


def test_the_interval_of_a_ratio_resamples_the_same_queries_in_both_groups():
    ranks = np.random.default_rng(1).integers(1, 5, 20)
    results = {"early": compared({"m": 1 / ranks}), "far": compared({"m": 1 / (2 * ranks)})}
    (row,) = PositionEffectiveness(results).ratios.to_dict("records")
    assert (row["low"], row["ratio"], row["high"]) == pytest.approx((0.5, 0.5, 0.5))


def test_queries_without_a_number_or_below_the_first_edge_are_left_out():
    results = compared({"m": FALLING})
    numbers = {**POSITIONS, "q00": 3, "q19": float("nan"), "other": 100}
    del numbers["q18"]
    groups = results.by(numbers, [10, 60, 400, 500]).groups
    assert {label: group.qids for label, group in groups.items()} == {
        "10 to < 60": results.qids[1:10],
        ">= 500": results.qids[10:18],
    }


@pytest.mark.parametrize("edges", [[512, 0], [1000]])
def test_edges_that_descend_or_exclude_all_queries_are_refused(edges):
    with pytest.raises(ValueError, match="edges"):
        compared({"m": MIXED}).by(POSITIONS, edges)
