"""Tables in the papers' layout, and the results object."""

import numpy as np
import pandas as pd
import pytest

from pyterrier_longdoc.experiment import Experiment, ExperimentResults, Statistics, paper_table

from ..support import synthetic

TOPICS, QRELS = synthetic.collection(40)

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def made_up(**options):
    """Three systems on eight queries: FirstP 0.5 everywhere, a better one, a slightly worse one."""
    first = np.full((1, 8, 2), 0.5)
    wobble = np.array([0.0, 0.1] * 4)[None, :, None]
    values = {"FirstP": first, "MaxP_1": first + 0.1 + wobble, "P & 50%": first - 0.049 + wobble}
    seeds = {name: [None] for name in values}
    return ExperimentResults(values, seeds, [f"q{i}" for i in range(8)], ["nDCG@10", "AP"], Statistics(**options))


OPTIONS = {"baselines": ("P & 50%",), "partner": {"MaxP_1": "FirstP", "P & 50%": "FirstP"}}


def test_markdown():
    # Means: 0.5; 0.5 + 0.1 + 0.05 = 0.65, +30 %; 0.5 - 0.049 + 0.05 = 0.501, +0.2 %.
    # The first differs from FirstP by 0.15 +- 0.05, the second by 0.001 +- 0.05; from one another by 0.149 always.
    assert made_up(**OPTIONS).to_markdown().splitlines() == [
        "| System | nDCG@10 | AP | Average gain |",
        "| --- | ---: | ---: | ---: |",
        "| FirstP | 0.500 | 0.500 | - |",
        "| MaxP\\_1 | **0.650**<sup>ab</sup> (+30.0%) | **0.650**<sup>ab</sup> (+30.0%) | +30.0% |",
        "| P & 50% | 0.501 (+0.2%) | 0.501 (+0.2%) | +0.2% |",
        "",
        "Best in bold. In parentheses: gain over its partner. Significant difference: <sup>a</sup> from its partner, "
        "<sup>b</sup> from P & 50% (paired t-test on per-query values, alpha 0.05).",
    ]


def test_latex():
    assert made_up(**OPTIONS, correction="holm").to_latex().splitlines() == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"System & nDCG@10 & AP & Average gain \\",
        r"\midrule",
        r"FirstP & 0.500 & 0.500 & - \\",
        r"MaxP\_1 & \textbf{0.650}$^{ab}$ (+30.0\%) & \textbf{0.650}$^{ab}$ (+30.0\%) & +30.0\% \\",
        r"P \& 50\% & 0.501 (+0.2\%) & 0.501 (+0.2\%) & +0.2\% \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
        r"Best in bold. In parentheses: gain over its partner. Significant difference: $^{a}$ from its partner, "
        r"$^{b}$ from P \& 50\% (paired t-test on per-query values, holm correction over systems, alpha 0.05).",
    ]


def test_notebooks_get_the_same_cells():
    results = made_up(**OPTIONS)
    styler, html = results.styled(digits=2), results._repr_html_()
    assert styler.data.loc["MaxP_1", "AP"] == "<b>0.65</b><sup>ab</sup> (+30.0%)"
    assert "<b>0.65</b><sup>ab</sup>" in styler.to_html()
    assert "<th>P &amp; 50%</th>" in html
    assert "<b>0.650</b><sup>ab</sup> (+30.0%)" in html


def test_without_partners_the_gain_is_over_the_first_baseline():
    lines = made_up(baselines=("FirstP", "P & 50%")).to_markdown(digits=2).splitlines()
    assert lines[0] == "| System | nDCG@10 | AP |"
    assert lines[3] == "| MaxP\\_1 | **0.65**<sup>ab</sup> (+30.0%) | **0.65**<sup>ab</sup> (+30.0%) |"
    assert "<sup>a</sup> from FirstP, <sup>b</sup> from P & 50%" in lines[-1]
    assert made_up().to_markdown().splitlines()[-1] == "Best in bold."


