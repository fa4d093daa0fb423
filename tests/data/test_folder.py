"""Collections in a folder of plain files."""

import json

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.data import CollectionParts, FolderDataset, PositionedCollection

from ..support import tiny
from ..support.sources import build, passages, qrels


@pytest.fixture
def folder(tmp_path):
    docs = [{"docno": "d1", "text": "one\u2028\x0ctext"}, {"docno": "d2", "text": "", "title": "Two", "other": 3}]
    files = {
        "docs.jsonl": "\n".join(json.dumps(d, ensure_ascii=False) for d in docs) + "\n\n",
        "topics.tsv": "1\twhat is\ta tab\n2\tnaïve query \n",
        "qrels.txt": "1 0 d1 2\n1\t0\td9\t-1\n2 Q0 d2 0\n",
        "spans.jsonl": '{"qid": "1", "docno": "d1", "start": 5, "end": 9, "answer_start": 6}\n',
        "splits.tsv": "2\ttest\n1\tdev\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content, "utf-8")
    return tmp_path


def read(dataset):
    return dataset.documents, *dataset.get_topicsqrels(), dataset.gold, dataset.splits


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_folder_is_read_with_or_without_byte_order_marks(folder, mark):
    for file in folder.iterdir():
        file.write_bytes(mark + file.read_bytes())
    dataset = FolderDataset(folder)
    assert dataset.get_topics().values.tolist() == [["1", "what is\ta tab"], ["2", "naïve query"]]
    assert dataset.get_qrels().values.tolist() == [["1", "d1", 2], ["1", "d9", -1], ["2", "d2", 0]]
    assert list(dataset.get_corpus_iter(verbose=False)) == [
        {"docno": "d1", "text": "one\u2028\x0ctext", "title": ""},
        {"docno": "d2", "text": "", "title": "Two"},
    ]
    assert dataset.gold.values.tolist() == [["1", "d1", 5, 9, 1, 2, "", ""]]
    assert dataset.splits == {"test": ["2"], "dev": ["1"]}
    assert [frame["qid"].tolist() for frame in dataset.get_topicsqrels("dev")] == [["1"], ["1", "1"]]


def test_a_folder_without_documents_is_refused(folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*docs\.jsonl"):
        FolderDataset(folder / "nowhere")


def test_a_folder_needs_neither_qrels_nor_spans_nor_splits(folder):
    (folder / "docs.jsonl").write_text('{"docno": "d1", "text": "one"}\n')
    for name in ("qrels.txt", "spans.jsonl", "splits.tsv"):
        (folder / name).unlink()
    dataset = FolderDataset(folder)
    assert dataset.documents == {"d1": {"docno": "d1", "text": "one"}}  # nobody has a title
    assert (len(dataset.get_topics()), len(dataset.gold), dataset.splits) == (2, 0, {})
    assert [dataset._describe_component(name) for name in ("corpus", "topics", "qrels")] == [True, True, None]
    with pytest.raises(FileNotFoundError, match=r"qrels\.txt"):
        dataset.get_qrels()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("docs.jsonl", "{not json"),
        ("docs.jsonl", '["d3"]'),
        ("docs.jsonl", '{"docno": 3, "text": "x"}'),
        ("docs.jsonl", '{"docno": "d3"}'),
        ("docs.jsonl", '{"docno": "d3", "text": "x", "title": 1}'),
        ("docs.jsonl", '{"docno": "d1", "text": "x"}'),
        ("topics.tsv", "3 no tab"),
        ("topics.tsv", "3\t "),
        ("topics.tsv", "qid\tquery"),
        ("topics.tsv", "1\tanother"),
        ("qrels.txt", "1 0 d1"),
        ("qrels.txt", "1 0 d1 yes"),
        ("spans.jsonl", '{"qid": "1", "docno": "d9", "start": 0, "end": 1}'),
        ("spans.jsonl", '{"qid": "1", "docno": "d1", "start": 5, "end": 10}'),
        ("spans.jsonl", '{"qid": "1", "docno": "d1", "end": "5"}'),
        ("splits.tsv", "1\ttest"),
        ("splits.tsv", "3"),
        ("splits.tsv", "3\tdev"),
    ],
)
def test_the_malformed_line_of_a_file_is_named(folder, file, line):
    content = (folder / file).read_text("utf-8").rstrip("\n").split("\n")
    (folder / file).write_text("\n".join([*content, "", line]), "utf-8")
    with pytest.raises(ValueError, match=f"^{folder / file}:{len(content) + 2}: "):
        read(FolderDataset(folder))


