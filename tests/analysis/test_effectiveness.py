"""Effectiveness by the position of the relevant text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.experiment import ExperimentResults

# The collections are too small for real comparisons, and the runs made by hand.
pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def experiment(values: dict[str, list[float]], **arguments) -> ExperimentResults:
    """Results with the given reciprocal ranks, by putting the relevant document there."""
    queries = len(next(iter(values.values())))
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(queries)], "query": "?"})
    qrels = topics[["qid"]].assign(docno="relevant", label=1)
    runs = {}
    for name, ranks in values.items():
        rows = [
            (qid, "relevant" if place == round(1 / rank) else f"other {place}", -float(place))
            for qid, rank in zip(topics["qid"], ranks, strict=True)
            for place in range(1, 11)
        ]
        runs[name] = pd.DataFrame(rows, columns=["qid", "docno", "score"])
    return ld.Experiment(runs, topics, qrels, ["RR"], **arguments)


MIXED, FALLING = [1.0, 0.5] * 10, [1.0, 0.5] * 5 + [0.1, 0.125] * 5
POSITIONS = pd.DataFrame({"qid": [f"q{i}" for i in range(20)], "first_token": [50] * 10 + [900] * 10})


@pytest.fixture(scope="module")
def found() -> PositionEffectiveness:
    """Of "full", which finds every document alike, and "start", which loses those from token 512 on."""
    results = experiment({"full": MIXED, "start": FALLING}, baseline=["start"])
    return ld.effectiveness_by_position(results, POSITIONS, edges=[0, 512, 1024])


def test_each_group_of_positions_has_means_with_intervals(found):
    table = found.table.set_index(["group", "name"])
    assert table["queries"].tolist() == [10] * 4
    assert table.loc[("0 to < 512", "start"), "mean"] == pytest.approx(0.75)
    assert table.loc[("512 to < 1024", "start"), "mean"] == pytest.approx(0.1125)
    assert ((table["low"] <= table["mean"]) & (table["mean"] <= table["high"])).all()


def test_systems_are_compared_with_the_baseline_in_each_group(found):
    different = found.comparisons.set_index(["group", "name"])["reject"]
    assert not different["0 to < 512", "full"]
    assert different["512 to < 1024", "full"]


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
    of_full, of_start = (container[0].get_xdata() for container in ax.containers)
    assert (of_full < of_start).all()
    np.testing.assert_allclose(ax.containers[1][0].get_ydata(), [0.75, 0.1125])
    filled = [len(c.get_offsets()) for c in ax.collections if hasattr(c, "get_sizes") and len(c.get_sizes())]
    assert filled == [1, 0]  # "full" differs from the baseline in one group


def test_groups_with_the_same_queries_in_any_order_are_compared_by_a_paired_test():
    early = 1 / np.random.default_rng(0).integers(1, 4, 20)
    later = [1 / (round(1 / value) + 1) for value in early]  # always one rank lower
    far = experiment({"m": later})
    reordered = ExperimentResults({"m": far.values["m"][:, ::-1]}, far.seeds, far.qids[::-1], far.measures)
    results = {"early": experiment({"m": early}), "far": reordered, "also early": experiment({"m": early})}
    (row,) = PositionEffectiveness(results).ratios.to_dict("records")
    assert (row["worst group"], row["best group"]) == ("far", "early")
    assert row["p-value"] == pytest.approx(3 * stats.ttest_rel(later, early).pvalue)  # three pairs of groups
    assert row["p-value"] < stats.ttest_ind(later, early, equal_var=False).pvalue


def test_the_interval_of_a_ratio_resamples_the_same_queries_in_both_groups():
    ranks = np.random.default_rng(1).integers(1, 5, 20)
    results = {"early": experiment({"m": 1 / ranks}), "far": experiment({"m": 1 / (2 * ranks)})}
    (row,) = PositionEffectiveness(results).ratios.to_dict("records")
    assert (row["low"], row["ratio"], row["high"]) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("length", [400, 1000, 10_000])
def test_groups_without_edges_are_quarters_of_the_document_length(length):
    results = experiment({"m": MIXED})
    places = pd.DataFrame({"qid": results.qids, "first_token": np.linspace(0, 0.95 * length, 20).round().astype(int)})
    others = pd.DataFrame({"qid": ["other"] * 99, "first_token": 1, "length": 7})
    found = ld.effectiveness_by_position(results, pd.concat([places.assign(length=length), others]))
    quarter = length // 4
    labels = [f"{k * quarter} to < {(k + 1) * quarter}" for k in range(3)]
    assert list(found.groups) == [*labels, f">= {3 * quarter}"]
    assert max(len(of_group.qids) for of_group in found.groups.values()) <= 6


def test_the_first_position_of_a_query_counts_and_one_without_is_left_out():
    results = experiment({"m": FALLING})
    frame = pd.concat([POSITIONS, POSITIONS.assign(first_token=POSITIONS["first_token"] + 100)])
    nowhere = pd.DataFrame({"qid": ["q19"], "first_token": [pd.NA]})
    frame = pd.concat([frame[frame["qid"] != "q19"], nowhere], ignore_index=True)
    found = ld.effectiveness_by_position(results, frame, edges=[0, 100, 950])
    assert {label: of_group.qids for label, of_group in found.groups.items()} == {
        "100 to < 950": results.qids[:10],
        ">= 950": results.qids[10:19],
    }


@pytest.mark.parametrize(
    ("positions", "name"),
    [
        (POSITIONS.rename(columns={"first_token": "position"}), "first_token"),
        (POSITIONS, "length"),
        (POSITIONS.assign(qid="other", length=1000), "edges="),
    ],
)
def test_positions_without_the_needed_columns_are_refused(positions, name):
    with pytest.raises(ValueError, match=name):
        ld.effectiveness_by_position(experiment({"m": MIXED}), positions)
