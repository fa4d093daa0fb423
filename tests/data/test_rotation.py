"""RotateDocuments: relevant text moves to any position, and no character is lost."""

import pickle
import random

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.data import RotateDocuments, rotate

TEXT = "First sentence here. Second one, longer than that! A third? And no end"


@given(st.text(), st.integers(0, 1000))
def test_rotation_keeps_every_character(text, seed):
    out = rotate(text, random.Random(seed))
    body = text.rstrip()
    assert out == rotate(text, random.Random(seed))
    assert any(out == body[cut:] + " " * bool(body) + body[:cut] for cut in range(len(body) + 1))


def test_every_word_is_equally_likely_to_become_the_first():
    text = "one, two-three four "
    starts = {0: 0, 5: 0, 9: 0, 15: 0}
    rng = random.Random(0)
    for _ in range(2000):
        out = rotate(text, rng)
        [cut] = [start for start in starts if out == f"{text.rstrip()[start:]} {text[:start]}"]
        starts[cut] += 1
    assert all(420 < count < 580 for count in starts.values())


def test_only_the_text_changes_the_same_way_for_the_same_seed():
    inp = pd.DataFrame(
        {"qid": ["1", "1", "2", "3"], "docno": list("abca"), "text": [TEXT, None, "x y z", TEXT], "score": 1.0},
        index=[3, 3, 0, 7],
    )
    before = inp.copy()
    transformer = RotateDocuments(seed=5)
    out = transformer(inp)
    assert inp.equals(before)
    assert out.drop(columns="text").equals(inp.drop(columns="text"))
    assert list(out.columns) == list(inp.columns)
    texts = out["text"].tolist()
    assert texts[0] == texts[3] != TEXT
    assert texts[1] == ""
    assert transformer(inp.iloc[::-1])["text"].tolist() == texts[::-1]
    assert transformer(inp.iloc[[2]])["text"].tolist() == [texts[2]]
    assert pickle.loads(pickle.dumps(transformer))(inp).equals(out)
    others = {RotateDocuments(seed=seed)(inp)["text"].tolist()[0] for seed in range(20)}
    assert len(others) > 3
