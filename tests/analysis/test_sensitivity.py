"""position_sensitivity: how scores change when the relevant passage moves within its document."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import PositionSensitivity
from pyterrier_longdoc.analysis.sensitivity import move_passage

from ..support import tiny
from ..support.passages import collection

NEEDLE = "Seventeen purple elephants march."
KNOWN = collection(12, NEEDLE)
TOPICS, CORPUS, GOLD = KNOWN.topics, KNOWN.corpus, KNOWN.gold


def reader(characters: int | None) -> pt.Transformer:
    """Likes elephants among the first characters; scores differ a little from document to document."""

    def score(frame):
        found = ["elephants" in text[:characters] for text in frame["text"]]
        own = [len(text) % 7 / 100 for text in frame["text"]]
        return pt.model.add_ranks(frame.assign(score=np.add(found, own)))

    return pt.apply.generic(score)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_a_moved_passage_keeps_all_words_and_sentences(place):
    for text, row in zip(CORPUS["text"], GOLD.itertuples(), strict=True):
        version, begins = move_passage(text, row.start, row.end, place)
        assert version[begins : begins + len(NEEDLE)] == NEEDLE
        sentences = [sorted(t.replace(".", ".|").replace("| ", "|").split("|")) for t in (text, version)]
        assert sentences[0] == sentences[1]
        assert abs(begins - place * (len(version) - len(NEEDLE) - 1)) <= max(map(len, sentences[0]))
        assert len(version) == len(text)


def test_a_passage_moves_between_sentences_or_else_between_words():
    assert move_passage("One. Two. Three.", 5, 9, 0) == ("Two. One. Three.", 0)
    assert move_passage("One. Two. Three.", 5, 9, 0.4) == ("One. Two. Three.", 5)
    assert move_passage("One. Two. Three.", 4, 10, 1) == ("One. Three. Two.", 12)
    assert move_passage("no sentence end", 3, 11, 1) == ("no end sentence", 7)
    assert move_passage("all of it", 0, 9, 0.5) == ("all of it", 0)
    assert move_passage("one two three four", 4, 7, 0.6, reach=0.2) == ("one three two four", 10)


@pytest.fixture(scope="module")
def two_readers() -> PositionSensitivity:
    return ld.position_sensitivity({"first": reader(300), "all": reader(None)}, TOPICS, CORPUS, GOLD)


def test_scores_fall_for_a_model_that_reads_the_start_and_stay_for_one_that_reads_all(two_readers):
    found = two_readers
    table = found.table.set_index(["name", "place"])
    assert table.loc["first", "change"].is_monotonic_decreasing
    last = table.loc[("first", 1.0)]
    assert last["reject"]
    assert last["lower"] == 1
    assert last["high"] < 0
    assert (table.loc["all", ["change", "lower"]] == 0).all(axis=None)
    assert not table.loc["all", "reject"].any()
    assert found.scores["place"].nunique() == 5
    assert len(found.scores) == 120


def test_the_plot_shows_changes_by_real_place_and_fills_significant_ones(two_readers):
    table = two_readers.table.set_index(["name", "place"])
    ax = two_readers.plot()
    at_first, at_all = (container[0].get_xdata() for container in ax.containers)
    assert (at_first < at_all).all()
    assert np.abs(np.add(at_first, at_all) / 2 - table.loc["all", "real_place"]).max() < 0.01
    lines = [container[0].get_ydata() for container in ax.containers]
    assert lines[0][-1] < -1
    assert lines[1].tolist() == [0] * 5
    full = [len(c.get_offsets()) for c in ax.collections if hasattr(c, "get_sizes") and len(c.get_sizes())]
    assert full[0] >= 1
    assert full[1] == 0


@pytest.fixture
def three_queries() -> pd.DataFrame:
    """Scores of two documents of three queries at two places."""
    scores = pd.DataFrame(
        {"name": "m", "qid": np.repeat(["a", "b", "c"], 4), "docno": np.tile(["x", "x", "y", "y"], 3)}
    )
    scores = scores.assign(place=[0.0, 1.0] * 6, real_place=[0.0, 0.9] * 6, first_token=[0, 9] * 6, length=10)
    return scores.assign(score=[5.0, 4.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 3.0, 0.0])


def test_the_change_is_in_standard_deviations_and_tested_over_queries(three_queries):
    table = PositionSensitivity(three_queries).table
    first, last = np.array([4.0, 3.0, 2.0]), np.array([3.0, 3.0, 1.0])
    row = table.iloc[1]
    assert table.iloc[0][["change", "low", "high", "lower"]].tolist() == [0, 0, 0, 0]
    assert row["score"] == pytest.approx(last.mean())
    assert row["change"] == pytest.approx((last - first).mean() / first.std(ddof=1))
    assert row["lower"] == pytest.approx(2 / 3)
    assert row["p-value"] == pytest.approx(stats.ttest_rel(last, first).pvalue)
    assert row["low"] <= row["change"] <= row["high"]
    assert row[["first_token", "real_place", "queries"]].tolist() == [9, 0.9, 3]


def test_a_place_without_documents_in_common_with_the_first_place_is_left_out(three_queries):
    scores = three_queries
    alone = scores.assign(place=scores["place"].where(scores["docno"] == "x", 0.5)).query("place != 0.5 or qid == 'a'")
    assert PositionSensitivity(alone).table["place"].tolist() == [0.0, 1.0]


def test_a_text_without_sentences_is_cut_between_words():
    text = " ".join(f"word{i}" for i in range(400))
    gold = GOLD.head(1).assign(start=text.index("word200"), end=text.index(" word203"))
    found = ld.position_sensitivity(reader(None), TOPICS.head(1), CORPUS.head(1).assign(text=text), gold).scores
    np.testing.assert_allclose(found["real_place"], found["place"], atol=0.05)
    assert found["first_token"].nunique() == 5
    assert (found["length"] == 400).all()


def test_table_and_plot_have_the_real_place():
    # Sentences of a third each: two inner boundaries, near enough to .25 and .75 but not to the middle.
    sentence = "One two three four five six seven eight nine ten. "
    text = sentence * 3 + NEEDLE
    gold = GOLD.head(1).assign(start=len(sentence) * 3, end=len(text))
    corpus = CORPUS.head(1).assign(text=text)
    found = ld.position_sensitivity(reader(None), TOPICS.head(1), corpus, gold)
    expected = [0, 11 / 33, 16 / 33, 22 / 33, 1]
    np.testing.assert_allclose(found.scores["real_place"], expected, atol=1 / 33)
    assert found.scores["first_token"].tolist()[1::2] == [11, 22]
    np.testing.assert_allclose(found.table["real_place"], found.scores["real_place"])
    drawn = found.plot().containers[0]
    np.testing.assert_allclose(drawn[0].get_xdata(), found.table["real_place"])
    assert "not drawn" in drawn.get_label()  # the scores of one query have no spread


def test_places_with_the_same_text_are_scored_once():
    topics, corpus, gold = TOPICS.head(3), CORPUS.head(3), GOLD.head(3)
    short = corpus.assign(text=[f"red {NEEDLE}", NEEDLE, corpus["text"][2]])
    starts = [4, 0, gold["start"][2]]
    gold = gold.assign(start=starts, end=[start + len(NEEDLE) for start in starts])
    asked = []

    def score(frame):
        asked.extend(frame["text"])
        return pt.model.add_ranks(frame.assign(score=frame["text"].str.len().astype(float)))

    found = ld.position_sensitivity(pt.apply.generic(score), topics, short, gold)
    places = found.scores.groupby("docno")["place"].agg(list)
    assert places.tolist() == [[0, 1], [0], [0, 0.25, 0.5, 0.75, 1]]
    assert len(asked) == len(set(asked)) == 8
    assert found.table["queries"].tolist() == [3, 1, 1, 1, 2]
    assert (found.table["change"] == 0).all()


def test_scores_are_those_of_the_moved_documents(cross_encoder):
    topics, corpus, gold = TOPICS.head(3), CORPUS.head(3), GOLD.head(3)
    model = ld.MaxP(cross_encoder, window_size=40, stride=30)
    before = [frame.copy() for frame in (topics, corpus, gold)]
    found = ld.position_sensitivity(model, topics, corpus, gold, places=[0, 1], tokenizer=tiny.tokenizer()).scores
    for frame, old in zip((topics, corpus, gold), before, strict=True):
        pd.testing.assert_frame_equal(frame, old)
    spans = zip(corpus["text"], gold["start"], gold["end"], strict=True)
    texts = [move_passage(*span, place)[0] for span in spans for place in (0, 1)]
    frame = pd.DataFrame({"qid": found["qid"], "query": "elephants", "docno": found.index.astype(str), "text": texts})
    np.testing.assert_allclose(found["score"], model(frame)["score"], rtol=1e-5)
    assert found["name"].unique().tolist() == ["MaxP"]
    lengths = [len(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert found["length"].tolist() == lengths
    assert (found["first_token"] == 0).tolist() == [True, False] * 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"places": [0.5]}, "places="),
        ({"places": [0, 1.5]}, "places="),
        ({"gold": GOLD.drop(columns="end")}, "end"),
        ({"topics": pd.DataFrame({"qid": ["other"], "query": "?"})}, "gold .*none"),
        ({"gold": pd.concat([GOLD, GOLD])}, "'d0'"),
        ({"gold": GOLD.assign(end=10**6)}, "'d0'"),
        ({"gold": GOLD.assign(end=pd.NA)}, "'d0'"),
        ({"gold": GOLD.assign(start=-1)}, "'d0'"),
        ({"corpus": CORPUS.assign(text=NEEDLE), "gold": GOLD.assign(start=0, end=len(NEEDLE))}, "gold"),
        ({"corpus": CORPUS.head(1)}, "'d1'"),
        ({"systems": {"twice": pt.apply.generic(lambda frame: pd.concat([frame, frame]))}}, "'twice'"),
        ({"systems": {"cut": reader(None) % 1}}, "'cut'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, word):
    given = {"systems": reader(None), "topics": TOPICS, "corpus": CORPUS, "gold": GOLD, **changes}
    with pytest.raises(ValueError, match=word):
        ld.position_sensitivity(**given)
