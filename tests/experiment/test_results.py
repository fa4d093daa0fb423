"""Tables in the papers' layout, comparisons, folders of results, groups of queries."""

import json
import re

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import AP, nDCG
from scipy import stats

import pyterrier_longdoc as ld
import pyterrier_longdoc.experiment as xp
from pyterrier_longdoc.common.citations import entries, papers_of_pipeline
from pyterrier_longdoc.data.collection import CollectionParts, PositionedCollection
from pyterrier_longdoc.experiment import Experiment, ExperimentResults, Statistics

from ..support import synthetic, tiny

METRICS = ["nDCG@5", "AP"]
TOPICS, QRELS = synthetic.collection(40)
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(3)]

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def made_up(**options):
    """Three systems on eight queries: FirstP 0.5 everywhere, a better one, a slightly worse one."""
    first = np.full((1, 8, 2), 0.5)
    wobble = np.array([0.0, 0.1] * 4)[None, :, None]
    values = {"FirstP": first, "MaxP_1": first + 0.1 + wobble, "P & 50%": first - 0.049 + wobble}
    seeds = {name: [None] for name in values}
    return ExperimentResults(values, seeds, [f"q{i}" for i in range(8)], ["nDCG@10", "AP"], Statistics(**options))


OPTIONS = {"baseline": ("P & 50%",), "partner": {"MaxP_1": "FirstP", "P & 50%": "FirstP"}}


def test_results_are_printed_as_markdown():
    # Means: 0.5; 0.5 + 0.1 + 0.05 = 0.65, +30 %; 0.5 - 0.049 + 0.05 = 0.501, +0.2 %.
    # The first differs from FirstP by 0.15 +- 0.05, the second by 0.001 +- 0.05; from one another by 0.149 always.
    text = made_up(**OPTIONS).to_markdown()
    assert text.splitlines()[:-2] == [
        "| System | nDCG@10 | AP | Average gain |",
        "| --- | ---: | ---: | ---: |",
        "| FirstP | 0.500 | 0.500 | - |",
        "| MaxP\\_1 | **0.650**<sup>ab</sup> (+30.0%) | **0.650**<sup>ab</sup> (+30.0%) | +30.0% |",
        "| P & 50% | 0.501 (+0.2%) | 0.501 (+0.2%) | +0.2% |",
    ]
    assert letters(text) == {"a": "FirstP", "b": "P & 50%"}
    assert all(words in text.splitlines()[-1] for words in ("paired t-test", "alpha 0.05"))


def test_print_shows_means_gains_and_significance():
    *lines, note = str(made_up(**OPTIONS)).splitlines()
    assert [line.split() for line in lines] == [
        ["System", "nDCG@10", "AP", "Average", "gain"],
        ["FirstP", "0.500", "0.500", "-"],
        ["MaxP_1", "0.650^ab", "(+30.0%)", "0.650^ab", "(+30.0%)", "+30.0%"],
        ["P", "&", "50%", "0.501", "(+0.2%)", "0.501", "(+0.2%)", "+0.2%"],
    ]
    assert "^a from FirstP, ^b from P & 50% (paired t-test" in note
    assert str(made_up()).splitlines()[-1].split() == ["P", "&", "50%", "0.501", "0.501"]


def test_results_are_printed_as_latex():
    lines = made_up(**OPTIONS, correction="holm").to_latex().splitlines()
    assert lines[:-2] == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"System & nDCG@10 & AP & Average gain \\",
        r"\midrule",
        r"FirstP & 0.500 & 0.500 & - \\",
        r"MaxP\_1 & \textbf{0.650}$^{ab}$ (+30.0\%) & \textbf{0.650}$^{ab}$ (+30.0\%) & +30.0\% \\",
        r"P \& 50\% & 0.501 (+0.2\%) & 0.501 (+0.2\%) & +0.2\% \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert all(words in lines[-1] for words in (r"$^{b}$ from P \& 50\%", "paired t-test", "holm", "alpha 0.05"))


