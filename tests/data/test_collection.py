import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import DocstringsDataset, FolderDataset, far_relevant, find_leaks, passkey
from pyterrier_longdoc.data.collection import CollectionParts, PositionedCollection

from ..support.sources import build, passages

DOCUMENTS = {
    "d1": "filler one relevant alpha",
    "d2": "filler two relevant beta",
    "d3": "no more",
}


def planted(**changes):
    """A collection without leaks: two splits, one topic and relevant document each, and a document more."""
    parts = CollectionParts(
        documents={docno: {"docno": docno, "text": text, "title": docno} for docno, text in DOCUMENTS.items()},
        topics=pd.DataFrame({"qid": ["q1", "q2"], "query": ["first", "second"]}),
        qrels=pd.DataFrame({"qid": ["q1", "q2"], "docno": ["d1", "d2"], "label": 1}),
        gold=[("q1", "d1", 11, 25, 2, 4, "far", ""), ("q2", "d2", 11, 24, 2, 4, "far", "")],
        splits={"train": ["q1"], "test": ["q2"]},
    )
    return PositionedCollection("planted", replace(parts, **changes), default="test")


def with_texts(**changed):
    texts = {**DOCUMENTS, **changed}
    return {"documents": {docno: {"docno": docno, "text": text, "title": docno} for docno, text in texts.items()}}


# ---------------------------------------------------------------- texts


def test_loader_keeps_rows_index_and_columns():
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
    assert pt.inspect.transformer_inputs(loader) == [["docno"]]


def test_loader_names_what_it_does_not_know():
    with pytest.raises(KeyError, match="'nothing' is not in the collection 'planted'"):
        planted().text_loader()(pd.DataFrame({"docno": ["d1", "nothing"]}))
    with pytest.raises(ValueError, match=r"'planted'.*'body'.*'text', 'title'"):
        planted().text_loader("body")


def test_loader_in_pipelines(capsys):
    collection = planted()
    # The same request gives the same loader.
    assert collection.text_loader() is collection.text_loader("*") is collection.text_loader(["text", "title"])
    assert collection.text_loader("text") is collection.text_loader(["text"])
    assert collection.text_loader("text") is not collection.text_loader("title")
    topics, qrels = collection.get_topicsqrels()
    run = pt.Transformer.from_df(topics.merge(qrels).assign(score=1.0, rank=0))
    pipelines = {"one": run >> collection.text_loader() % 3, "two": run >> collection.text_loader()}
    table = pt.Experiment(pipelines, topics, qrels, ["recip_rank"], plan="tree", validate="error")
    assert table["recip_rank"].tolist() == [1.0, 1.0]
    loader = pickle.loads(pickle.dumps(collection.text_loader()))
    assert loader(run(topics))["text"].tolist() == ["filler two relevant beta"]
    assert "alpha" not in pt.schematic.draw(loader)
    capsys.readouterr()
    collection.text_loader(verbose=True)(run(topics))
    assert "TextLoader" in capsys.readouterr().err


def test_corpus_is_sized_and_can_be_read_again(capsys):
    collection = planted()
    corpus = collection.get_corpus_iter(verbose=False)
    assert len(corpus) == len(collection.corpus) == 3
    rows = list(corpus)
    assert rows == list(collection.corpus) == list(collection.corpus)
    assert rows[0] == {"docno": "d1", "text": "filler one relevant alpha", "title": "d1"}
    assert capsys.readouterr().err == ""
    assert len(list(collection.get_corpus_iter())) == 3
    assert "planted documents" in capsys.readouterr().err


# ---------------------------------------------------------------- topics, qrels, statistics


def test_variants_of_topics_and_qrels():
    collection = planted()
    assert collection.get_topics().equals(collection.get_topics("test"))
    assert collection.get_topics("train").to_dict("list") == {"qid": ["q1"], "query": ["first"]}
    assert collection.get_qrels("train").to_dict("list") == {"qid": ["q1"], "docno": ["d1"], "label": [1]}
    assert collection.splits == {"train": ["q1"], "test": ["q2"]}
    assert collection._describe_component("qrels") == ["train", "test"]
    assert [collection._describe_component(name) for name in ("corpus", "index")] == [True, None]
    for read in (collection.get_topics, collection.get_qrels):
        with pytest.raises(ValueError, match="variant='dev'"):
            read("dev")
    every = planted(splits={})
    with pytest.raises(ValueError, match=r"'planted'.* must be one of None$"):
        every.get_topics("dev")
    assert every._describe_component("topics") is True
    assert PositionedCollection("all", every.parts).get_topicsqrels()[1].equals(every.qrels)


def test_parts_are_made_at_the_first_use():
    made = []
    collection = PositionedCollection("late", lambda: made.append(1) or planted().parts, variants=["a"])
    assert (repr(collection), collection._describe_component("topics")) == ("PositionedCollection('late')", ["a"])
    assert not made
    assert len(collection.gold) == len(collection.topics) == 2
    assert made == [1]
    assert collection.gold.dtypes.astype(str)["start"] == "int64"


COUNTS = ["queries", "documents", "max"]


