"""position_sensitivity: how scores change when the relevant passage moves within its document."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.sensitivity import move_passage

from ..support.passages import collection

NEEDLE = "Seventeen purple elephants march."
KNOWN = collection(12, NEEDLE)
TOPICS, CORPUS, GOLD = KNOWN.topics, KNOWN.corpus, KNOWN.gold


def reader(characters: int | None) -> pt.Transformer:
    """Likes elephants among the first characters, in some documents a little more."""

    def score(frame):
        found = ["elephants" in text[:characters] for text in frame["text"]]
        own = [1 + len(text) % 7 / 100 for text in frame["text"]]
        return pt.model.add_ranks(frame.assign(score=np.multiply(found, own)))

    return pt.apply.generic(score)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_a_moved_passage_keeps_all_words_and_sentences(place):
    for text, row in zip(CORPUS["text"], GOLD.itertuples(), strict=True):
        version = move_passage(text, row.start, row.end, place)
        sentences = [sorted(t.replace(".", ".|").replace("| ", "|").split("|")) for t in (text, version)]
        assert sentences[0] == sentences[1]
        place_found = version.index(NEEDLE) - place * (len(version) - len(NEEDLE) - 1)
        assert abs(place_found) <= max(map(len, sentences[0]))
        assert len(version) == len(text)


def test_a_passage_moves_between_sentences_or_else_between_words():
    assert move_passage("One. Two. Three.", 5, 9, 0) == "Two. One. Three."
    assert move_passage("One. Two. Three.", 5, 9, 0.4) == "One. Two. Three."
    assert move_passage("One. Two. Three.", 4, 10, 1) == "One. Three. Two."
    assert move_passage("no sentence end", 3, 11, 1) == "no end sentence"
    assert move_passage("all of it", 0, 9, 0.5) == "all of it"
    assert move_passage("one two three four", 4, 7, 0.6, reach=0.2) == "one three two four"


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.ComparisonWarning")
def test_scores_fall_for_a_model_that_reads_the_start_and_stay_for_one_that_reads_all():
    rows = ld.position_sensitivity({"first": reader(300), "all": reader(None)}, TOPICS, CORPUS, GOLD)
    found = ld.compare(rows, baseline="0", correction="holm")
    assert found.names == ["0", "0.25", "0.5", "0.75", "1"]
    assert found.measures == ["first", "all"]
    assert found.means["first"].is_monotonic_decreasing
    tests = found.comparisons.set_index(["measure", "name"])
    assert tests.loc[("first", "1"), ["-", "reject"]].tolist() == [12, True]
    assert (tests.loc["all", ["difference", "-"]] == 0).all(axis=None)
    first = rows[rows["measure"] == "first"].pivot(index="qid", columns="name", values="value")
    assert tests.loc[("first", "1"), "p-value"] == pytest.approx(stats.ttest_rel(first["1"], first["0"]).pvalue)


def test_a_text_without_sentences_is_cut_between_words():
    text = " ".join(f"word{i:03}" for i in range(400))
    gold = GOLD.head(1).assign(start=text.index("word200"), end=text.index(" word203"))
    place = pt.apply.doc_score(lambda row: row["text"].index("word200") / len(text))
    found = ld.position_sensitivity(place, TOPICS.head(1), CORPUS.head(1).assign(text=text), gold)
    np.testing.assert_allclose(found["value"], [0, 0.25, 0.5, 0.75, 1], atol=0.01)


def test_values_are_means_over_the_moved_documents_of_a_query(cross_encoder):
    topics, corpus, gold = TOPICS.head(2), CORPUS.head(3), GOLD.head(3).assign(qid=["q0", "q1", "q1"])
    model = ld.MaxP(cross_encoder, window_size=40, stride=30)
    before = [frame.copy() for frame in (topics, corpus, gold)]
    found = ld.position_sensitivity(model, topics, corpus, gold, places=[1, 0])
    for frame, old in zip((topics, corpus, gold), before, strict=True):
        pd.testing.assert_frame_equal(frame, old)
    spans = list(zip(corpus["text"], gold["start"], gold["end"], strict=True))
    texts = [move_passage(*span, place) for place in (0, 1) for span in spans]
    frame = pd.DataFrame({"qid": "q", "query": "elephants", "docno": list("abcdef"), "text": texts})
    a, b, c, d, e, f = model(frame)["score"]
    np.testing.assert_allclose(found["value"], [a, (b + c) / 2, d, (e + f) / 2], rtol=1e-5)
    keys = [("0", "q0", "MaxP"), ("0", "q1", "MaxP"), ("1", "q0", "MaxP"), ("1", "q1", "MaxP")]
    assert list(found[["name", "qid", "measure"]].itertuples(index=False, name=None)) == keys


def test_one_passage_can_answer_several_queries():
    gold = GOLD.head(1).merge(TOPICS["qid"], how="cross", suffixes=("_of", "")).assign(docno="d0")
    found = ld.position_sensitivity(reader(None), TOPICS, CORPUS, gold, places=[0, 1])
    assert found["qid"].tolist() == 2 * TOPICS["qid"].tolist()


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