def test_several_partners_are_named_in_the_note():
    text = made_up(partner={"MaxP_1": "FirstP", "P & 50%": "MaxP_1"}).to_markdown()
    assert "(FirstP for MaxP\\_1; MaxP\\_1 for P & 50%)" in text


def letters(text):
    """What a table in Markdown says that its letters stand for."""
    return dict(re.findall(r"<sup>(\w)</sup> from (.+?)(?=, <sup>| \()", text.splitlines()[-1]))


def test_a_partner_that_is_also_a_baseline_has_one_letter():
    partner = OPTIONS["partner"]
    results = made_up(baseline=("P & 50%", "FirstP"), partner=partner)
    text = results.to_markdown()
    assert letters(text) == {"a": "P & 50%", "b": "FirstP"}
    assert "**0.650**<sup>ab</sup> (+30.0%)" in text
    assert "gain over FirstP." in text
    assert letters(made_up(baseline=("FirstP",), partner=partner).to_markdown()) == {"a": "FirstP"}
    other = made_up(baseline=("P & 50%", "FirstP"), partner={"MaxP_1": "P & 50%"})
    text = xp.paper_table({"one": results, "other": other}).to_markdown()
    assert letters(text) == {"a": "its partner", "b": "P & 50%", "c": "FirstP"}
    assert text.count("<sup>abc</sup>") == 4


def test_the_notebook_table_has_the_same_cells():
    results = made_up(**OPTIONS)
    html = results._repr_html_()
    assert results.styled(digits=2).data.loc["MaxP_1", "AP"] == "<b>0.65</b><sup>ab</sup> (+30.0%)"
    assert ">P &amp; 50%</th>" in html
    assert "<b>0.650</b><sup>ab</sup> (+30.0%)" in html


def test_without_partners_the_gain_is_over_the_first_baseline():
    text = made_up(baseline=("FirstP", "P & 50%")).to_markdown(digits=2)
    assert text.splitlines()[3] == "| MaxP\\_1 | **0.65**<sup>ab</sup> (+30.0%) | **0.65**<sup>ab</sup> (+30.0%) |"
    assert letters(text) == {"a": "FirstP", "b": "P & 50%"}


def test_all_systems_with_the_best_rounded_value_are_bold():
    lines = made_up().to_markdown(digits=0).splitlines()
    assert [line.count("**") for line in lines[2:5]] == [0, 4, 4]  # 0.5 rounds to 0, 0.65 and 0.501 to 1


def test_several_test_sets_are_shown_side_by_side():
    one, two = made_up(**OPTIONS), made_up(**OPTIONS, alpha=0.01)
    del (fewer := dict(two.values))["MaxP_1"]
    two = ExperimentResults(
        fewer, two.seeds, two.qids, two.measures, Statistics(("P & 50%",), {"P & 50%": "FirstP"}, alpha=0.01)
    )
    table = xp.paper_table({"TIME": one, "Robust04": two})
    frame = table.frame()
    assert frame.columns.tolist() == ["TIME nDCG@10", "TIME AP", "Robust04 nDCG@10", "Robust04 AP", "Average gain"]
    assert frame.loc["MaxP_1"].tolist()[2:] == ["-", "-", "+30.0%"]
    assert "alpha 0.05, 0.01" in table.to_markdown()
    with pytest.raises(ValueError, match="results 'b'"):
        xp.paper_table({"a": one, "b": one.retest(baseline=["FirstP"])})
    assert xp.paper_table(one, average=False).frame().columns.tolist() == ["nDCG@10", "AP"]


