"""Collections with gold positions: texts, topics, qrels, statistics and candidates."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.common.frames import with_text
from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import RotateDocuments, far_relevant
from pyterrier_longdoc.data.collection import CollectionParts, PositionedCollection

from ..support.sources import build, passages

DOCUMENTS = {
    "d1": "filler one relevant alpha",
    "d2": "filler two relevant beta",
    "d3": "no more",
}


def planted(texts=None, queries=("first", "second"), **changes):
    """A collection with two splits, one topic and relevant document each, and a document more."""
    texts = {**DOCUMENTS, **(texts or {})}
    parts = CollectionParts(
        documents={docno: {"docno": docno, "text": text, "title": docno} for docno, text in texts.items()},
        topics=pd.DataFrame({"qid": ["q1", "q2"], "query": queries}),
        qrels=pd.DataFrame({"qid": ["q1", "q2"], "docno": ["d1", "d2"], "label": 1}),
        gold=[("q1", "d1", 11, 25, 2, 4, "far", ""), ("q2", "d2", 11, 24, 2, 4, "far", "")],
        splits={"train": ["q1"], "test": ["q2"]},
    )
    return PositionedCollection("planted", replace(parts, **changes), default="test")


# ---------------------------------------------------------------- texts


def test_the_text_loader_adds_texts_and_keeps_rows_index_and_columns():
    inp = pd.DataFrame(
        {"qid": list("112"), "docno": ["d3", "d1", "d3"], "text": "stale", "score": [0.5, 2.0, 1.0], "_x": [1, 2, 3]},
        index=[7, 7, 2],
    )
    before = inp.copy()
    loader = planted().text_loader()
    out = loader(inp)
    assert inp.equals(before)
    assert out.index.tolist() == [7, 7, 2]
    assert out["docno"].tolist() == out["title"].tolist() == ["d3", "d1", "d3"]
    assert out["text"].tolist() == [DOCUMENTS[docno] for docno in out["docno"]]
    assert out[["qid", "score", "_x"]].equals(inp[["qid", "score", "_x"]])
    assert sorted(out.columns) == sorted([*inp.columns, "title"])
    empty = loader(inp.iloc[:0])
    assert empty.dtypes.to_dict() == out.dtypes.to_dict()
    assert pt.inspect.transformer_outputs(loader, ["docno", "qid"]) == ["docno", "qid", "text", "title"]


@pytest.mark.parametrize(
    "load",
    [
        lambda run: with_text(run, ["text"], planted()),
        planted().text_loader(),
        planted().text_loader() >> RotateDocuments(),
    ],
    ids=["text_loader=", "TextLoader", "RotateDocuments"],
)
def test_a_document_of_several_queries_is_in_memory_once(load):
    run = pd.DataFrame({"qid": ["q1", "q2"], "docno": ["d1", "d1"]})
    first, second = load(run)["text"]
    assert first is second


def test_unknown_documents_and_fields_are_named():
    with pytest.raises(KeyError, match="'nothing'"):
        planted().text_loader()(pd.DataFrame({"docno": ["d1", "nothing"]}))
    with pytest.raises(ValueError, match="'body'"):
        planted().text_loader("body")


def test_the_same_arguments_return_the_same_text_loader():
    """So that `pt.Experiment(plan="tree")` runs it once."""
    collection = planted()
    assert collection.text_loader() is collection.text_loader("*") is collection.text_loader(["text", "title"])
    assert collection.text_loader("text") is not collection.text_loader("title")


def test_the_corpus_is_sized_and_re_iterable():
    collection = planted()
    assert len(collection.get_corpus_iter(verbose=False)) == len(collection.corpus) == 3
    rows = list(collection.get_corpus_iter())
    assert rows == list(collection.corpus) == list(collection.corpus)
    assert rows[0] == {"docno": "d1", "text": "filler one relevant alpha", "title": "d1"}


# ---------------------------------------------------------------- topics, qrels, statistics


def test_splits_are_variants_of_topics_and_qrels():
    collection = planted()
    assert collection.splits == {"train": ["q1"], "test": ["q2"]}
    assert collection.get_topics("train").to_dict("list") == {"qid": ["q1"], "query": ["first"]}
    assert collection.get_qrels("train").to_dict("list") == {"qid": ["q1"], "docno": ["d1"], "label": [1]}
    assert collection.get_topics().equals(collection.get_topics("test"))


@pytest.mark.parametrize("splits", [{"train": ["q1"], "test": ["q2"]}, {}])
@pytest.mark.parametrize("component", ["topics", "qrels"])
def test_an_unknown_variant_is_named(component, splits):
    with pytest.raises(ValueError, match="variant='dev'"):
        getattr(planted(splits=splits), f"get_{component}")("dev")


def test_pyterrier_can_list_the_components():
    listed = {name: planted()._describe_component(name) for name in ("qrels", "corpus", "index")}
    assert listed == {"qrels": ["train", "test"], "corpus": True, "index": None}
    assert planted(splits={})._describe_component("topics") is True


def test_statistics_count_queries_documents_and_tokens():
    collection = build(splits={"a": 1, "b": 1})
    sizes = [count_tokens(row["text"]) for row in collection.corpus]
    table = collection.statistics(limits=(50,)).set_index("split")
    assert list(table.index) == ["a", "b", "all"]
    row = table.loc["all"]
    assert row["documents"] == 10
    assert row["document_tokens"] == np.mean(sizes)
    assert row["max"] == max(sizes)
    assert row["over_50"] == np.mean([size > 50 for size in sizes])
    assert row["first_min"] == collection.gold["first_token"].min()
    assert row[["queries", "query_tokens", "positives"]].tolist() == [5, 3.0, 2.0]
    assert table["queries"].sum() == 10


def test_random_candidates_have_the_reciprocal_rank_of_chance():
    source = [{"docno": f"p{i}", "text": f"word{i} of text"} for i in range(440)]
    many = pd.DataFrame({"qid": [f"q{i}" for i in range(400)], "query": "x"})
    judged = pd.DataFrame({"qid": many["qid"], "docno": [f"p{i}" for i in range(400)], "label": 1})
    collection = far_relevant(source, many, judged, min_offset=3, max_doc_len=9)
    run = collection.candidates(depth=100)
    assert (run.groupby("qid").size() == 100).all()
    assert not run.duplicated(["qid", "docno"]).any()
    table = pt.Experiment([pt.Transformer.from_df(run)], many, collection.qrels, ["recip_rank"])
    expected = sum(1 / rank for rank in range(1, 101)) / 100
    assert table["recip_rank"].item() == pytest.approx(expected, abs=0.015)
    assert collection.candidates(depth=100).equals(run)
    assert not collection.candidates(depth=100, seed=1)["docno"].equals(run["docno"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"depth": 4}, "depth="),
        ({"pool": "some"}, "pool="),
        ({"pool": "same_length"}, "pool="),
        ({"pool": "judged"}, "'q2'"),
    ],
    ids=str,
)
def test_candidates_refuse_wrong_arguments_and_queries_without_candidates_by_name(arguments, word):
    with pytest.raises(ValueError, match=word):
        planted(qrels=pd.DataFrame({"qid": ["q1"], "docno": ["d1"], "label": [1]})).candidates(**arguments)


def test_candidates_of_the_same_length_come_from_the_group_of_the_relevant_document():
    collection = planted(groups={"d1": "short", "d2": "long", "d3": "long"})
    same = collection.candidates(pool="same_length")
    assert sorted(same["docno"]) == ["d2", "d3"]
    assert collection.candidates("train", pool="same_length")["docno"].tolist() == ["d1"]
    assert sorted(collection.candidates()["docno"]) == ["d1", "d2", "d3"]


def test_candidates_leave_out_judged_documents_that_are_not_in_the_collection():
    unknown = pd.DataFrame({"qid": ["q2"], "docno": ["nowhere"], "label": [1]})
    collection = planted(qrels=pd.concat([unknown, planted().qrels]))
    for run in (collection.candidates(depth=2), collection.candidates(pool="judged")):
        assert set(run["docno"]) <= {"d1", "d2", "d3"}


def test_far_relevant_does_not_use_a_copy_of_a_relevant_passage_as_filler():
    copy = passages()[0]["text"].upper()
    copied = build(passages=[*passages(), {"docno": "copy", "text": f"  {copy}"}])
    assert len(copied.documents) == 10
    assert not any(copy in row["text"] for row in copied.corpus)


def test_a_collection_cites_its_papers():
    assert planted().citation() == ""
    assert pt.get_dataset("longdoc:docstrings-far").citation().startswith("@inproceedings{boytsov-2025-positional,")
