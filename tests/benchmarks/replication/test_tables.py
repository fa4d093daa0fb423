"""The papers' tables of outcomes."""

from __future__ import annotations

import csv
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from .__main__ import main
from .tables import (
    TABLES,
    by_seed,
    chunks,
    debiasing_table,
    draw,
    fine_tuning,
    main_table,
    students_table,
    tables_as_rst,
    windows,
)

QIDS = [f"q{i}" for i in range(40)]


def outcomes(*cells: tuple[str, str, str, float], seeds: int = 2) -> pd.DataFrame:
    """Reciprocal ranks around a mean for each (system, trained, test, mean)."""
    rng, rows = np.random.default_rng(0), []
    for system, trained, test, mean in cells:
        for seed in range(1 if trained == "none" else seeds):
            values = np.clip(rng.normal(mean, 0.05, len(QIDS)), 0, 1)
            rows += [(trained, system, test, seed, qid, rr) for qid, rr in zip(QIDS, values, strict=True)]
    return pd.DataFrame(rows, columns=["trained", "system", "test", "seed", "qid", "rr"])


FOUND = outcomes(
    ("BM25", "none", "early", 0.5), ("BM25", "none", "far", 0.5), ("FirstP", "early", "early", 0.6),
    ("FirstP", "early", "far", 0.2), ("MaxP", "early", "early", 0.6), ("MaxP", "early", "far", 0.55),
    ("MaxP", "early>far", "far", 0.57), ("FirstP", "early>far", "far", 0.2), ("MaxP", "rotated", "far", 0.6),
    ("MaxP", "rotated", "early", 0.4), ("FirstP", "early>far>far", "far", 0.25), ("MaxP", "early>far>far", "far", 0.65),
    ("PARADE attn, 2 chunks", "early", "early", 0.6),
    ("PARADE attn, 3 chunks", "early", "early", 0.61), ("PARADE PRETR 32/24", "early", "early", 0.5),
    ("PARADE PRETR 64/32", "early", "early", 0.4),
)  # fmt: skip


def mean(system, trained, test):
    return FOUND.query("system == @system and trained == @trained and test == @test")["rr"].mean()


def test_the_main_table_has_all_systems_beside_firstp():
    table = main_table(FOUND)
    frame = table.frame()
    assert list(frame.index) == ["BM25", "FirstP", "MaxP"]
    assert list(frame.columns) == ["early RR", "far, zero-shot RR", "far, fine-tuned RR", "far, two epochs RR"]
    for trained, column in (("early>far", "far, fine-tuned RR"), ("early>far>far", "far, two epochs RR")):
        assert f"{mean('MaxP', trained, 'far'):.3f}" in frame.at["MaxP", column]
    assert "a" in re.findall(r"<sup>(\w+)", frame.at["MaxP", "far, zero-shot RR"])[0]
    x, y = (
        FOUND.query("system == @name and trained == 'early' and test == 'early'").groupby("qid")["rr"].mean()
        for name in ("MaxP", "FirstP")
    )
    assert ("<sup>" in frame.at["MaxP", "early RR"]) == (ttest_rel(x, y).pvalue < 0.05)


def test_debiased_systems_stand_beside_themselves():
    frame = debiasing_table(FOUND).frame()
    assert list(frame.index) == ["MaxP", "MaxP, rotated"]
    gain = mean("MaxP", "rotated", "early") / mean("MaxP", "early", "early") - 1
    assert f"{100 * gain:.1f}%".replace("-", "") in frame.at["MaxP, rotated", "early RR"]


def test_what_was_not_run_has_no_table():
    assert students_table(FOUND) is None
    assert students_table(outcomes(("x, 1 layer", "distilled", "early", 0.5))) is not None


def test_sweeps_have_their_settings():
    assert chunks(FOUND).parameters["chunks"].tolist() == [2, 3]
    found = windows(FOUND, "PARADE PRETR")
    assert found.parameters.to_numpy().tolist() == [[32, 24], [64, 32]]
    assert found.table["RR"].tolist() == pytest.approx(
        [mean(f"PARADE PRETR {name}", "early", "early") for name in ("32/24", "64/32")]
    )
    assert windows(FOUND, "PARADE PRETR-Q") is None


def test_tables_and_pictures(tmp_path):
    text = "\n\n".join(tables_as_rst(FOUND))
    tables = [
        list(csv.reader(part.split("\n\n")[1].splitlines(), skipinitialspace=True))
        for part in text.split(".. csv-table::")[1:]
    ]
    assert len(tables) == 5
    assert all(len({len(row) for row in table}) == 1 for table in tables)
    assert next(iter(TABLES)) in text
    files = draw(FOUND, tmp_path / "new")
    assert [file.name for file in files] == [
        "boytsov-et-al-2025-figure-2.png", "boytsov-et-al-2025-table-6.png", "boytsov-et-al-2022-table-8-pretr.png",
    ]  # fmt: skip
    assert all(file.stat().st_size > 1000 for file in files)


def test_means_of_each_seed():
    one = outcomes(("MaxP", "early", "far", 0.5), seeds=1)
    assert by_seed(one) is None
    both = pd.concat([FOUND, outcomes(("PARADE RAND", "early", "far", 0.3), seeds=1)])
    frame = by_seed(both)
    assert set(frame["system"]) == {*FOUND["system"]} - {"BM25"}
    row = frame.query("system == 'MaxP' and trained == 'early>far'").iloc[0]
    for seed in (0, 1):
        own = FOUND.query("system == 'MaxP' and trained == 'early>far' and seed == @seed")["rr"].mean()
        assert row[f"seed {seed}"] == f"{own:.3f}"


def test_fine_tuning_has_a_row_for_what_was_trained_on_far():
    frame = fine_tuning(FOUND)
    assert list(frame.index) == ["FirstP", "MaxP"]
    assert list(frame.columns) == ["far, zero-shot", "far, fine-tuned", "far, two epochs"]
    assert frame.at["MaxP", "far, two epochs"] == pytest.approx(mean("MaxP", "early>far>far", "far"))
    assert fine_tuning(FOUND[FOUND["trained"] != "early>far"]) is None


def test_a_run_without_sweeps_says_that_there_are_no_pictures(tmp_path, capsys, monkeypatch):
    without = FOUND[FOUND["system"].isin(["BM25", "FirstP"]) & (FOUND["trained"] != "early>far")]
    monkeypatch.setattr("tests.benchmarks.replication.replicate.read_outcomes", lambda folder: without)
    assert main(["tables", str(tmp_path), "--pictures", str(tmp_path / "pictures")]) == 0
    told = capsys.readouterr()
    assert "no pictures: nothing that the papers draw was run" in told.err
    assert "FirstP" in told.out
    assert not (tmp_path / "pictures").exists()