def test_columns_are_in_the_order_of_pyterrier():
    systems = dict(zip("abc", RUNS, strict=True))
    results = Experiment(systems, TOPICS, QRELS, ["AP"], baseline=["a", "b"], partner={"c": "b"}, correction="fdr_bh")
    assert results.table.columns.tolist() == [
        "name", "AP",
        "AP gain", "AP gain p-value", "AP gain reject", "AP gain p-value corrected",
        "AP + (a)", "AP - (a)", "AP p-value (a)", "AP reject (a)", "AP p-value corrected (a)",
        "AP + (b)", "AP - (b)", "AP p-value (b)", "AP reject (b)", "AP p-value corrected (b)",
    ]  # fmt: skip
    one = results.retest(baseline=["b"], partner={}).table.set_index("name")
    two = results.table.set_index("name")
    assert two["AP p-value (b)"].tolist() == pytest.approx(one["AP p-value"].tolist(), nan_ok=True)
    # The partner's family has one comparison only: nothing to correct.
    assert two.loc["c", "AP gain p-value corrected"] == two.loc["c", "AP gain p-value"] == one.loc["c", "AP p-value"]


def test_baselines_are_given_by_name_or_position():
    systems = {"a": RUNS[0], "b": RUNS[1]}
    tables = [Experiment(systems, TOPICS, QRELS, ["AP"], baseline=given).table for given in ("b", 1, ["b"], (1,))]
    tables.append(Experiment(systems, TOPICS, QRELS, ["AP"]).retest(baseline="b").table)
    expected = pt.Experiment(systems, TOPICS, QRELS, [AP], baseline="b")
    for table in tables:
        pd.testing.assert_frame_equal(table, expected[table.columns])
    several = Experiment(systems, TOPICS, QRELS, ["AP"], baseline=["b", 0]).statistics
    assert several.baseline == ("b", "a")
    assert Experiment(systems, TOPICS, QRELS, ["AP"], baseline=None).statistics.baseline == ()


@pytest.mark.parametrize("decimals", [0, 2, {"AP": 1}, {"AP": 1, "nDCG@5": 4}])
def test_rounding_is_as_in_pyterrier(decimals, tmp_path):
    systems = {"a": RUNS[0], "b": RUNS[1]}
    results = Experiment(systems, TOPICS, QRELS, METRICS, baseline="a", round=decimals, save_dir=tmp_path)
    expected = pt.Experiment(systems, TOPICS, QRELS, [nDCG @ 5, AP], baseline="a", round=decimals)
    pd.testing.assert_frame_equal(results.table, expected[results.table.columns], check_exact=False, rtol=1e-12)
    exact = Experiment(systems, TOPICS, QRELS, METRICS, baseline="a")
    pd.testing.assert_frame_equal(results.comparisons, exact.comparisons)
    pd.testing.assert_frame_equal(ExperimentResults.load(tmp_path).table, results.table)
    shown = decimals if isinstance(decimals, int) else decimals.get("nDCG@5", 3)
    assert all(f"{mean:.{shown}f}" in results.to_markdown() for mean in exact.means["nDCG@5"])
    assert f"{exact.means.at['a', 'nDCG@5']:.5f}" in results.to_markdown(digits=5)


def test_special_characters_in_names_are_escaped_in_latex():
    results = ExperimentResults(
        {"a|b <c>": np.full((1, 3, 1), 0.5)}, {"a|b <c>": [None]}, ["1", "2", "3"], ["P(rel>1)@5"]
    )
    assert r"a\textbar{}b \textless{}c\textgreater{}" in results.to_latex()
    assert r"P(rel\textgreater{}1)@5" in results.to_latex()


def test_comparisons_equal_values_computed_by_hand():
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


def test_counts_are_sums_and_so_are_their_intervals():
    values = {"a": np.array([3.0, 5.0, 4.0, 6.0]).reshape(1, 4, 1), "b": np.full((1, 4, 1), 2.0)}
    seeds, qids = {"a": [None], "b": [None]}, ["1", "2", "3", "4"]
    results = ExperimentResults(values, seeds, qids, ["num_rel_ret"], Statistics(("b",)))
    row = results.comparisons.iloc[0]
    assert (row["mean"], row["reference mean"], row["difference"]) == (18, 8, 10)
    assert 4 * 1 <= row["low"] < 10 < row["high"] <= 4 * 4


