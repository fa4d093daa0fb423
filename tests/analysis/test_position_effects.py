"""Sensitivity of scores to the place of the passage, and effectiveness by position."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.sensitivity import moved
from pyterrier_longdoc.common.language import count_tokens

from ..support import tiny
from ..support.passages import Writer

# The collections are too small for real comparisons, and the runs made by hand.
pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")

NEEDLE = "Seventeen purple elephants march."


def collection(queries: int = 12, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Topics, corpus and gold: documents of prose with the needle somewhere between two sentences."""
    writer = Writer(seed)
    rows, gold = [], []
    for number in range(queries):
        before, after = writer.prose(writer.rng.randint(20, 200)), writer.prose(100)
        rows.append((f"d{number}", f"{before} {NEEDLE} {after}"))
        gold.append((f"q{number}", f"d{number}", len(before) + 1, len(before) + 1 + len(NEEDLE), count_tokens(before)))
    topics = pd.DataFrame({"qid": [row[0] for row in gold], "query": "elephants"})
    gold = pd.DataFrame(gold, columns=["qid", "docno", "start", "end", "first_token"])
    return topics, pd.DataFrame(rows, columns=["docno", "text"]), gold


def reader(characters: int | None) -> pt.Transformer:
    """Likes elephants among the first characters; scores differ a little from document to document."""

    def score(frame):
        found = ["elephants" in text[:characters] for text in frame["text"]]
        own = [len(text) % 7 / 100 for text in frame["text"]]
        return pt.model.add_ranks(frame.assign(score=np.add(found, own)))

    return pt.apply.generic(score)


# Moving a passage.


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_a_moved_passage_keeps_all_words_and_sentences(place):
    _, corpus, gold = collection()
    for text, row in zip(corpus["text"], gold.itertuples(), strict=True):
        version, begins = moved(text, row.start, row.end, place)
        assert version[begins : begins + len(NEEDLE)] == NEEDLE
        sentences = [sorted(t.replace(".", ".|").replace("| ", "|").split("|")) for t in (text, version)]
        assert sentences[0] == sentences[1]
        rest = len(version) - len(NEEDLE) - 1
        assert abs(begins - place * rest) <= max(map(len, sentences[0]))
        assert len(version) == len(text)


def test_moving_to_the_ends():
    assert moved("One. Two. Three.", 5, 9, 0) == ("Two. One. Three.", 0)
    assert moved("One. Two. Three.", 5, 9, 0.4) == ("One. Two. Three.", 5)
    assert moved("One. Two. Three.", 4, 10, 1) == ("One. Three. Two.", 12)
    assert moved("no sentence end", 3, 11, 1) == ("no end sentence", 7)
    assert moved("all of it", 0, 9, 0.5) == ("all of it", 0)


# Sensitivity.


def test_a_model_that_reads_the_start_loses_and_one_that_reads_all_stays():
    topics, corpus, gold = collection()
    found = ld.position_sensitivity({"first": reader(300), "all": reader(None)}, topics, corpus, gold)
    table = found.table.set_index(["name", "place"])
    assert table.loc["first", "change"].is_monotonic_decreasing
    last = table.loc[("first", 1.0)]
    assert last["reject"]
    assert last["lower"] == 1
    assert last["high"] < 0
    assert (table.loc["all", ["change", "lower"]] == 0).all(axis=None)
    assert not table.loc["all", "reject"].any()
    assert found.scores["place"].nunique() == 5
    assert len(found.scores) == 2 * 12 * 5