def test_files_are_read_when_they_are_needed(folder):
    for file in folder.iterdir():
        file.write_text("malformed\n1\thow\n" if file.name != "topics.tsv" else "1\thow\n")
    assert FolderDataset(folder).get_topics().values.tolist() == [["1", "how"]]


# Saved collections.


def test_a_saved_collection_is_read_back(tmp_path):
    odd = 'é/猫"\\,'
    source = [{**passages()[0], "docno": odd}, *passages()[1:], {"docno": "é", "text": "ü\u2028\n\x0c"}]
    judged = qrels().assign(docno=[odd, *qrels()["docno"][1:]])
    saved = build(passages=source, qrels=judged, splits={"é, all": 2, "train": 3}, tokenizer=tiny.tokenizer())
    for _ in range(2):  # the second one replaces the first
        saved.save(tmp_path / "saved")
    found = FolderDataset(tmp_path / "saved", tokenizer=tiny.tokenizer())
    assert list(found.documents.items()) == list(saved.documents.items())
    assert found.splits == saved.splits
    for split in [None, *saved.splits]:
        for frame, expected in zip(found.get_topicsqrels(split), saved.get_topicsqrels(split), strict=True):
            pd.testing.assert_frame_equal(frame, expected)
    given = ["position", "passage"]  # which only the generator knows
    pd.testing.assert_frame_equal(found.gold.drop(columns=given), saved.gold.drop(columns=given))
    assert list(pt.get_dataset(f"longdoc:folder:{tmp_path / 'saved'}").corpus) == list(saved.corpus)


def test_titles_unjudged_documents_and_line_breaks_in_queries_are_saved(tmp_path):
    documents = {"d1": {"docno": "d1", "text": "a\nb", "title": "A"}, "d2": {"docno": "d2", "text": "", "title": ""}}
    topics = pd.DataFrame({"qid": ["1"], "query": ["two\n lines "]})
    labels = pd.DataFrame({"qid": ["1", "1"], "docno": ["d1", "gone"], "label": [2, -1]})
    PositionedCollection("x", CollectionParts(documents, topics, labels)).save(tmp_path)
    found = FolderDataset(tmp_path)
    assert (found.documents, found.splits, len(found.gold)) == (documents, {}, 0)
    assert found.topics.values.tolist() == [["1", "two lines"]]
    pd.testing.assert_frame_equal(found.qrels, labels)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qid": "a b"}, "'a b'"),
        ({"qid": ""}, "''"),
        ({"docno": "a\u2028b"}, "a"),
        ({"splits": {"dev": ["1"], "test": ["1"]}}, "variants"),
    ],
)
def test_what_a_folder_cannot_express_is_refused_and_nothing_written(changes, named, tmp_path):
    qid, docno = changes.get("qid", "1"), changes.get("docno", "d1")
    parts = CollectionParts(
        {"d1": {"docno": "d1", "text": "x"}},
        pd.DataFrame({"qid": [qid], "query": ["q"]}),
        pd.DataFrame({"qid": [qid], "docno": [docno], "label": [1]}),
        splits=changes.get("splits", {}),
    )
    with pytest.raises(ValueError, match=named):
        PositionedCollection("x", parts).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
