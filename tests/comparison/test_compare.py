"""`compare`: as `pt.Experiment(baseline=...)` where that can do it; seeds, partners, baselines, warnings and errors."""

import re

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import AP, P, R, nDCG
from scipy import stats
from statsmodels.stats.multitest import multipletests

import pyterrier_longdoc as ld

from ..support import synthetic
from ..support.systems import told_of

METRICS = [nDCG @ 10, AP, "recip_rank", P @ 5, R(rel=2) @ 20, "num_ret", "num_rel_ret"]
KEYS = ["name", "qid", "measure"]
TOPICS, QRELS = synthetic.collection()
# The order of the names is not that of the alphabet, in which PyTerrier sorts the rows.
RUNS = {name: synthetic.run(TOPICS, 0.5, seed) for seed, name in enumerate("dbca")}


def values(systems=RUNS, metrics=("map",), topics=TOPICS, qrels=QRELS, **options):
    return pt.Experiment(systems, topics, qrels, list(metrics), perquery=True, **options)


VALUES = values()
BY_QUERY = VALUES.pivot(index="qid", columns="name", values="value")


def assert_same(found, expected):
    """All columns; PyTerrier leaves their order to chance, and equal systems without a p-value."""
    others = expected[next(name for name in expected if name.endswith(" +"))].notna()
    for column in expected.columns[expected.columns.str.endswith(" p-value")]:
        expected.loc[others, column] = expected.loc[others, column].fillna(1.0)
    assert sorted(expected) == sorted(found.table)
    pd.testing.assert_frame_equal(found.table, expected[found.table.columns], check_exact=False, rtol=1e-12)


@pytest.fixture
def doubtful():
    """Runs with everything that evaluation treats in a special way."""
    good, other = synthetic.run(TOPICS, 1.0, 1), synthetic.run(TOPICS, 0.5, 2)
    return {
        "good": good,
        "tied": other.assign(score=other["score"].round()),
        "float32 ties": other.assign(score=1 + 1e-9 * other["score"]),
        "missing": other[~other["qid"].isin(["q3", "q7"])],
        "unsorted": other.sample(frac=1.0, random_state=0),
        "repeated": pd.concat([other, other.head(20).assign(score=-5.0)]),
        "float32": other.astype({"score": "float32"}),
    }


def test_ties_missing_queries_and_equal_systems_are_as_in_pyterrier(doubtful):
    systems = {**doubtful, "again": doubtful["good"].copy()}
    frame = values(systems, METRICS)
    found = ld.compare(frame, baseline="good", measures=METRICS)
    assert_same(found, pt.Experiment(systems, TOPICS, QRELS, METRICS, baseline="good"))
    assert found.means.columns.tolist() == list(map(str, METRICS))
    assert found.names == list(systems) != sorted(systems)
    by_key = [each.sort_values(KEYS, ignore_index=True) for each in (found.perquery, frame)]
    pd.testing.assert_frame_equal(*by_key, check_exact=True)


@pytest.mark.parametrize(
    "options",
    [
        *({"correction": correction} for correction in ("holm", "bonferroni", "fdr_bh", "hs", "fdr_tsbky")),
        {"test": "wilcoxon"},
        {"test": lambda x, y: stats.mannwhitneyu(x, y)},
    ],
    ids=["holm", "bonferroni", "fdr_bh", "hs", "fdr_tsbky", "wilcoxon", "a function"],
)
def test_tests_and_corrections_are_those_of_pyterrier(doubtful, options):
    expected = pt.Experiment(doubtful, TOPICS, QRELS, ["ndcg_cut_5", "map"], baseline="good", **options)
    assert_same(ld.compare(values(doubtful, ["ndcg_cut_5", "map"]), baseline="good", **options), expected)


def test_an_equal_system_counts_as_a_comparison_with_the_p_value_1():
    frame = values({**RUNS, "d again": RUNS["d"]})
    table = ld.compare(frame, baseline="d", correction="holm").table.set_index("name").drop("d")
    p = [stats.ttest_rel(BY_QUERY[name], BY_QUERY["d"]).pvalue for name in "bca"]
    assert table["map p-value"].tolist() == pytest.approx([*p, 1.0])
    assert table["map p-value corrected"].tolist() == pytest.approx(multipletests([*p, 1.0], method="holm")[1])