def test_the_table_by_hand():
    scores = pd.DataFrame(
        {
            "name": "m",
            "qid": np.repeat(["a", "b", "c"], 4),
            "docno": np.tile(["x", "x", "y", "y"], 3),
            "place": [0.0, 1.0] * 6,
            "first_token": [0, 9] * 6,
            "length": 10,
            "score": [5.0, 4.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 3.0, 0.0],
        }
    )
    table = ld.PositionSensitivity(scores).table
    first, last = np.array([4.0, 3.0, 2.0]), np.array([3.0, 3.0, 1.0])
    row = table.iloc[1]
    assert table.iloc[0][["change", "low", "high", "lower"]].tolist() == [0, 0, 0, 0]
    assert row["score"] == pytest.approx(last.mean())
    assert row["change"] == pytest.approx((last - first).mean() / first.std(ddof=1))
    assert row["lower"] == pytest.approx(2 / 3)
    assert row["p-value"] == pytest.approx(stats.ttest_rel(last, first).pvalue)
    assert row["low"] <= row["change"] <= row["high"]
    assert row["first_token"] == 9


def test_scores_are_those_of_the_moved_documents(tmp_path):
    topics, corpus, gold = collection(3)
    model = ld.MaxP(tiny.checkpoint(tmp_path), window_size=40, stride=30)
    before = [frame.copy() for frame in (topics, corpus, gold)]
    found = ld.position_sensitivity(model, topics, corpus, gold, places=[0, 1], tokenizer=tiny.tokenizer()).scores
    for frame, old in zip((topics, corpus, gold), before, strict=True):
        pd.testing.assert_frame_equal(frame, old)
    texts = [
        moved(t, r.start, r.end, p)[0] for t, r in zip(corpus["text"], gold.itertuples(), strict=True) for p in (0, 1)
    ]
    frame = pd.DataFrame({"qid": found["qid"], "query": "elephants", "docno": found.index.astype(str), "text": texts})
    np.testing.assert_allclose(found["score"], model(frame)["score"], rtol=1e-5)
    assert found["name"].unique().tolist() == ["MaxP"]
    lengths = [len(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert found["length"].tolist() == lengths
    assert (found["first_token"] == 0).tolist() == [True, False] * 3


def test_estimated_positions_serve_as_gold():
    topics, corpus, gold = collection()
    qrels = gold[["qid", "docno"]].assign(label=1)
    passages = topics[["qid"]].assign(text=NEEDLE + " ")
    locator = ld.PassageLocator(min_words=4)
    positions = ld.relevant_positions(topics, qrels, corpus, passages=passages, locator=locator)
    assert positions.matched["first_token"].tolist() == gold["first_token"].tolist()
    by_estimate, by_gold = (
        ld.position_sensitivity(reader(300), topics, corpus, spans).scores for spans in (positions.matched, gold)
    )
    pd.testing.assert_frame_equal(by_estimate, by_gold)


def test_the_picture_of_sensitivity():
    topics, corpus, gold = collection()
    ax = ld.position_sensitivity({"first": reader(300), "all": reader(None)}, topics, corpus, gold).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["first", "all"]
    lines = [container[0].get_ydata() for container in ax.containers]
    assert lines[0][-1] < -1
    assert lines[1].tolist() == [0] * 5
    full = [
        len(points.get_offsets())
        for points in ax.collections
        if hasattr(points, "get_sizes") and len(points.get_sizes())
    ]
    assert full[0] >= 1
    assert full[1] == 0


def sensitivity(**changes):
    topics, corpus, gold = collection(2)
    given = {"systems": reader(None), "topics": topics, "corpus": corpus, "gold": gold, **changes}
    return ld.position_sensitivity(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": {}}, "systems is empty"),
        ({"places": [0.5]}, "places="),
        ({"places": [0, 1.5]}, "places="),
        ({"gold": collection(2)[2].drop(columns="end")}, "gold lack the column.s. end"),
        ({"topics": collection(2)[0].drop(columns="query")}, "topics lack the column.s. query"),
        ({"topics": pd.DataFrame({"qid": ["other"], "query": "?"})}, "no qid in common"),
        ({"gold": pd.concat([collection(2)[2]] * 2)}, "several passages of document 'd0' for query 'q0'"),
        ({"gold": collection(2)[2].assign(end=10**6)}, "gold has no passage of document 'd0' from character"),
        ({"gold": collection(2)[2].assign(end=pd.NA)}, "gold has no passage of document 'd0' from character"),
        ({"gold": collection(2)[2].assign(start=-1)}, "gold has no passage of document 'd0' from character -1"),
        ({"corpus": collection(1)[1]}, "document 'd1' of gold is not in the corpus"),
        ({"systems": {"cut": reader(None) % 1}}, "'cut' returned no finite score for 8 of 10 documents"),
    ],
)
def test_clear_errors_of_sensitivity(changes, message):
    with pytest.raises(ValueError, match=message):
        sensitivity(**changes)


# Effectiveness.


def experiment(values: dict[str, list[float]], **arguments) -> ld.ExperimentResults:
    """Results with the given reciprocal ranks, by putting the relevant document there."""
    queries = len(next(iter(values.values())))
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(queries)], "query": "?"})
    qrels = topics[["qid"]].assign(docno="relevant", label=1)
    runs = {}
    for name, ranks in values.items():
        rows = [
            (qid, "relevant" if place == round(1 / rank) else f"other {place}", -float(place))
            for qid, rank in zip(topics["qid"], ranks, strict=True)
            for place in range(1, 11)
        ]
        runs[name] = pd.DataFrame(rows, columns=["qid", "docno", "score"])
    return ld.Experiment(runs, topics, qrels, ["RR"], **arguments)


