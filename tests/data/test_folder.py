"""Collections in a folder of plain files."""

import json

import pytest

from pyterrier_longdoc.data import FolderDataset


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