def test_statistics_are_those_of_the_texts():
    collection = build(splits={"a": 1, "b": 1}, distractors=4)
    sizes = [count_tokens(row["text"]) for row in collection.corpus]
    table = collection.statistics(limits=(50,)).set_index("split")
    assert list(table.index) == ["a", "b", "all"]
    row = table.loc["all"]
    assert row["documents"] == 14
    assert row["document_tokens"] == np.mean(sizes)
    assert row["max"] == max(sizes)
    assert row["over_50"] == np.mean([size > 50 for size in sizes])
    assert row["first_min"] == collection.gold["first_token"].min()
    assert row[["queries", "query_tokens", "positives"]].tolist() == [5, 3.0, 2.0]
    assert table["queries"].sum() == 10
    assert planted().lengths().tolist() == [4, 4, 2]
    words = collection.lengths(lambda text: len(text.split()))
    assert words.tolist() == [len(row["text"].split()) for row in collection.corpus]
    assert np.isnan(planted(documents={}, gold=[]).statistics()["document_tokens"]).all()


def test_all_collections_have_the_same_statistics(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"docno": "a", "text": "one two three"}\n{"docno": "b", "text": "x"}\n')
    bare = FolderDataset(tmp_path).statistics()
    (tmp_path / "topics.tsv").write_text("1\thow one\n")
    (tmp_path / "qrels.txt").write_text("1 0 a 2\n1 0 b 0\n")
    of_folder = FolderDataset(tmp_path).statistics()
    assert of_folder.iloc[0, :7].tolist() == ["all", 1, 2.0, 1.0, 2, 2.0, 2.0]
    empty = planted(documents={}, gold=[], splits={}).statistics()
    for table in (bare, of_folder, empty, passkey().statistics(), DocstringsDataset({}).statistics()):
        assert list(table.columns) == list(build().statistics().columns)
        assert set(table[COUNTS].dtypes.astype(str)) == {"int64"}
        assert set(table.drop(columns=["split", *COUNTS]).dtypes.astype(str)) == {"float64"}


def test_candidates_of_random_order_have_the_mrr_of_chance():
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
    with pytest.raises(ValueError, match="depth=401"):
        collection.candidates(depth=401)
    with pytest.raises(ValueError, match="pool='some'"):
        collection.candidates(pool="some")


def test_candidates_of_the_same_length():
    collection = planted(groups={"d1": "short", "d2": "long", "d3": "long"})
    same = collection.candidates(pool="same_length")
    assert sorted(same["docno"]) == ["d2", "d3"]
    assert collection.candidates("train", pool="same_length")["docno"].tolist() == ["d1"]
    assert sorted(collection.candidates()["docno"]) == ["d1", "d2", "d3"]
    unjudged = planted(groups={"d1": "short"}, qrels=planted().qrels.head(1))
    with pytest.raises(ValueError, match="'q2': its pool has 0 documents"):
        unjudged.candidates(pool="same_length")
    with pytest.raises(ValueError, match="pool='same_length'"):
        planted().candidates(pool="same_length")


def test_candidates_are_documents_of_the_collection():
    unknown = pd.DataFrame({"qid": ["q2"], "docno": ["nowhere"], "label": [1]})
    collection = planted(qrels=pd.concat([unknown, planted().qrels]))
    for run in (collection.candidates(depth=2), collection.candidates(pool="judged")):
        assert set(run["docno"]) <= {"d1", "d2", "d3"}


# ---------------------------------------------------------------- leaks


def test_every_kind_of_leak_is_found():
    assert find_leaks(planted()).empty
    same_query = {"topics": pd.DataFrame({"qid": ["q1", "q2"], "query": ["The same", "the  SAME"]})}
    moved = [("q1", "d1", 11, 25, 2, 4, "far", ""), ("q2", "d2", 10, 25, 2, 4, "far", "")]
    found = {
        "shared query": planted(**same_query),
        "shared passage": planted(**with_texts(d2="another b RELEVANT  alpha"), gold=moved),
        "duplicate document": planted(**with_texts(d3="Filler one\nrelevant alpha")),
    }
    for kind, collection in found.items():
        leaks = find_leaks(collection)
        assert set(leaks["kind"]) == {kind}
    assert find_leaks(found["shared passage"]).values.tolist() == [["shared passage", "train", "q1", "d1", "test"]]
    assert find_leaks(found["duplicate document"]).values.tolist() == [["duplicate document", "", "", "d3", "d1"]]
    assert find_leaks(planted(**same_query, splits={"dev": ["q1", "q2"], "sample": ["q1"]})).empty


def test_leaks_are_found_in_each_unicode_form():
    assert find_leaks(planted(**with_texts(d3="f\u00adiller o\u0301ne\u200b relevant alpha")))["kind"].tolist() == [
        "duplicate document"
    ]
    topics = pd.DataFrame({"qid": ["q1", "q2"], "query": ["\ufb01rst café", "first cafe\u0301"]})
    assert find_leaks(planted(topics=topics))["kind"].tolist() == ["shared query"]


def test_filler_of_far_relevant_is_searched_for_leaks():
    assert find_leaks(build()).empty
    copied = build(passages=[*passages(), {"docno": "copy", "text": "  " + passages()[0]["text"].upper()}])
    assert len(copied.documents) == 10
    assert find_leaks(copied).empty