def test_a_subset_equals_an_experiment_on_its_queries():
    systems = {"a": RUNS[0], "b": RUNS[1]}
    results = Experiment(systems, TOPICS, QRELS, ["AP"], baseline=["a"])
    some = TOPICS.iloc[5:25]
    expected = Experiment(systems, some, QRELS, ["AP"], baseline=["a"])
    pd.testing.assert_frame_equal(results.subset(some["qid"]).table, expected.table)
    with pytest.raises(ValueError, match="'x'"):
        results.subset(["x"])


def test_results_are_restored_from_their_folder(tmp_path):
    systems = {"NA": [RUNS[0], RUNS[1]], "b, c": RUNS[2]}
    results = Experiment(
        systems, TOPICS, QRELS, METRICS, baseline=["NA"], partner={"b, c": "NA"}, correction="holm", save_dir=tmp_path
    )
    loaded = ExperimentResults.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.table, results.table, check_exact=True)
    pd.testing.assert_frame_equal(loaded.comparisons, results.comparisons, check_exact=True)
    pd.testing.assert_frame_equal(loaded.checks, results.checks, check_dtype=False)
    assert loaded.to_latex() == results.to_latex() == (tmp_path / "table.tex").read_text()[:-1]
    assert loaded.settings == json.loads(json.dumps(results.settings))
    pd.testing.assert_frame_equal(loaded.run("NA", 1), RUNS[1], check_dtype=False, check_exact=True)
    with pytest.raises(ValueError, match="'NA' with seed 7"):
        loaded.run("NA", 7)
    with pytest.raises(ValueError, match="save_dir"):
        Experiment(systems, TOPICS, QRELS, METRICS).run("NA", 0)


def test_a_test_function_must_be_passed_again_when_loading(tmp_path):
    results = Experiment({"a": RUNS[0], "b": RUNS[1]}, TOPICS, QRELS, METRICS, baseline=[0], test=stats.ttest_ind)
    results.save(tmp_path)
    with pytest.raises(ValueError, match="ttest_ind"):
        ExperimentResults.load(tmp_path)
    loaded = ExperimentResults.load(tmp_path, test=stats.ttest_ind)
    with pytest.raises(ValueError, match="save_dir"):
        loaded.run("a")
    pd.testing.assert_frame_equal(loaded.table, results.table, check_exact=True)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.TruncationWarning")
def test_an_experiment_cites_models_and_collections(tmp_path):
    documents = {docno: {"docno": docno, "text": "a b"} for docno in RUNS[0]["docno"]}
    parts = CollectionParts(documents, TOPICS, QRELS, None)
    dataset = PositionedCollection("made-up", parts, papers=("zhu-2024-longembed",))
    retriever = pt.Transformer.from_df(RUNS[0])
    loaded = retriever >> dataset.text_loader() >> ld.FirstP(tiny.encoder(), max_query_len=8)
    loading = retriever >> ld.FirstP(tiny.encoder(), max_query_len=8, text_loader=dataset)
    expected = {"dai-2019-deeper", "boytsov-2025-positional", "zhu-2024-longembed"}
    for system in (loaded, loading, loaded):  # the last run is read from the folder
        results = Experiment(
            {"a": system, "given": RUNS[1]}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, save_mode="reuse"
        )
        assert {key for key in entries() if f"{{{key}," in results.citations()} == expected
    assert ExperimentResults.load(tmp_path).citations() == results.citations()
    dataset = pt.get_dataset("irds:msmarco-document/trec-dl-2019")
    assert any("{Bajaj2016Msmarco," in paper for paper in papers_of_pipeline(ld.MaxP(text_loader=dataset)))