ONES, MIXED = [1.0] * 20, [1.0, 0.5] * 10
FALLING = [1.0, 0.5] * 5 + [0.1, 0.125] * 5
POSITIONS = pd.DataFrame({"qid": [f"q{i}" for i in range(20)], "first_token": [50] * 10 + [900] * 10})


def test_groups_by_position():
    results = experiment({"full": MIXED, "start": FALLING}, baselines=["start"])
    found = ld.effectiveness_by_position(results, POSITIONS)
    assert list(found.groups) == ["0 to < 512", "512 to < 1024"]
    table = found.table.set_index(["group", "name"])
    assert table["queries"].tolist() == [10] * 4
    assert table.loc[("0 to < 512", "start"), "mean"] == pytest.approx(0.75)
    assert table.loc[("512 to < 1024", "start"), "mean"] == pytest.approx(0.1125)
    assert ((table["low"] <= table["mean"]) & (table["mean"] <= table["high"])).all()
    different = found.comparisons.set_index(["group", "name"])["reject"]
    assert not different["0 to < 512", "full"]
    assert different["512 to < 1024", "full"]


def test_intervals_are_those_of_the_bootstrap():
    results = experiment({"m": FALLING})
    (row,) = ld.PositionEffectiveness({"all": results}).table.to_dict("records")
    interval = stats.bootstrap((np.array(FALLING),), np.mean, method="percentile", rng=np.random.default_rng(0))
    assert row["low"] == pytest.approx(interval.confidence_interval.low, abs=0.02)
    assert row["high"] == pytest.approx(interval.confidence_interval.high, abs=0.02)


def test_worst_and_best_group_of_other_queries():
    results = experiment({"full": MIXED, "start": FALLING})
    ratios = ld.effectiveness_by_position(results, POSITIONS).ratios.set_index("name")
    start, full = ratios.loc["start"], ratios.loc["full"]
    assert (start["worst group"], start["best group"]) == ("512 to < 1024", "0 to < 512")
    assert start["ratio"] == pytest.approx(0.15)
    assert 0.1 < start["low"] < 0.15 < start["high"] < 0.25
    assert start["p-value"] == pytest.approx(stats.ttest_ind(FALLING[:10], FALLING[10:], equal_var=False).pvalue)
    assert full["ratio"] == 1