@pytest.mark.parametrize("options", [{}, {"filter_by_topics": False}, {"filter_by_qrels": True}])
def test_unjudged_topics_and_judgements_of_other_topics_are_as_in_pyterrier(doubtful, options):
    metrics = ["num_ret", "map"]
    for topics, qrels in ((TOPICS, QRELS.head(60)), (TOPICS.head(20), QRELS)):
        frame = values(doubtful, metrics, topics, qrels, **options)
        expected = pt.Experiment(doubtful, topics, qrels, metrics, baseline="missing", **options)
        assert_same(ld.compare(frame, baseline="missing"), expected)


def test_values_are_averaged_over_seeds_before_the_test():
    found = ld.compare(VALUES, seeds={"ab": ["a", "b"], "cd": ["d", "c"]}, baseline="ab")
    assert found.names == ["cd", "ab"]  # each at the place of its first run
    ab, cd = BY_QUERY[["a", "b"]].mean(axis=1), BY_QUERY[["c", "d"]].mean(axis=1)
    [row] = found.comparisons.to_dict("records")
    assert row["p-value"] == pytest.approx(stats.ttest_rel(cd, ab).pvalue, rel=1e-9)
    assert (row["mean"], row["+"]) == (pytest.approx(cd.mean()), (cd > ab).sum())
    spread = BY_QUERY.mean()[["c", "d"]].std()
    assert found.stds.loc["cd", "map"] == found.table.loc[0, "map std"] == pytest.approx(spread, rel=1e-9)
    assert ld.compare(VALUES, seeds={"a": ["a", "b"]}).names == ["d", "a", "c"]


def test_partners_and_every_baseline_are_compared_and_corrected_on_their_own():
    partner = {"a": "d", "b": "c"}
    found = ld.compare(VALUES, baseline=["d", "c"], partner=partner, test="wilcoxon", correction="fdr_bh").comparisons
    pairs = [("b", "c"), ("a", "d"), *((name, "d") for name in "bca"), *((name, "c") for name in "dba")]
    assert list(zip(found["name"], found["reference"], strict=True)) == pairs
    p = np.array([stats.wilcoxon(BY_QUERY[a], BY_QUERY[b]).pvalue for a, b in pairs])
    assert found["p-value"].tolist() == pytest.approx(p)
    corrected = [multipletests(family, method="fdr_bh")[1] for family in (p[:2], p[2:5], p[5:])]
    assert found["p-value corrected"].tolist() == pytest.approx(np.concatenate(corrected))


def test_columns_are_in_the_order_of_pyterrier():
    found = ld.compare(VALUES, baseline=["d", "b"], partner={"c": "b"}, correction="holm")
    assert found.table.columns.tolist() == [
        "name", "map",
        "map gain", "map gain p-value", "map gain reject", "map gain p-value corrected",
        "map + (d)", "map - (d)", "map p-value (d)", "map reject (d)", "map p-value corrected (d)",
        "map + (b)", "map - (b)", "map p-value (b)", "map reject (b)", "map p-value corrected (b)",
    ]  # fmt: skip
    one, two = found.retest(baseline="b", partner=None).table.set_index("name"), found.table.set_index("name")
    assert two["map p-value (b)"].tolist() == pytest.approx(one["map p-value"].tolist(), nan_ok=True)
    # The partner's family has one comparison only: nothing to correct.
    assert two.loc["c", "map gain p-value corrected"] == two.loc["c", "map gain p-value"] == one.loc["c", "map p-value"]


@pytest.mark.parametrize("test", ["t", "randomisation", "bootstrap"])
def test_results_do_not_depend_on_the_order_of_topics_and_rows(test):
    shuffled = values(topics=TOPICS.sample(frac=1.0, random_state=1), qrels=QRELS.sample(frac=1.0, random_state=2))
    for frame in (VALUES.sample(frac=1.0, random_state=0), shuffled):
        found, expected = (ld.compare(each, baseline="b", test=test) for each in (frame, VALUES))
        pd.testing.assert_frame_equal(found.comparisons, expected.comparisons, check_exact=True)


def test_the_file_that_pyterrier_saves_gives_the_same(tmp_path):
    runs = {name: run.assign(qid=run["qid"].str[1:]) for name, run in RUNS.items()}
    topics, qrels = (frame.assign(qid=frame["qid"].str[1:]) for frame in (TOPICS, QRELS))
    frame = values(runs, METRICS, topics, qrels, save_dir=str(tmp_path))
    found = ld.compare(pd.read_csv(tmp_path / "perquery.csv"), measures=METRICS, baseline="b")
    assert found.names == sorted(RUNS)
    expected = ld.compare(frame, measures=METRICS, baseline="b")
    in_order = expected.table.sort_values("name", ignore_index=True)
    pd.testing.assert_frame_equal(found.table, in_order, check_exact=False, rtol=1e-12)
    assert found.qids == expected.qids


