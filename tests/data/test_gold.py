"""Questions in SQuAD's format, and passage judgements whose passages say where they stand: invented texts."""

import json
from types import SimpleNamespace

import pandas as pd
import pyterrier as pt
import pytest
from ir_datasets.datasets.msmarco_document_v2 import MsMarcoV2Document
from ir_datasets.datasets.msmarco_passage_v2 import parse_msmarco_passage

from pyterrier_longdoc.data import from_passage_qrels, read_squad
from pyterrier_longdoc.data.rows import qrels_frame

from ..support.systems import QUIET

pytestmark = QUIET


def squad(path, *articles):
    """A file of articles: their fields, and paragraphs of text, questions and further fields."""
    data = [{**fields, "paragraphs": [paragraph(*part) for part in parts]} for fields, *parts in articles]
    path.write_text(json.dumps({"version": "1", "data": data}), "utf-8")
    return path


def paragraph(context, questions):
    """A question is the answers with their offsets, by qid."""
    found = {qid: [{"text": text, "answer_start": start} for text, start in a] for qid, a in questions}
    qas = [{"id": qid, "question": f"question {qid}?", "answers": answers} for qid, answers in found.items()]
    return {"context": context, "qas": qas, "document_id": 630}


@pytest.mark.filterwarnings("default:.*without an answer")
@pytest.mark.parametrize("of", [str, lambda file: str(file.parent)], ids=["file", "folder"])
def test_squad_articles_become_documents_with_answers_as_gold(tmp_path, of):
    oil = ("Öl floats.", [("q1", [("Öl", 0), ("Öl", 0), ("floats", 3)]), ("q2", [("loats", 3)])])
    crude, burns = {"title": "Crude_Oil"}, ("It burns.", [("q3", [("burns", 3)])])
    virus = {"title": 12}, ("A virus.", [(7, [("", 1), ("virus", 2)]), (8, [])])
    file = squad(tmp_path / "articles.json", (crude, oil, burns), (crude,), virus)
    with pytest.warns(UserWarning, match="2 of 5 questions"):
        collection = pt.get_dataset(f"longdoc:squad:{of(file)}")
    assert list(collection.corpus) == [
        {"docno": "Crude_Oil", "text": "Öl floats.\n\nIt burns.", "title": "Crude Oil"},
        {"docno": "Crude_Oil_2", "text": "", "title": "Crude Oil"},
        {"docno": "630", "text": "A virus.", "title": ""},
    ]
    assert collection.get_topics()["query"].tolist() == ["question q1?", "question q3?", "question 7?"]
    assert collection.get_qrels().values.tolist() == [["q1", "Crude_Oil", 1], ["q3", "Crude_Oil", 1], ["7", "630", 1]]
    texts = [collection.documents[row.docno]["text"][row.start : row.end] for row in collection.gold.itertuples()]
    assert texts == ["Öl", "floats", "burns", "virus"]
    assert collection.gold["first_token"].tolist() == [0, 1, 4, 1]


@pytest.mark.parametrize(
    "paragraphs",
    [
        [("A", [("q1", [("A", 0)])]), ("B", [("q1", [("B", 0)])])],  # one id twice
        [(3, [])],
    ],
)
def test_a_malformed_squad_file_is_named(tmp_path, paragraphs):
    file = squad(tmp_path / "bad.json", ({}, *paragraphs))
    with pytest.raises(ValueError, match=f"^{file}"):
        read_squad(tmp_path)


BODY = "Zürich: 0/60 Times\n“What is the time?” It is short.\nSold in Zürich. It is a measure. Zürich is far."
TOPICS = pd.DataFrame({"qid": ["1", "2", "3"], "query": ["time", "place", "unjudged"]})
DOCUMENT = MsMarcoV2Document("msmarco_doc_00_0", "u", "Zürich", "h", BODY)


def published(number, text, *sentences):
    """A passage as published, its spans as the guidelines of the track read them: in bytes."""
    starts = [(BODY.encode().index(part.encode()), len(part.encode())) for part in sentences]
    spans = ",".join(f"({start},{start + size})" for start, size in starts)
    row = {"pid": f"p{number}", "passage": text, "spans": spans, "docid": "msmarco_doc_00_0"}
    return parse_msmarco_passage(json.dumps(row))


PASSAGES = [
    published(0, "Zürich: 0/60 Times.", "Zürich: 0/60 Times"),  # the full stop is MS MARCO's
    published(1, "“What is the time?” It is short.", "“What is the time?”", "It is short."),
    published(2, "Sold in Zürich. Zürich is far.", "Sold in Zürich.", "Zürich is far."),
    published(3, "Words of another page.", "It is short."),
]


def irds(rows, qrels=None):
    """A dataset as PyTerrier makes them of those of ir_datasets; nobody may read all of it."""
    found = {row.doc_id: row for row in rows}
    store = SimpleNamespace(get_many_iter=lambda names: (found[name] for name in names if name in found))
    judged = {"get_topics": lambda variant: TOPICS, "get_qrels": lambda variant: qrels}
    ref = SimpleNamespace(docs_store=lambda: store)
    return SimpleNamespace(irds_ref=lambda: ref, get_corpus_iter=lambda verbose: None, **judged)


@pytest.mark.filterwarnings("default:.*left out")
def test_judged_passages_of_ms_marco_are_found_in_their_documents_by_bytes():
    judged = ("1", "p0", 0), ("1", "p1", 3), ("1", "p3", 3), ("1", "p9", 1), ("2", "p2", 2), ("2", "p0", 1)
    qrels = qrels_frame(judged)
    with pytest.warns(UserWarning, match="2 of 6.*'p3'"):
        collection = from_passage_qrels(irds(PASSAGES, qrels), irds([DOCUMENT]), min_label=2)
    assert list(collection.corpus) == [{"docno": DOCUMENT.doc_id, "text": BODY, "title": "Zürich"}]
    assert collection.get_topics()["qid"].tolist() == ["1", "2"]
    assert collection.get_qrels().values.tolist() == [["1", DOCUMENT.doc_id, 3], ["2", DOCUMENT.doc_id, 2]]
    gold = [(row.qid, row.passage, BODY[row.start : row.end]) for row in collection.gold.itertuples()]
    whole = ("1", "p1", "“What is the time?” It is short.")
    assert gold == [whole, ("2", "p2", "Sold in Zürich."), ("2", "p2", "Zürich is far.")]


def test_judged_segments_of_trec_rag_are_found_in_their_documents_by_characters():
    place = {"start_char": BODY.index("“"), "end_char": BODY.index("It is a")}
    text = "“What is the time?” It is short. Sold in Zürich. "
    segment = pd.DataFrame([{"docid": "d_1#3_99", "headings": "", "segment": text, **place}])
    qrels = qrels_frame([("1", "d_1#3_99", 2), ("2", "d_1#3_99", 0)])
    documents = [{"docid": "d_1", "body": BODY}, {"docid": "d_2", "body": "Other."}]
    collection = from_passage_qrels(segment, documents, TOPICS, qrels)
    assert collection.get_qrels().values.tolist() == [["1", "d_1", 2], ["2", "d_1", 0]]
    assert collection.gold[["qid", "start", "end"]].values.tolist() == [["1", *place.values()]]
    with pytest.raises(ValueError, match="2 of 2"):  # no document of a judged segment
        from_passage_qrels(segment, documents[1:], TOPICS, qrels)
