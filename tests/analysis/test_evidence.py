"""evidence_recall: how often the best windows contain the gold text, compared with baselines."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.evidence import BASELINES, FIRST, RANDOM

from ..support.systems import QUIET, make

pytestmark = QUIET
FILLER = "the cat and the bird walk to the river in the rain and sing by the old tree "


def row(qid, docno, words, scores):
    text, spans = "".join(f"{word:<20}" for word in words), [(20 * i, 20 * i + 20) for i in range(len(words))]
    return {"qid": qid, "docno": docno, "query": "fish", "text": text, "window_spans": spans, "window_scores": scores}


def gold(*rows):
    return pd.DataFrame(rows, columns=["qid", "docno", "start", "end"])


RESULTS = pd.DataFrame(
    [
        row("1", "a", ["cat", "dog", "a fish", "tree", "sun"], [0, 1, 3, 2, 0]),
        row("1", "b", ["fish", "dog", "cat", "tree", "Fish"], [1, 1, 1, 1, 1]),
        row("1", "not relevant", ["fish"] * 5, [9, 9, 9, 9, 9]),
        row("2", "a", ["cat", "dog", "a fish", "tree", "sun"], [0, 5, -1, -2, -3]),
    ]
)
OF_1 = [("1", "a", 45, 50), ("1", "b", 75, 85), ("1", "c", 0, 9)]
GOLD = gold(*OF_1, ("2", "a", 20, 21), ("2", "a", 0, 1), ("3", "a", 0, 9))


def by_name(found: pd.DataFrame, measure: str = "evidence@1") -> pd.DataFrame:
    """The values of a measure, one column per name."""
    return found[found["measure"] == measure].pivot(index="qid", columns="name", values="value")


def test_values_of_model_and_baselines_are_known():
    with pytest.warns(UserWarning, match=" 1 documents"):  # document c of query 1; query 3 is not in the results at all
        found = ld.evidence_recall(RESULTS, GOLD)
    # Document b of query 1 has equal scores: the first are the best. Of its two windows with a fish BM25 has the first.
    at_1 = [[1, 0, 1 / 5, 1], [0, 0, 2 / 5, 0], [1, 1, 2 / 5, 0]]  # documents a and b of query 1, and a of query 2
    at_3 = [[1, 1, 3 / 5, 1], [0, 0, 9 / 10, 1], [1, 1, 9 / 10, 1]]
    for measure, (a, b, c) in {"evidence@1": at_1, "evidence@3": at_3}.items():
        values = by_name(found, measure)[["model", *BASELINES]]
        np.testing.assert_allclose(values, [np.mean([a, b], axis=0), c])


def test_the_random_baseline_is_the_expected_value():
    rng = np.random.default_rng(0)
    for windows, k in [(5, 1), (8, 3), (9, 4), (2, 3)]:
        spots = [("1", "a", 20 * i, 20 * i + 1) for i in range(0, windows, 3)]
        results = pd.DataFrame([row("1", "a", ["x"] * windows, rng.random(windows))])
        expected = by_name(ld.evidence_recall(results, gold(*spots), k), f"evidence@{k}")[RANDOM].item()
        drawn = [rng.permutation(windows)[:k] % 3 == 0 for _ in range(4000)]
        assert expected == pytest.approx(np.mean([hits.any() for hits in drawn]), abs=0.04)


def test_models_and_baselines_are_compared():
    rng = np.random.default_rng(1)
    rows = [row(str(q), "a", rng.permutation(["fish", "a", "b", "c", "d"]), rng.random(5)) for q in range(30)]
    good, spots = pd.DataFrame(rows), gold(*[(q, "a", 20 * (q % 5), 20 * (q % 5) + 9) for q in range(30)])
    good["window_scores"] = [np.eye(5)[q % 5] + 0.6 * rng.random(5) for q in range(30)]
    found = ld.evidence_recall({"good": good, "other": pd.DataFrame(rows)}, spots, [3, 1])
    results = ld.compare(found, baseline=FIRST, correction="holm")
    assert results.names == ["good", "other", *BASELINES]
    assert results.measures == ["evidence@1", "evidence@3"]
    different = results.comparisons.set_index(["name", "measure"])["reject"]
    assert different["good", "evidence@1"]
    assert not different["other", "evidence@1"]
    values = by_name(found)
    p = results.comparisons.set_index(["name", "measure"])["p-value"]
    assert p["good", "evidence@1"] == pytest.approx(stats.ttest_rel(values["good"], values[FIRST]).pvalue)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("MaxP", {}), ("PARADE-attn", {}), ("BiEncoder-max", {}), ("FirstP", {}), ("MaxP", {"preselect": ld.FirstK(2)})],
)
def test_windows_of_models_are_compared_with_the_gold_text(name, changes):
    text = FILLER * 5 + "a red fish " + FILLER * 4
    place, reads_it = text.index("fish"), name != "FirstP" and not changes
    pairs = pd.DataFrame({"qid": [1], "query": "red fish", "docno": [7], "text": text})
    explained = make(name, explain=True, **changes)(pairs)
    found = ld.evidence_recall(explained, gold((1, 7, place, place + 4)), 1)
    (spans,), (start,), (end,) = explained["window_spans"], explained["best_start"], explained["best_end"]
    share = np.mean(["fish" in text[slice(*span)] for span in spans])
    assert (share > 0) == reads_it
    assert found["value"].tolist() == ["fish" in text[start:end], False, pytest.approx(share), reads_it]


@pytest.mark.parametrize(
    ("results", "k", "message"),
    [
        (RESULTS.drop(columns="window_scores"), 1, "explain=True"),
        (RESULTS.drop(columns="text"), 1, "text_loader="),
        (RESULTS.assign(text="short"), 1, "text_field="),
        (RESULTS[RESULTS["docno"] == "not relevant"], 1, "gold"),
        (RESULTS, [0, 1], "k=0"),
        ({FIRST: RESULTS}, 1, "baseline"),
    ],
)
def test_results_without_the_needed_columns_or_arguments_are_refused(results, k, message):
    with pytest.raises(ValueError, match=message):
        ld.evidence_recall(results, GOLD, k)
