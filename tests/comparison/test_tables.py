"""Tables in the papers' layout: Markdown, LaTeX, notebooks and print."""

import re

import numpy as np
import pytest

from pyterrier_longdoc.comparison import Comparison, Statistics, paper_table


def made_up(**options):
    """Three systems on eight queries: FirstP 0.5 everywhere, a better one, a slightly worse one."""
    first = np.full((1, 8, 2), 0.5)
    wobble = np.array([0.0, 0.1] * 4)[None, :, None]
    values = {"FirstP": first, "MaxP_1": first + 0.1 + wobble, "P & 50%": first - 0.049 + wobble}
    return Comparison(values, [f"q{i}" for i in range(8)], ["nDCG@10", "AP"], Statistics(**options))


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
    text = paper_table({"one": results, "other": other}).to_markdown()
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
    two = Comparison(fewer, two.qids, two.measures, Statistics(("P & 50%",), {"P & 50%": "FirstP"}, alpha=0.01))
    table = paper_table({"TIME": one, "Robust04": two})
    frame = table.frame()
    assert frame.columns.tolist() == ["TIME nDCG@10", "TIME AP", "Robust04 nDCG@10", "Robust04 AP", "Average gain"]
    assert frame.loc["MaxP_1"].tolist()[2:] == ["-", "-", "+30.0%"]
    assert "alpha 0.05, 0.01" in table.to_markdown()
    with pytest.raises(ValueError, match="results 'b'"):
        paper_table({"a": one, "b": one.retest(baseline=["FirstP"])})
    assert paper_table(one, average=False).frame().columns.tolist() == ["nDCG@10", "AP"]


def test_special_characters_in_names_are_escaped_in_latex():
    results = Comparison({"a|b <c>": np.full((1, 3, 1), 0.5)}, ["1", "2", "3"], ["P(rel>1)@5"])
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
