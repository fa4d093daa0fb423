"""far_relevant: documents made of passages, with the relevant one at a known position."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.common.language import count_tokens, digest
from pyterrier_longdoc.data.far_relevant import PASSAGE_POSITIONS, DocumentRecipe

from ..support import tiny
from ..support.sources import SMALL, build, passages, qrels, topics


def check_documents(collection, source, *, recipe, count=count_tokens):
    """What holds for every collection, counted again in the texts."""
    text_of = {row["docno"]: row["text"].strip() for row in source}
    relevant = set(map(digest, (text_of[docno] for docno in collection.gold["passage"])))
    documents = collection.documents
    for row in collection.gold.itertuples():
        text = documents[row.docno]["text"]
        assert text[row.start : row.end] == text_of[row.passage]
        assert count(text) == row.length
        assert count(text[: row.start].rstrip()) == row.first_token
        pieces = documents.pieces(row.docno)
        assert text == " ".join(text_of[piece] for piece in pieces)
        assert len(set(pieces)) == len(pieces)
        assert [piece for piece in pieces if digest(text_of[piece]) in relevant] == [row.passage]
        if recipe.position == "far":
            assert row.first_token >= recipe.min_offset
        if recipe.position == "early":
            assert row.start == 0 or count(text[: row.end]) <= recipe.beginning
        size = row.length - max((count(text_of[piece]) for piece in pieces if piece != row.passage), default=0)
        assert (size if recipe.extra_passage else row.length) <= recipe.max_doc_len


MANY = {"passages": passages(300), "topics": topics(100), "qrels": qrels(100)}
"""Two hundred documents."""


# ---------------------------------------------------------------- properties of the algorithm


def test_collections_for_different_positions_only_differ_in_positions():
    made = {position: build(position=position, **MANY) for position in PASSAGE_POSITIONS}
    gold = {position: collection.gold.set_index(["qid", "docno"]) for position, collection in made.items()}
    assert gold["early"]["length"].equals(gold["far"]["length"])
    assert gold["uniform"]["length"].equals(gold["far"]["length"])
    for docno in made["far"].documents:
        assert len({tuple(sorted(each.documents.pieces(docno))) for each in made.values()}) == 1
    assert (gold["far"]["first_token"] >= 20).all()
    assert gold["early"]["first_token"].max() < 20
    assert gold["early"]["first_token"].nunique() > 5
    uniform = gold["uniform"]["first_token"] / gold["uniform"]["length"]
    assert 0.3 < uniform.mean() < 0.6
    assert (uniform < 0.2).any()
    assert (uniform > 0.75).any()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_any_process(tmp_path):
    splits = {"train": 0.6, "test": 0.4}
    for name, seed in (("a", 1), ("b", 2)):
        build(seed=seed, splits=splits).save(tmp_path / name)
    code = f"from tests.support.sources import build; build(seed=1, splits={splits}).save({str(tmp_path / 'c')!r})"
    root, environment = Path(__file__).resolve().parents[2], {**os.environ, "PYTHONHASHSEED": "3"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 6  # with the marker of a folder of this package
    contents = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in "abc"}
    assert contents["a"] == contents["c"]
    assert contents["a"] != contents["b"]


def test_a_document_does_not_depend_on_other_documents():
    without = [row for row in passages() if row["docno"] not in ("p8", "p9")]  # which would be filler
    every, fewer = build(), build(topics=topics(4), passages=without)
    assert set(fewer.documents) < set(every.documents)
    assert all(fewer.documents[docno] == every.documents[docno] for docno in fewer.documents)


@given(
    recipe=st.builds(
        DocumentRecipe,
        position=st.sampled_from(PASSAGE_POSITIONS),
        min_offset=st.integers(0, 40),
        max_doc_len=st.integers(70, 120),
        extra_passage=st.booleans(),
        seed=st.integers(0, 10**6),
    ),
)
def test_gold_positions_and_lengths_are_right_for_any_arguments(recipe):
    source = passages(seed=recipe.seed)
    collection = build(passages=source, **vars(recipe))
    assert len(collection.documents) == 10
    check_documents(collection, source, recipe=recipe)


# ---------------------------------------------------------------- tokens


def test_gold_positions_are_in_tokens_of_the_tokenizer():
    tokenizer = tiny.tokenizer()
    collection = build(tokenizer=tokenizer)
    assert collection.documents.lengths_add_up
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    check_documents(collection, passages(), recipe=DocumentRecipe(**SMALL), count=count)


@pytest.mark.parametrize(
    ("count", "position"),
    [(len, "early"), (lambda text: -(-len(text) // 3), "far"), (lambda text: len(text) // 3, "far")],
)
def test_gold_positions_are_right_where_lengths_do_not_add_up(count, position):
    source = [{"docno": f"p{i}", "text": f"{i:04}"} for i in range(400)]
    settings = {"position": position, "min_offset": 30, "max_doc_len": 60}
    collection = build(passages=source, topics=topics(100), qrels=qrels(100), tokenizer=count, **settings)
    assert not collection.documents.lengths_add_up
    check_documents(collection, source, recipe=DocumentRecipe(position, 30, max_doc_len=1000), count=count)
    assert (collection.gold["start"] > 0).any()
    assert collection.lengths().tolist() == collection.gold["length"].tolist()


# ---------------------------------------------------------------- topics, qrels, splits


SHARED = pd.DataFrame({"qid": ["q0", "q1", "q1"], "docno": ["p0", "p0", "p1"], "label": [1, 2, 1]})


def test_a_document_is_relevant_for_every_topic_of_its_passage():
    collection = build(topics=topics(2), qrels=SHARED)
    found = sorted(map(tuple, collection.qrels[["qid", "docno"]].values))
    assert found == [
        ("q0", "q0_p0"), ("q0", "q1_p0"), ("q1", "q0_p0"), ("q1", "q1_p0"), ("q1", "q1_p1")
    ]  # fmt: skip
    assert sorted(map(tuple, collection.gold[["qid", "docno"]].values)) == found


def test_topics_without_a_label_of_min_label_are_left_out():
    graded = qrels().assign(label=[0, 1, 2] * 3 + [-1])
    collection = build(qrels=graded, min_label=2)
    assert collection.qrels["docno"].tolist() == ["q1_p2", "q2_p5", "q4_p8"]
    assert collection.topics["qid"].tolist() == ["q1", "q2", "q4"]


def test_splits_keep_topics_with_a_common_passage_together():
    shared = pd.concat([qrels(), pd.DataFrame({"qid": ["q3"], "docno": ["p0"], "label": [1]})])
    for seed in range(5):
        collection = build(qrels=shared, splits={"train": 3, "test": 2}, seed=seed)
        [with_q0] = [split for split, qids in collection.splits.items() if "q0" in qids]
        assert "q3" in collection.splits[with_q0]
        assert sorted(map(len, collection.splits.values())) == [2, 3]
        assert sorted(qid for qids in collection.splits.values() for qid in qids) == ["q0", "q1", "q2", "q3", "q4"]
        assert set(collection.get_qrels("test")["qid"]) == set(collection.splits["test"])


def test_the_column_split_of_topics_defines_the_splits():
    assert set(build(topics=topics().assign(split=list("aabba"))).splits["b"]) == {"q2", "q3"}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": "middle"}, "position='middle'"),
        ({"max_doc_len": 20}, "max_doc_len=20.*min_offset=20"),
        ({"splits": {"a": 0}}, "splits="),
        ({"splits": dict.fromkeys("abcdefg", 1)}, "f, g empty"),
        ({"passages": passages(5)}, "'p5' of topic 'q2'"),
        ({"passages": passages(10)}, "filler.*variant="),
        ({"passages": passages(12)}, "cannot be completed"),
        ({"passages": [{"docno": "p0", "text": " \n"}, *passages()[1:]]}, "'p0' of topic 'q0'"),
        ({"max_doc_len": 21}, "unfit"),
        ({"max_doc_len": 21, "unfit": "skip"}, "10 of 10"),
    ],
)
def test_wrong_arguments_and_passages_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        list(build(**arguments).corpus)


def test_an_unfit_passage_is_refused_before_the_others_are_read():
    read = []

    class Source:
        def __iter__(self):
            for row in [{"docno": "p0", "text": "word " * 50}, *passages(9999)[1:]]:
                read.append(row)
                yield row

    with pytest.raises(ValueError, match=r"'p0'.*50 tokens.*unfit='skip'"):
        build(passages=Source())
    assert len(read) < 5000


def test_unfit_skip_leaves_out_passages_that_do_not_fit():
    source = [{"docno": "p0", "text": ""}, {"docno": "p1", "text": "word " * 50}, *passages()[3:]]
    collection = build(passages=source, unfit="skip")
    assert set(collection.gold["passage"]) == {f"p{i}" for i in range(3, 10)}
    assert collection.topics["qid"].tolist() == ["q1", "q2", "q3", "q4"]
