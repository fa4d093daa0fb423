"""Numbers of queries, by which a comparison groups them."""

import numpy as np
import pandas as pd
import pytest

import pyterrier_longdoc as ld

from ..support.passages import collection


def test_the_position_of_a_query_is_the_mean_over_its_relevant_documents():
    frame = pd.DataFrame({"qid": [1, "1", 2, 2, 3], "first_token": [50, 150, 7, pd.NA, pd.NA]}, index=[0, 1, 0, 1, 2])
    assert ld.position_by_query(frame) == {"1": 100.0, "2": 7.0}
    with pytest.raises(ValueError, match="first_token"):
        ld.position_by_query(frame[["qid"]])


def test_positions_are_those_of_relevant_positions():
    known = collection(4)
    found = ld.relevant_positions(known.topics, known.qrels, known.corpus, passages=known.passages)
    assert ld.position_by_query(found) == dict(zip(known.gold["qid"], known.gold["first_token"], strict=True))


def test_the_length_of_a_query_is_the_mean_over_its_relevant_documents():
    rows = [("q", "a", 1), ("q", "b", 2), ("q", "b", 2), ("q", "long", 0), ("q", "unknown", 1), ("other", "unknown", 1)]
    qrels = pd.DataFrame(rows, columns=["qid", "docno", "label"])
    assert ld.length_by_query(qrels, {"a": 100, "b": 200, "long": 9999}) == {"q": np.mean([100, 200])}
