"""needle and passkey: one answer at a known position of documents of given lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import find_leaks
from pyterrier_longdoc.data.needle import invented_needles, needle, passkey, passkeys

from ..support import tiny

PROSE = (
    "The first sentence has seven words. Is this one shorter? Yes! And here, at last, comes the fourth of them. " * 18
)


def small(build=passkey, **arguments):
    return build(**{"background": PROSE, "lengths": (64, 128), "queries": 3, "documents": 5, **arguments})


def check_places(collection, count=count_tokens):
    for row in collection.gold.itertuples():
        text = collection.documents[row.docno]["text"]
        [query] = collection.topics["query"][collection.topics["qid"] == row.qid]
        found = text[row.start : row.end]
        name = query.removeprefix("what is the passkey for ").removeprefix("What is the ").rstrip("?")
        assert name in found
        assert text.count(found) == 1
        assert count(text) == row.length
        assert count(text[: row.start]) == row.first_token
        assert row.start == 0 or text[row.start - 1] == " "


@pytest.mark.parametrize("build", [passkey, needle])
def test_documents_have_their_lengths_and_one_answer(build):
    collection = small(build)
    assert [len(collection.documents), len(collection.topics)] == [10, 6]
    check_places(collection)
    for docno, row in collection.documents.items():
        length = int(docno.partition("-")[0])
        assert length - 2 <= count_tokens(row["text"]) <= length  # a word with its full stop may not fit
    assert collection.splits == {"64": [f"q64-{i}" for i in range(3)], "128": [f"q128-{i}" for i in range(3)]}
    assert set(collection.get_qrels("64")["docno"]) == {"64-0", "64-1", "64-2"}
    assert collection.parts.groups == {docno: docno.partition("-")[0] for docno in collection.documents}
    assert find_leaks(collection).empty


def test_answers_are_between_sentences_at_all_depths():
    collection = needle(PROSE, lengths=(256,), queries=60, documents=60)
    for row in collection.gold.itertuples():
        before = collection.documents[row.docno]["text"][: row.start].rstrip()
        assert not before or before[-1] in ".!?"
    place = collection.gold["first_token"] / collection.gold["length"]
    assert place.nunique() > 15
    assert 0.3 < place.mean() < 0.6
    assert place.max() > 0.8


@given(
    st.lists(st.text(alphabet="ab .!é\n", max_size=30), max_size=8),
    st.integers(40, 90),
    st.integers(0, 100),
    st.sampled_from([count_tokens, len, lambda text: -(-len(text) // 3), lambda text: len(text) // 3]),
)
def test_positions_and_lengths_are_right_for_any_background_and_tokenizer(texts, length, seed, count):
    length = 200 if count is len else length
    collection = needle(
        ["a.", *texts], lengths=(length,), queries=2, documents=2, repeat=True, seed=seed, tokenizer=count
    )
    check_places(collection, count)
    for row in collection.corpus:
        assert count(row["text"]) <= length


def test_the_same_seed_gives_the_same_documents():
    first = list(small(seed=3).corpus)
    assert list(small(seed=3).corpus) == first
    assert list(small(seed=4).corpus) != first


def test_generated_needles_never_change():
    """Like those of the published sets."""
    assert passkeys(1)[0][1].startswith("Dana Weber's pass key is 13294. ")
    assert invented_needles(1)[0][0] == "What is the Pelovaar bridge?"


def test_needles_can_be_passed():
    mine = [(f"what is {word}?", f"It is {word} indeed.") for word in tiny.WORDS[:10]]
    collection = needle(PROSE, mine, lengths=(64, 128), queries=2, documents=5)
    assert collection.topics["query"].tolist() == [mine[i][0] for i in (0, 1, 5, 6)]
    assert "It is sun indeed." not in collection.documents["64-0"]["text"]
    assert mine[0][1] in collection.documents["64-0"]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": 6}, "queries=6"),
        ({"queries": 0}, "queries=0"),
        ({"lengths": ()}, "lengths="),
        ({"lengths": (64, 64)}, "lengths="),
        ({"lengths": (8,)}, "length=8"),
        ({"lengths": (4096,), "repeat": False}, "length=4096"),
        ({"documents": 700}, "needles"),
        ({"background": ["", " \n"]}, "background"),
        ({"build": needle, "needles": [("a", "b")] * 100}, "needles"),
        ({"build": needle, "needles": [("a", "\u200b"), *(("a", str(i)) for i in range(10))]}, "needles="),
        ({"build": needle, "needles": [("a", f"Yes{'!' * i}") for i in range(1, 11)]}, "Yes!"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)