def test_collections_with_the_same_queries_are_compared_query_by_query():
    rng = np.random.default_rng(0)
    early = 1 / rng.integers(1, 4, 20)
    later = [1 / (round(1 / value) + 1) for value in early]  # always one rank lower
    results = {
        "early": experiment({"m": early}),
        "far": experiment({"m": later}),
        "also early": experiment({"m": early}),
    }
    found = ld.PositionEffectiveness(results)
    (row,) = found.ratios.to_dict("records")
    assert (row["worst group"], row["best group"]) == ("far", "early")
    assert row["p-value"] == pytest.approx(3 * stats.ttest_rel(later, early).pvalue)  # three pairs of groups
    unpaired = stats.ttest_ind(later, early, equal_var=False).pvalue
    assert row["p-value"] < unpaired
    shuffled = dict(results, far=_reordered(results["far"]))
    assert ld.PositionEffectiveness(shuffled).ratios.to_dict("records") == [row]


def test_the_interval_of_a_ratio_draws_the_same_queries_for_both_groups():
    ranks = np.random.default_rng(1).integers(1, 5, 20)
    results = {"early": experiment({"m": 1 / ranks}), "far": experiment({"m": 1 / (2 * ranks)})}
    (row,) = ld.PositionEffectiveness(results).ratios.to_dict("records")
    assert (row["low"], row["ratio"], row["high"]) == pytest.approx((0.5, 0.5, 0.5))


def _reordered(results: ld.ExperimentResults) -> ld.ExperimentResults:
    order = list(reversed(range(len(results.qids))))
    values = {name: of_system[:, order] for name, of_system in results.values.items()}
    return ld.ExperimentResults(values, results.seeds, [results.qids[i] for i in order], results.measures)


def test_estimated_positions_and_those_of_several_documents():
    results = experiment({"m": FALLING})
    frame = pd.concat([POSITIONS, POSITIONS.assign(first_token=POSITIONS["first_token"] + 100)])
    nowhere = pd.DataFrame({"qid": ["q19"], "first_token": [pd.NA]})
    frame = pd.concat([frame[frame["qid"] != "q19"], nowhere], ignore_index=True)
    found = ld.effectiveness_by_position(results, frame, edges=[0, 100, 950])
    assert {label: of_group.qids for label, of_group in found.groups.items()} == {
        "100 to < 950": results.qids[:10],
        ">= 950": results.qids[10:19],
    }


def test_the_picture_of_several_systems():
    results = experiment({"full": MIXED, "start": FALLING}, baselines=["start"])
    ax = ld.effectiveness_by_position(results, POSITIONS).plot()
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "0 to < 512\n10 queries",
        "512 to < 1024\n10 queries",
    ]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["full: worst/best 1.00 (p undefined)", "start: worst/best 0.15 (p < 0.001)"]
    np.testing.assert_allclose(ax.containers[1][0].get_ydata(), [0.75, 0.1125])
    markers = [
        points.get_offsets() for points in ax.collections if hasattr(points, "get_sizes") and len(points.get_sizes())
    ]
    assert [len(of_system) for of_system in markers] == [1, 0]  # "full" differs from the baseline in one group
    assert ax.get_ylabel() == "RR"


def test_bad_input_of_effectiveness():
    results = experiment({"m": ONES})
    with pytest.raises(ValueError, match=r"positions lack the column.s. first_token"):
        ld.effectiveness_by_position(results, POSITIONS.rename(columns={"first_token": "position"}))
    with pytest.raises(ValueError, match="no evaluated query"):
        ld.effectiveness_by_position(results, POSITIONS.assign(qid="other"))
    with pytest.raises(ValueError, match="groups is empty"):
        ld.PositionEffectiveness({})
    with pytest.raises(ValueError, match="group 'b' has the systems n"):
        ld.PositionEffectiveness({"a": results, "b": experiment({"n": ONES})})
    with pytest.raises(ValueError, match="confidence=2"):
        ld.PositionEffectiveness({"a": results}, confidence=2)
    with pytest.raises(ValueError, match="measure='AP' was not evaluated; choose one of RR"):
        ld.PositionEffectiveness({"a": results}).plot("AP")