def test_counts_are_sums_and_so_are_their_intervals():
    rows = [(name, f"q{i}", "num_rel_ret", value) for name in "ab" for i, value in enumerate([3, 5, 4, 6])]
    frame = pd.DataFrame(rows, columns=[*KEYS, "value"])
    frame.loc[frame["name"] == "b", "value"] = 2
    [row] = ld.compare(frame, baseline="b").comparisons.to_dict("records")
    assert (row["mean"], row["reference mean"], row["difference"]) == (18, 8, 10)
    assert 4 * 1 <= row["low"] < 10 < row["high"] <= 4 * 4


@pytest.mark.parametrize("decimals", [0, 2, {"AP": 1}, {"AP": 1, "nDCG@5": 4}])
def test_rounding_is_as_in_pyterrier(decimals):
    frame = values(metrics=[nDCG @ 5, AP])
    found, exact = (ld.compare(frame, baseline="b", round=given) for given in (decimals, None))
    assert_same(found, pt.Experiment(RUNS, TOPICS, QRELS, [nDCG @ 5, AP], baseline="b", round=decimals))
    pd.testing.assert_frame_equal(found.comparisons, exact.comparisons)
    shown = decimals if isinstance(decimals, int) else decimals.get("nDCG@5", 3)
    assert all(f"{mean:.{shown}f}" in found.to_markdown() for mean in exact.means["nDCG@5"])
    assert f"{exact.means.at['a', 'nDCG@5']:.5f}" in found.to_markdown(digits=5)


def test_a_subset_equals_a_comparison_on_its_queries():
    some, found = TOPICS.iloc[5:25], ld.compare(VALUES, baseline="b")
    expected = pt.Experiment(RUNS, some, QRELS, ["map"], baseline="b")
    assert_same(found.subset(some["qid"]), expected)
    with pytest.raises(ValueError, match="'x'"):
        found.subset(["x"])


def told(**arguments):
    return told_of(ld.ComparisonWarning, lambda: ld.compare(**{"values": VALUES, "baseline": "b", **arguments}))


def test_equal_systems_equal_seeds_and_few_queries_cause_warnings():
    assert told() == []
    few = values(topics=TOPICS.head(5))
    assert told(values=few, baseline=None) == []
    queries, p_value = told(values=few, test="wilcoxon")
    assert "5 queries" in queries
    assert "0.0625" in p_value  # the smallest p-value of 5 queries, 2 / 2^5
    same = values({**RUNS, "twin": RUNS["b"]})
    [equal] = told(values=same)
    assert equal.startswith("twin and b ")
    assert told(values=same, baseline="a") == []
    [seeds] = told(values=same, baseline="a", seeds={"repeated": ["b", "c", "twin"]})
    assert "repeated" in seeds


BAD = [
    ({"values": VALUES.drop(columns="qid")}, "qid"),
    ({"values": VALUES.assign(value=float("nan"))}, "values"),
    ({"values": pd.concat([VALUES, VALUES.query("name == 'c' and qid == 'q7'")])}, "'c' for the qid 'q7' and map"),
    ({"values": VALUES.query("name != 'c' or qid != 'q7'")}, "map of 'c' for the qid 'q7'"),
    ({"measures": ["map", AP]}, "measures='AP'"),
    ({"baseline": "x"}, "'x'"),
    ({"baseline": 0}, "0 must be one of the systems d, b, c, a"),
    ({"partner": {"a": "x"}}, "'x'"),
    ({"partner": {"x": "a"}}, "'x'"),
    ({"seeds": {"s": ["a", "x"]}}, "'x', which must be one of d, b, c, a"),
    ({"seeds": {"s": ["a", "b"], "t": ["b"]}}, "'b' twice"),
    ({"seeds": {"c": ["a", "b"]}}, "'c'"),
    ({"seeds": {"s": ["a", "b"]}, "baseline": "a"}, "'a'"),
    ({"correction": "x", "baseline": "a"}, "correction='x'"),
    ({"correction": "holm"}, "correction='holm'"),
    ({"test": "x"}, "test='x'"),
    ({"alpha": 5}, "alpha=5"),
    ({"margin": 0}, "margin=0"),
    ({"resamples": 0}, "resamples=0"),
    ({"round": -1}, "round=-1"),
    ({"round": {"ndcg": 2}}, "round='ndcg'"),
]


@pytest.mark.parametrize(("changes", "word"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_errors_name_the_wrong_argument(changes, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        ld.compare(**{"values": VALUES, **changes})
