"""Places of gold text, and what is said of figures."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pyterrier_longdoc as ld

from .natural_page import BEHIND, COLLECTIONS, FIFTHS, IN, fifth, findings, groups_of, page, with_verdicts
from .replication.verdict import NOT_REACHED, SEEN

QIDS = [f"q{number}" for number in range(200)]
PLACES = {name: QIDS[start::5] for start, name in enumerate(FIFTHS)} | {IN: QIDS[:100], BEHIND: QIDS[100:]}

NO_FIFTHS: dict[str, list[str]] = {name: [] for name in FIFTHS}


def figures(firstp: float, maxp: float) -> pd.DataFrame:
    """Values of queries, the second half behind the window, where FirstP and MaxP are worse by so much than in it."""
    hard = np.random.default_rng(0).uniform(0.3, 0.5, 200)
    behind = np.arange(200) >= 100
    noise = np.random.default_rng(1).normal(0, 0.02, (2, 200))
    values = {"BM25": hard, "FirstP": hard + 0.4 - firstp * behind + noise[0]}
    return pd.DataFrame(values | {"MaxP": hard + 0.4 - maxp * behind + noise[1]}, index=QIDS)


def table(values: pd.DataFrame, groups: dict[str, list[str]], passages: pd.DataFrame | None = None) -> pd.DataFrame:
    found = findings("stories", values, figures(0.0, 0.0) if passages is None else passages, groups)
    return with_verdicts(found).set_index(["claim", "system"])


@pytest.mark.parametrize(
    ("span", "expected"), [((0, 10), 1), ((15, 25), 2), ((14, 25), 1), ((40, 60), 3), ((90, 100), 5), ((0, 100), 3)]
)
def test_a_span_is_in_the_fifth_of_its_middle(span, expected):
    assert fifth(*span, 100) == expected


def test_questions_of_several_fifths_are_in_none_and_one_part_that_is_read_is_enough():
    rows = [("a", 1, True), ("a", 1, False), ("b", 1, True), ("b", 4, False), ("c", 5, False)]
    groups = groups_of(pd.DataFrame(rows, columns=["qid", "fifth", "read"]))
    assert {name: qids for name, qids in groups.items() if qids} == {
        "fifth 1": ["a"],
        "fifth 5": ["c"],
        IN: ["a", "b"],
        BEHIND: ["c"],
    }


def test_a_model_of_one_window_loses_and_one_of_all_does_not():
    found = table(figures(0.3, 0.0), PLACES)
    assert "FirstP loses 0." in found.loc[("loss", "FirstP"), "sentence"]
    assert "(not significantly)" in found.loc[("robust", "MaxP"), "sentence"]
    assert found.loc[("robust", "MaxP"), "verdict"] == SEEN
    assert "above FirstP" in found.loc[("gain", "MaxP"), "sentence"]
    assert "not significantly more than a fifth" in found.loc[("early", ""), "sentence"]
    assert list(found.loc[["loss", "control", "gain", "little"], "verdict"]) == [SEEN] * 4


def test_what_passages_show_too_is_no_matter_of_windows():
    found = table(figures(0.3, 0.0), PLACES, passages=figures(0.3, 0.0))
    assert found.loc[("control", "FirstP"), "verdict"] == NOT_REACHED


def test_the_other_way_round_nothing_is_seen():
    found = table(figures(0.0, 0.3), PLACES)
    assert "MaxP loses 0." in found.loc[("robust", "MaxP"), "sentence"]
    assert "below FirstP" in found.loc[("gain", "MaxP"), "sentence"]
    assert found.loc[("robust", "MaxP"), "verdict"] == found.loc[("gain", "MaxP"), "verdict"] == NOT_REACHED
    assert found.loc[("loss", "FirstP"), "verdict"] != SEEN


def test_early_gold_text_is_told():
    groups = PLACES | NO_FIFTHS | {FIFTHS[0]: QIDS[:150], FIFTHS[4]: QIDS[150:]}
    row = table(figures(0.0, 0.0), groups).loc[("early", "")]
    assert (row["verdict"], row["sentence"][:30]) == (SEEN, "75.0% of 200 questions have th")


def test_of_few_questions_nothing_is_said():
    values = figures(0.3, 0.0)
    assert findings("stories", values, values, NO_FIFTHS | {IN: QIDS[:9], BEHIND: QIDS[100:109]}) == []
    assert list(table(values, NO_FIFTHS | {IN: QIDS[:100], BEHIND: QIDS[100:109]}).index) == [("little", "MaxP")]


def made_up_page() -> str:
    """The page of figures that nobody measured, with all collections and systems."""
    long, systems = ["MaxP", "PARADE attn", "PARADE transformer", "BiEncoder"], ["BM25", "FirstP"]
    values = figures(0.3, 0.0)
    values = values[["BM25", "FirstP"]].join(pd.DataFrame(dict.fromkeys(long, values["MaxP"])))
    systems += long
    collections = pd.DataFrame([{"collection": name, "positions": kind} for name, (kind, _) in COLLECTIONS.items()])
    collections = collections.assign(documents=278, words=1916, questions=200, of=852)
    collections = collections.assign(**{"documents asked about": 21}, **{name: len(PLACES[name]) for name in PLACES})
    collections = collections.assign(**{"BM25, documents": [0.858, 0.912, 0.886, 0.912], "BM25, passages": 0.684})
    sizes = [("all", 200), *((name, len(PLACES[name])) for name in PLACES)]
    cases = product(COLLECTIONS, ("documents", "passages"), ("nDCG@10", "RR"), sizes, systems)
    rows = [(name, task, measure, *group, system, 0.5) for name, task, measure, group, system in cases]
    positions = pd.DataFrame(rows, columns=["collection", "task", "measure", "group", "queries", "name", "mean"])
    reference = "BM25's best windows"
    rows = [(*row, 0.25) for row in product(COLLECTIONS, (1, 3), [*long, "first windows", "random windows", reference])]
    evidence = pd.DataFrame(rows, columns=["collection", "k", "system", "mean"])
    tests = pd.DataFrame({"collection": ["squad"], "name": "MaxP", "measure": "evidence@3", "reference": reference})
    tables = {
        "findings": with_verdicts(each for name in COLLECTIONS for each in findings(name, values, values, PLACES)),
        "models": pd.DataFrame({"model": systems[1:]}),
        "collections": collections,
        "positions": positions.assign(**{"p against FirstP": 0.01, "p against BM25": 0.5}),
        "evidence": evidence.assign(group="all"),
        "evidence tests": tests.assign(reject=True),
    }
    settings = {"depth": 20, "split": "test", "read": "all windows", "sample": "all", "dtype": "float32"}
    return page(tables, "python", settings | {"processor": "a CPU", "threads": 1})


def form(text: str) -> list[str]:
    """Titles, claims, and heads of tables without the sizes of groups."""
    tables = re.findall(r':header-rows: 1\n\n    (".*")\n', text)
    titles = re.findall(r"^(.+)\n(?:---+|===+)$", text, re.MULTILINE)
    return titles + re.findall(r"^\*.*\*$", text, re.MULTILINE) + [re.sub(r" \(\d+\)", "", head) for head in tables]


def test_the_page_has_the_form_that_is_printed():
    shown = (Path(ld.__file__).parent / "pt_docs" / "natural-positions.rst").read_text(encoding="utf-8")
    assert form(made_up_page()) == form(shown)
    assert '"3","MaxP","0.250","0.250","0.250 \\*","0.250"' in made_up_page()
    assert "little to gain on the documents of medquad and newwiki" in made_up_page()