def test_equal_at_the_digits_shown_are_both_best():
    lines = made_up().retest().to_markdown(digits=0).splitlines()
    assert [line.count("**") for line in lines[2:5]] == [0, 4, 4]  # 0.5 rounds to 0, 0.65 and 0.501 to 1


def test_several_test_sets_side_by_side():
    one, two = made_up(**OPTIONS), made_up(**OPTIONS, alpha=0.01)
    del (fewer := dict(two.values))["MaxP_1"]
    two = ExperimentResults(
        fewer, two.seeds, two.qids, two.measures, Statistics(("P & 50%",), {"P & 50%": "FirstP"}, alpha=0.01)
    )
    table = paper_table({"TIME": one, "Robust04": two})
    frame = table.frame()
    assert frame.columns.tolist() == ["TIME nDCG@10", "TIME AP", "Robust04 nDCG@10", "Robust04 AP", "Average gain"]
    assert frame.loc["MaxP_1"].tolist()[2:] == ["-", "-", "+30.0%"]
    assert "alpha 0.05, 0.01" in table.to_markdown()
    with pytest.raises(ValueError, match="'b' differs from the other results in baselines"):
        paper_table({"a": one, "b": one.retest(baselines=["FirstP"])})


def test_the_order_of_columns_is_that_of_pyterrier():
    systems = {name: synthetic.run(TOPICS, 1.0, seed) for seed, name in enumerate(["a", "b", "c"])}
    results = Experiment(systems, TOPICS, QRELS, ["AP"], baselines=["a", "b"], partner={"c": "b"}, correction="fdr_bh")
    assert results.table.columns.tolist() == [
        "name", "AP",
        "AP gain", "AP gain p-value", "AP gain reject", "AP gain p-value corrected",
        "AP + (a)", "AP - (a)", "AP p-value (a)", "AP reject (a)", "AP p-value corrected (a)",
        "AP + (b)", "AP - (b)", "AP p-value (b)", "AP reject (b)", "AP p-value corrected (b)",
    ]  # fmt: skip
    one = results.retest(baselines=["b"], partner={}).table.set_index("name")
    two = results.table.set_index("name")
    assert two["AP p-value (b)"].tolist() == pytest.approx(one["AP p-value"].tolist(), nan_ok=True)
    # The partner's family has one comparison only: nothing to correct.
    assert two.loc["c", "AP gain p-value corrected"] == two.loc["c", "AP gain p-value"] == one.loc["c", "AP p-value"]


def test_comparisons_by_hand():
    frame = made_up(**OPTIONS).comparisons
    row = frame[(frame["name"] == "P & 50%") & (frame["kind"] == "partner") & (frame["measure"] == "AP")].iloc[0]
    differences = np.array([-0.049, 0.051] * 4)
    assert row["difference"] == pytest.approx(differences.mean())
    assert row["gain"] == pytest.approx(0.501 / 0.5 - 1)
    assert (row["+"], row["-"]) == (4, 4)
    assert row["effect size"] == pytest.approx(differences.mean() / differences.std(ddof=1))
    assert row["low"] < 0 < row["high"]
    assert row["gain low"] == pytest.approx(row["low"] / 0.5)
    assert not row["equivalent"]
    # Within 20 %, i.e. 0.1, and a standard error of 0.05 / sqrt(7): t = (0.001 - 0.1) / 0.019 = -5.2.
    wider = made_up(**OPTIONS, margin=0.2).comparisons
    assert wider[wider["name"] == "P & 50%"]["equivalent"].all()


def test_a_subset_is_an_experiment_of_its_own():
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(systems, TOPICS, QRELS, ["AP"], baselines=["a"])
    some = TOPICS.iloc[5:25]
    expected = Experiment(systems, some, QRELS, ["AP"], baselines=["a"])
    pd.testing.assert_frame_equal(results.subset(some["qid"]).table, expected.table)
    with pytest.raises(ValueError, match="none of these qids"):
        results.subset(["x"])
