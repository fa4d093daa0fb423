"""Places of gold text, and what is said of figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from .natural_page import BEHIND, FIFTHS, IN, fifth, findings, groups_of, with_verdicts
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
