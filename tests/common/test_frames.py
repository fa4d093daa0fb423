"""What loaders of texts are asked for. Judgements that contradict each other: one error, wherever they are given."""

from __future__ import annotations

import shutil

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc import analysis
from pyterrier_longdoc.common.frames import with_text
from pyterrier_longdoc.data import from_passage_qrels
from pyterrier_longdoc.training import add_judged, evaluate, k_fold_fit, make_groups

from ..support import terrier

TOPICS = pd.DataFrame({"qid": ["q1", "q2"], "query": ["a cat", "a dog"]})
PAIRS = [(qid, docno) for qid in TOPICS["qid"] for docno in ("d1", "d2", "d3")]
QRELS = pd.DataFrame([(*pair, int(pair[1] == "d1")) for pair in PAIRS], columns=["qid", "docno", "label"])
AGAIN = pd.DataFrame({"qid": ["q1"], "docno": ["d1"], "label": [0]})
RUN = pd.DataFrame([(*pair, 3.0 - i % 3) for i, pair in enumerate(PAIRS)], columns=["qid", "docno", "score"])
RUN = pt.model.add_ranks(RUN.merge(TOPICS, on="qid")).assign(text="one two")
DOCUMENTS = [{"docno": f"d{i}", "text": "one two"} for i in range(1, 4)]


CALLS = {
    "fit": lambda qrels: ld.MaxP().fit(RUN, qrels),
    "validation": lambda qrels: ld.MaxP().fit(RUN, QRELS, RUN, qrels),
    "k_fold_fit": lambda qrels: k_fold_fit(ld.MaxP(), RUN, qrels, [["q1"], ["q2"]]),
    "make_groups": lambda qrels: make_groups(RUN, qrels),
    "add_judged": lambda qrels: add_judged(RUN, qrels),
    "evaluate": lambda qrels: evaluate(RUN, qrels, "AP"),
    "relevant_positions": lambda qrels: ld.relevant_positions(
        TOPICS, qrels, DOCUMENTS, passages=TOPICS.assign(text="one")
    ),
    "length_by_query": lambda qrels: ld.length_by_query(qrels, {"d1": 3}),
    "agreement with people": lambda qrels: analysis.agreement(QRELS, qrels),
    "agreement of a judge": lambda qrels: analysis.agreement(qrels, QRELS),
    "far_relevant": lambda qrels: ld.far_relevant(DOCUMENTS, TOPICS, qrels),
    "from_passage_qrels": lambda qrels: from_passage_qrels(DOCUMENTS, DOCUMENTS, TOPICS, qrels),
}


def test_contradictory_judgements_are_refused_by_their_pair():
    for call in CALLS.values():
        with pytest.raises(ValueError, match=r"'d1'.*'q1'"):
            call(pd.concat([QRELS, AGAIN]))


def test_two_different_grades_of_a_pair_are_refused():
    with pytest.raises(ValueError, match=r"'d1'.*'q1'"):
        evaluate(RUN, pd.concat([QRELS, AGAIN.assign(label=2)]), "nDCG")


def test_ids_as_numbers_and_strings_are_the_same_pair():
    integers = pd.DataFrame({"qid": [1, "1"], "docno": [7, "7"], "label": [1, 0]})
    with pytest.raises(ValueError, match=r"'7'.*'1'"):
        ld.length_by_query(integers, {"7": 3})


def test_a_duplicate_judgement_counts_once():
    twice = pd.concat([QRELS, QRELS])
    for call in (
        lambda qrels: [group.labels.tolist() for group in make_groups(RUN, qrels)],
        lambda qrels: ld.length_by_query(pd.concat([qrels, AGAIN.assign(docno="d4", label=1)]), {"d1": 3, "d4": 6}),
    ):
        assert call(twice) == call(QRELS)


def test_labels_that_measures_would_take_for_others_are_refused():
    for measure in ["validation", "evaluate", "agreement of a judge"]:
        for label in [1e300, 2**32, 2**31 - 1, -(2.0**40), 0.5]:
            with pytest.raises(ValueError, match="label"):
                CALLS[measure](QRELS.astype({"label": float}).replace({"label": {1: label}}))


@pytest.mark.skipif(shutil.which("perl") is None, reason="ERR is computed by gdeval")
@pytest.mark.parametrize("measure", ["ERR@10", "nDCG@10", "AP"])
def test_a_repeated_document_counts_once_with_its_last_score(measure):
    def number(frame):  # as gdeval needs
        return frame.assign(qid=frame["qid"].str[1:])

    run, qrels = number(RUN.assign(score=-RUN["score"])), number(QRELS)
    for given in (pd.concat([run, run]), pd.concat([run.assign(score=9.0), run])):
        expected = evaluate(run, qrels, measure)
        assert 0 < expected < 1
        assert evaluate(given, qrels, measure) == expected


# Texts.

ROWS = pd.DataFrame({"qid": [1, 1, 2, 2], "query": "a cat", "docno": [7, 8, 7, 7], "docid": [0, 1, float("nan"), 2]})


class Asked:
    """A loader that keeps what it is asked for, and what has such a loader."""

    def __init__(self):
        self.frames = []
        self.loader = pt.apply.generic(self.load)

    def load(self, frame):
        self.frames.append(frame.copy())
        return frame.assign(text="text of " + frame["docno"].astype(str))

    def text_loader(self, fields):
        return self.loader


def test_the_loader_of_a_dataset_or_an_index_gets_each_docno_once_as_a_string():
    asked = Asked()
    loaded = with_text(ROWS, ["text"], asked)
    assert [frame.to_dict("list") for frame in asked.frames] == [{"docno": ["7", "8"]}]
    assert loaded["text"].tolist() == ["text of 7", "text of 8", "text of 7", "text of 7"]
    pd.testing.assert_frame_equal(loaded.drop(columns="text"), ROWS)


def test_any_other_loader_is_called_once_with_all_rows_and_columns():
    asked = Asked()
    with_text(ROWS, ["text"], asked.loader)
    (frame,) = asked.frames
    pd.testing.assert_frame_equal(frame, ROWS)


def test_a_loader_that_fails_is_called_once():
    calls = []

    def load(frame):
        calls.append(len(frame))
        raise RuntimeError("java.lang.ArrayIndexOutOfBoundsException: 7")

    with pytest.raises(ValueError, match="text_loader"):
        with_text(ROWS, ["text"], pt.apply.generic(load))
    assert calls == [4]


LOADERS = {"index": lambda index: index, "loader": lambda index: index.text_loader("text")}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("docids", [[3, 2, 1], [None, 1, None]], ids=["of another index", "with gaps"])
def test_texts_of_a_terrier_index_are_those_of_the_docnos_whatever_the_docids(docids, loader, terrier_index):
    rows = pd.DataFrame({"qid": "1", "query": "dog", "docno": ["d1", "d3", "d1"], "docid": docids})
    loaded = with_text(rows, ["text"], LOADERS[loader](terrier_index))
    assert loaded["text"].tolist() == [terrier.DOCUMENTS[docno] for docno in rows["docno"]]


def test_an_empty_frame_loads_no_text_from_a_terrier_index(terrier_index):
    rows = pd.DataFrame({"qid": [], "query": [], "docno": []}, dtype=str)
    assert with_text(rows, ["text"], terrier_index).columns.tolist() == ["qid", "query", "docno", "text"]
