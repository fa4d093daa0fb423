"""The list of claims: every verdict of every claim by made-up outcomes, and the papers' figures."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

import pyterrier_longdoc as ld

from .claims import (
    AT_CHANCE,
    CLAIMS,
    DEBIASED,
    LEARNING,
    LITTLE,
    LONG,
    OVERFITTED,
    RISE,
    ROBUST,
    STUDENTS,
    as_rst,
    as_text,
    needed,
    published,
    verdicts,
)
from .evidence import COLLECTIONS, FIGURES, Cell
from .verdict import CONTRADICTED, NOT_REACHED, NOT_RUN, NOT_SEEN, SEEN, UNDECIDED

PAPERS = Path(__file__).resolve().parents[4] / "shared" / "papers"

WINDOWS = ("", " 32/24", " 128/96")
NAMES = [claim.name for claim in CLAIMS]


def cells(names, trained, test, mean):
    return {Cell(name, trained, test): mean for name in names}


def debiased(trained):
    """Means that make the claim seen, contradict it, and show nothing."""
    before = cells(DEBIASED, "early", "far", 0.4) | cells([*ROBUST, *DEBIASED], "early", "early", 0.6)
    helped, lost = cells(DEBIASED, trained, "far", 0.6), cells([*ROBUST, *DEBIASED], trained, "early", 0.54)
    return {
        SEEN: before | helped | lost,
        CONTRADICTED: before | helped | lost | {Cell("CEDR-KNRM", trained, "far"): 0.3},
        NOT_SEEN: before | helped | lost | {Cell("MaxP", trained, "early"): 0.59},  # by less than 5 %
    }


def windows(pretr, q):
    means = zip(
        (f"{name}{w}" for name in ("PARADE PRETR", "PARADE PRETR-Q") for w in WINDOWS), (*pretr, *q), strict=True
    )
    return {Cell(name, "early", "early"): mean for name, mean in means}


def gains(early, uniform, far):
    tests = zip(COLLECTIONS, (early, uniform, far), strict=True)
    return {Cell(n, "early", t): 0.4 + (n == "MaxP") * gain for t, gain in tests for n in ("FirstP", "MaxP")}


CHANCE = {
    Cell("random", "none", "far"): 0.3,
    **{Cell("MaxP", trained, "far"): 0.7 for trained in ("early", "early>far")},
    Cell("FirstP", "early", "far"): 0.2,
    Cell("FirstP", "early>far", "far"): 0.31,
}
ROBUSTLY = {
    Cell("random", "none", "far"): 0.3,
    **cells(ROBUST, "early", "far", 0.65),
    **cells(ROBUST, "early>far", "far", 0.7),
    Cell("PARADE RAND", "early", "far"): 0.5,
    Cell("PARADE RAND", "early>far", "far"): 0.8,
}
OVERFIT = {
    **cells(OVERFITTED, "early", "far", 0.4),
    **cells(OVERFITTED, "early>far", "far", 0.8),
    **cells(["MaxP"], "early", "far", 0.6),
    **cells(["MaxP"], "early>far", "far", 0.65),
}
LEARNT = cells(LEARNING, "early>far>far", "far", 0.8) | cells(["MaxP"], "early>far>far", "far", 0.65)
EARLY = cells([*LONG, "FirstP", "LongP, 128 tokens", "LongP (Longformer), 128 tokens"], "early", "early", 0.5)
CHUNKS = cells([f"PARADE attn, {n} chunks" for n in (4, 5, 6)], "early", "early", 0.5)
STUDIED = cells(STUDENTS, "early", "early", 0.5)
BEST = cells(["FirstP", "MaxP"], "uniform", "uniform", 0.5) | cells(["BeST"], "uniform", "uniform", 0.6)

MEANS = {
    NAMES[0]: {SEEN: CHANCE, CONTRADICTED: CHANCE | {Cell("FirstP", "early>far", "far"): 0.5}},
    NAMES[1]: {
        SEEN: ROBUSTLY,
        CONTRADICTED: ROBUSTLY | {Cell("MaxP", "early>far", "far"): 0.95},
        NOT_SEEN: ROBUSTLY | {Cell("MaxP", "early", "far"): 0.3, Cell("MaxP", "early>far", "far"): 0.4},
    },
    NAMES[2]: {
        SEEN: OVERFIT,
        CONTRADICTED: OVERFIT | {Cell("LongP", "early", "far"): 0.7},
        NOT_SEEN: OVERFIT | {Cell("LongP", "early>far", "far"): 0.67},  # above, by less than 9.2 %
    },
    NAMES[3]: {SEEN: EARLY, CONTRADICTED: EARLY | {Cell("LongP", "early", "early"): 0.56}},
    NAMES[4]: debiased("rotated"),
    NAMES[5]: debiased("uniform"),
    NAMES[6]: {SEEN: CHUNKS, CONTRADICTED: CHUNKS | {Cell("PARADE attn, 6 chunks", "early", "early"): 0.6}},
    NAMES[7]: {
        SEEN: windows((0.3, 0.5, 0.6), (0.5, 0.5, 0.5)),
        CONTRADICTED: windows((0.5, 0.5, 0.5), (0.3, 0.5, 0.6)),
        NOT_SEEN: windows((0.3, 0.5, 0.6), (0.3, 0.5, 0.6)),
    },
    NAMES[8]: {
        SEEN: STUDIED | cells(STUDENTS, "distilled", "early", 0.6),
        CONTRADICTED: STUDIED | dict(zip(cells(STUDENTS, "distilled", "early", 0), (0.6, 0.4), strict=True)),
        NOT_SEEN: STUDIED | cells(STUDENTS, "distilled", "early", 0.5),
    },
    NAMES[9]: {
        SEEN: BEST,
        CONTRADICTED: BEST | {Cell("MaxP", "uniform", "uniform"): 0.7},
        NOT_SEEN: BEST | {Cell("MaxP", "uniform", "uniform"): 0.6},
    },
    NAMES[11]: {
        SEEN: LEARNT,
        CONTRADICTED: LEARNT | {Cell("LongP", "early>far>far", "far"): 0.6},
        NOT_SEEN: LEARNT | {Cell("LongP", "early>far>far", "far"): 0.67},
    },
    NAMES[10]: {SEEN: gains(0.0, 0.2, 0.4), CONTRADICTED: gains(0.4, 0.2, 0.0), NOT_SEEN: gains(0.2, 0.2, 0.2)},
}
"""Means of cells, by claim and verdict."""


def made_up(means, *, queries=300, noise=0.01, seeds=2, seed=0):
    """Outcomes with these means, exactly so: queries differ, and systems hardly."""
    rng, frames = np.random.default_rng(seed), []
    for cell, mean in means.items():
        for s in range(1 if cell.trained == "none" else seeds):
            rr = rng.normal(0, noise, queries)
            rr = np.clip(mean + rr - rr.mean(), 0, 1)
            qids = [f"q{i}" for i in range(queries)]
            frames.append(pd.DataFrame({**cell._asdict(), "seed": s, "qid": qids, "rr": rr}))
    return pd.concat(frames, ignore_index=True)


def settled(means):
    """Three seeds, and another epoch of the last stage that changes nothing."""
    again = {
        cell._replace(trained=f"{cell.trained}>{cell.trained.split('>')[-1]}"): mean
        for cell, mean in means.items()
        if cell.trained != "none"
    }
    return made_up({**again, **means}, seeds=3)


def figures(precision=(0.3, 0.4, 0.5), n=1000):
    rows = [("BeST", "BeST", i, "segment precision", p, n) for i, p in enumerate(precision, 1)]
    shares = zip(COLLECTIONS, (0.95, 0.4, 0.05), strict=True)
    rows += [("positions", "best_chunk", test, "share in first window (estimated)", share, n) for test, share in shares]
    return pd.DataFrame(rows, columns=FIGURES)


def listed(name, outcomes, given=None):
    """The one claim of this name: its row, and its comparisons."""
    found = verdicts(outcomes, figures() if given is None else given, claims=[CLAIMS[NAMES.index(name)]])
    return found.claims.iloc[0], found.comparisons


@pytest.mark.parametrize(("name", "expected"), [(n, v) for n in NAMES for v in (SEEN, CONTRADICTED, NOT_SEEN)])
def test_verdicts_that_can_be_reached(name, expected):
    claim = CLAIMS[NAMES.index(name)]
    if expected == NOT_SEEN and all(comparison.claimed.tails == 1 for comparison in claim.comparisons):
        assert expected not in MEANS[name]  # of margins alone
        return
    row, comparisons = listed(name, settled(MEANS[name][expected]))
    assert row["verdict"] == expected, comparisons.T
    assert (row["run"], row["to run"]) == (len(claim.comparisons), "")
    assert set(comparisons["verdict"]) <= {SEEN, expected}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_contradicted_by_too_few_seeds_or_epochs(name):
    """Intervals know of queries alone, and a model that is still learning says nothing of what it can."""
    contradicting, trained = MEANS[name][CONTRADICTED], settled(MEANS[name][CONTRADICTED])
    other_epoch = {cell: mean * 0.9 for cell, mean in contradicting.items() if cell.trained != "none"}
    again = made_up(other_epoch, seeds=3)
    again["trained"] += ">" + again["trained"].str.split(">").str[-1]
    for outcomes in (
        trained[trained["seed"] < 2],
        made_up(contradicting, seeds=3),  # not tried
        pd.concat([made_up(contradicting, seeds=3), again]),
    ):
        row, comparisons = listed(name, outcomes)
        assert row["verdict"] == NOT_REACHED, comparisons.T
        assert set(comparisons["verdict"]) <= {SEEN, NOT_REACHED}


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.79, CONTRADICTED), (0.93, CONTRADICTED), (0.97, SEEN), (1.03, SEEN), (1.07, CONTRADICTED)],
)
def test_little_to_gain_is_also_little_to_lose(share, expected):
    """A model far below its FirstP is no evidence that little is to be gained."""
    means = EARLY | {Cell("PARADE attn", "early", "early"): 0.5 * share}
    row, comparisons = listed("Little to gain on early", settled(means))
    assert row["verdict"] == expected, comparisons.T


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("queries", "noise", "n"), [(1, 0.01, np.nan), (4, 0.3, 10)])
def test_few_queries_leave_claims_undecided(name, queries, noise, n):
    outcomes = made_up(MEANS[name][SEEN], queries=queries, noise=noise)
    row, comparisons = listed(name, outcomes, figures(n=n))
    assert row["verdict"] == UNDECIDED, comparisons.T


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_run_is_said(name):
    nothing = made_up({Cell("BM25", "none", "far"): 0.5})
    row, comparisons = listed(name, nothing, pd.DataFrame(columns=FIGURES))
    assert set(comparisons["verdict"]) == {row["verdict"]} == {NOT_RUN}
    assert row["run"] == 0
    assert comparisons["to run"].str.len().min() > 10
    assert all(part in row["to run"] for text in comparisons["to run"] for part in text.split("; "))


@pytest.mark.parametrize(("firstp", "expected"), [(0.19, SEEN), (0.2, UNDECIDED), (0.21, CONTRADICTED)])
def test_a_margin_is_never_a_share_of_a_loss(firstp, expected):
    """MaxP is below chance: FirstP, which is at chance, need not be below it as well."""
    means = {Cell("random", "none", "far"): 0.2}
    for trained in ("early", "early>far"):
        means |= {Cell("MaxP", trained, "far"): 0.1, Cell("FirstP", trained, "far"): firstp}
    row, comparisons = listed(NAMES[0], settled(means))
    assert row["verdict"] == expected, comparisons.T
    assert set(comparisons["claimed"]) == {"at most +0.000"}


def test_claims_that_were_partly_run():
    means = {cell: mean for cell, mean in OVERFIT.items() if cell.system in ("MaxP", "LongP", "CEDR-KNRM")}
    del means[Cell("CEDR-KNRM", "early>far", "far")]
    row, comparisons = listed(NAMES[2], made_up(means))
    assert (row["verdict"], row["run"], row["of"]) == (SEEN, 3, 2 * len(OVERFITTED))
    assert "CEDR-KNRM (early>far) on far" in row["to run"]
    assert "CEDR-KNRM (early) on far" not in row["to run"]
    assert "MaxP" not in row["to run"]
    assert comparisons["verdict"].value_counts().to_dict() == {NOT_RUN: 2 * len(OVERFITTED) - 3, SEEN: 3}
    text = as_text(verdicts(made_up(means)))
    assert "3. Other long models overfit, and learn: SEEN (3 OF 20 RUN)" in text
    assert "4. Little to gain on early: NOT RUN\n" in text


def test_p_values_intervals_and_margins_by_hand():
    rng = np.random.default_rng(1)
    x, y, z = 0.5 + 0.1 * rng.normal(size=(3, 2, 60)) + np.array([0.0, 0.02, 0.035])[:, None, None]
    values = {Cell("FirstP", "early", "early"): x, Cell("MaxP", "early", "early"): y, Cell("AvgP", "early", "early"): z}
    rows = [
        {**cell._asdict(), "seed": s, "qid": i, "rr": rr}
        for cell, of_cell in values.items()
        for s, of_seed in enumerate(of_cell)
        for i, rr in enumerate(of_seed)
    ]
    _, comparisons = listed(NAMES[3], pd.DataFrame(rows))
    run = comparisons[comparisons["verdict"] != NOT_RUN].set_index("comparison")
    assert [label.split()[0] for label in run.index] == ["AvgP", "MaxP"]
    margin = 0.05 * x.mean()
    # Of the two bounds the one that is nearer.
    tests = [
        max((stats.ttest_1samp(one.mean(0) - x.mean(0), bound) for bound in (-margin, margin)), key=lambda t: t.pvalue)
        for one in (z, y)
    ]
    p = np.array([test.pvalue / 2 for test in tests])
    assert run["p-value"].to_numpy() == pytest.approx(multipletests(p, method="holm")[1])
    assert run["difference"].to_numpy() == pytest.approx([z.mean() - x.mean(), y.mean() - x.mean()])
    step = {0: 0.025, 1: 0.05 if p.min() < 0.025 else 0.025}
    for i, test in zip(np.argsort(np.argsort(p)), tests, strict=True):
        low, high = test.confidence_interval(1 - 2 * step[int(i)])
        row = run.iloc[tests.index(test)]
        assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))
    assert run["claimed"].unique().tolist() == [f"-{margin:.3f} to +{margin:.3f}"]
    assert (run["queries"].unique().tolist(), run["seeds"].unique().tolist()) == ([60], [2])


def test_a_single_difference_has_the_interval_of_the_paired_t_test():
    rows = made_up({Cell(STUDENTS[0], "early", "early"): 0.5, Cell(STUDENTS[0], "distilled", "early"): 0.52}, noise=0.1)
    means = rows.groupby(["trained", "qid"])["rr"].mean()
    test = stats.ttest_rel(means["distilled"], means["early"])
    run, _ = listed(NAMES[8], rows)[1].to_dict("records")
    assert run["p-value"] == pytest.approx(test.pvalue)
    assert (run["low"], run["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)))
    spread = (means["distilled"] - means["early"]).std()
    power = TTestPower().power(run["detectable"] / spread, nobs=300, alpha=0.05, alternative="two-sided")
    assert power == pytest.approx(0.8, abs=1e-5)  # the other tail


def test_order_of_rows_makes_no_difference():
    rows, claims = made_up({**OVERFIT, **ROBUSTLY, **BEST}, noise=0.1, seeds=3), [CLAIMS[1], CLAIMS[9], CLAIMS[10]]
    one = verdicts(rows, figures(), claims=claims)
    other = verdicts(rows.sample(frac=1, random_state=7), figures()[::-1], claims=claims)
    pd.testing.assert_frame_equal(one.claims, other.claims)
    pd.testing.assert_frame_equal(one.comparisons, other.comparisons)


def test_more_seeds_are_averaged_for_each_query():
    rows = made_up(BEST, noise=0.2, seeds=3)
    means = rows.groupby(["system", "trained", "test", "qid"], as_index=False)["rr"].mean().assign(seed=0)
    one, other = listed(NAMES[9], rows)[1], listed(NAMES[9], means)[1]
    pd.testing.assert_frame_equal(one.drop(columns="seeds"), other.drop(columns="seeds"))
    assert (one["seeds"].tolist(), other["seeds"].tolist()) == ([3, 3, 1], [1, 1, 1])


def test_frames_may_come_from_files(tmp_path):
    costs = pd.DataFrame([("cost", "MaxP, early, far", 0, "CPU seconds", 12.5, 1)], columns=FIGURES)
    rows, given, claims = made_up({**BEST, **gains(0.0, 0.2, 0.4)}), pd.concat([costs, figures()]), CLAIMS[9:11]
    found = []
    for name, frame in (("outcomes", rows), ("figures", given)):
        frame.to_csv(tmp_path / f"{name}.csv.gz", index=False)
        found.append(pd.read_csv(tmp_path / f"{name}.csv.gz"))
    one, other = verdicts(rows, given, claims=claims), verdicts(*found, claims=claims)
    pd.testing.assert_frame_equal(one.comparisons, other.comparisons)
    assert one.claims["verdict"].tolist() == [SEEN, SEEN]


def test_frames_are_left_as_they_were():
    rows, given = made_up(BEST), figures()
    before = rows.copy(), given.copy()
    verdicts(rows, given)
    pd.testing.assert_frame_equal(rows, before[0])
    pd.testing.assert_frame_equal(given, before[1])


def test_list_as_rst():
    claims = CLAIMS[2], CLAIMS[6]
    found = verdicts(made_up(OVERFIT), claims=claims)
    rst = as_rst(found)
    tables = [
        list(csv.reader(part.split("\n\n")[1].splitlines(), skipinitialspace=True))
        for part in rst.split(".. csv-table::")[1:]
    ]
    sizes = [(len(table), {len(row) for row in table}) for table in tables]
    assert sizes == [(3, {3}), (2 * len(OVERFITTED) + 3, {10})]
    assert '"LongP against MaxP, early>far, on far","0.397 / 0.328","0.800 / 0.650",' in rst
    assert "**3 to 4 chunks suffice.**" in rst


# The papers.


def lines_of(paper):
    path = PAPERS / paper
    if not path.is_file():
        pytest.skip("the paper's text is not here")
    return path.read_text(encoding="utf-8").splitlines()


def test_figures_of_the_main_tables():
    assert published(Cell("FirstP", "early", "far")) == 0.016
    assert published(Cell("MaxP", "early>far", "far")) == 0.328
    assert published(Cell("random", "none", "far")) == 0.052
    assert published(Cell("KMaxP", "early", "far")) is None
    assert published(Cell("MaxP", "uniform", "far")) is None
    random, bm25 = (next(line for line in lines_of("boytsov2025.txt") if line.startswith(start)) for start in (
        "Random shuffling", "Retriever (BM25)"
    ))  # fmt: skip
    assert "0.052" in random
    assert "0.207" in bm25


def test_figures_of_debiasing_are_those_of_table_2():
    lines = lines_of("boytsov2025.txt")
    start = lines.index(next(line for line in lines if line.startswith("Ranker\tMS MARCO\t\tTREC DL")))
    rows = [line.split("\t") for line in lines[start : start + 16]]
    names = {"MaxP (ELECTRA)": "MaxP", "PARADE Attn (ELECTRA)": "PARADE attn", "CEDR-KNRM": "CEDR-KNRM",
             "PARADE Transf-RAND-L2 (ELECTRA)": "PARADE RAND"}  # fmt: skip
    table = {}
    for row in rows:
        if row[0] in names:
            numbers = [float(re.match(r"[\d.]+", cell).group()) for cell in row[1:] if cell]
            table.setdefault(names[row[0]], []).append((numbers[0], numbers[2]))  # dev, zero-shot
    for comparison in CLAIMS[4].comparisons:
        system, _, test = comparison.system
        plain, rotated = (figures[test == "far"] for figures in table[system])
        assert comparison.published == (rotated, plain)
        gain = rotated / plain - 1
        assert gain > 0.43 if test == "far" else -0.2905 < gain < -0.05


def test_spreads_are_those_of_table_8():
    text = "\n".join(lines_of("boytsov2022.txt"))
    blocks = re.findall(r"window=\d+ stride=\d+\n(.*?)(?=window=|Superscripts)", text, re.DOTALL)
    table = np.array([re.findall(r"0\.\d{3}", block) for block in blocks], dtype=float)  # six by six
    found = {"PRETR": table[:, 2:4], "PRETR-Q": table[:, 4:]}  # MRR and nDCG@10 of each model; the first is Attn
    deviations = {name: values[:, 0].std(ddof=1) for name, values in found.items()}
    [spread] = CLAIMS[7].comparisons
    assert spread.published == (
        pytest.approx(deviations["PRETR-Q"], abs=5e-5),
        pytest.approx(deviations["PRETR"], abs=5e-5),
    )
    without = {name: np.delete(values[:, 1], 1).std(ddof=1) for name, values in found.items()}
    assert 1 - without["PRETR-Q"] / without["PRETR"] == pytest.approx(0.49, abs=0.01)


def test_margins_are_those_of_the_paper():
    far = {
        name: [p.published.get(f"far RR, {how}") for how in ("zero-shot", "fine-tuned")]
        for name, p in ld.presets.items()
    }
    gain = {name: tuned - zero for name, (zero, tuned) in far.items() if zero and tuned}
    assert max(gain["maxp"], gain["parade-attn"]) < LITTLE / 2 * gain["parade-rand-l2"]
    assert (far["firstp"][1] - 0.052) / (far["maxp"][1] - 0.052) == pytest.approx(AT_CHANCE)
    pairs = [(p.published, ld.presets[p.partner].published) for p in ld.presets.values() if p.partner]
    both = [(own, its) for own, its in pairs if {"dev RR", "far RR, zero-shot"} <= own.keys() & its.keys()]
    early, late = (np.mean([own[m] - its[m] for own, its in both]) for m in ("dev RR", "far RR, zero-shot"))
    firstp = np.mean([its["dev RR"] for _, its in both])
    assert (late - early) / firstp / 0.859 == pytest.approx(RISE, abs=0.03)


def test_places_in_the_papers_are_there():
    paper, papers = "", {"P25": "boytsov2025.txt", "P22": "boytsov2022.txt", "PARADE": "parade.txt", "BeST": "best.txt"}
    for claim in CLAIMS:
        if claim is CLAIMS[5]:
            continue  # of no paper
        for part in claim.source.split("; "):
            paper = part.split()[0] if part.split()[0] in papers else paper  # the one before
            text = "\n".join(lines_of(papers[paper]))
            for place in re.findall(r"Tables? (\d+)", part):
                assert f"Table {place}" in text, (claim.name, part)
            for place in re.findall(r"§([\w.]+)", part):
                assert re.search(rf"^[# ]*{re.escape(place.rstrip('.'))}[. \n]", text, re.MULTILINE), (claim.name, part)


def test_cells_that_claims_need():
    found = needed()
    assert len(found) == len(set(found))
    assert Cell("FirstP", "early", "far") in found
    assert {cell.test for cell in found} == set(COLLECTIONS)
    assert needed(CLAIMS[:1]) == [
        Cell("FirstP", "early", "far"), Cell("random", "none", "far"), Cell("MaxP", "early", "far"),
        Cell("FirstP", "early>far", "far"), Cell("MaxP", "early>far", "far"),
    ]  # fmt: skip
