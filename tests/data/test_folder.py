import json

import pandas as pd
import pytest

from pyterrier_longdoc.data import FolderDataset


@pytest.fixture
def folder(tmp_path):
    docs = [{"docno": "d1", "text": "one\u2028\x0ctext"}, {"docno": "d2", "text": "", "title": "Two", "other": 3}]
    files = {
        "docs.jsonl": "\n".join(json.dumps(d, ensure_ascii=False) for d in docs) + "\n\n",
        "topics.tsv": "1\twhat is\ta tab\n2\tnaïve query \n",
        "qrels.txt": "1 0 d1 2\n1\t0\td9\t-1\n2 Q0 d2 0\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content, "utf-8")
    return tmp_path


def read(dataset):
    return dataset.documents, *dataset.get_topicsqrels()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_folder_reads_its_three_files(folder, mark):
    for file in folder.iterdir():
        file.write_bytes(mark + file.read_bytes())
    dataset = FolderDataset(folder)
    assert dataset.get_topics().values.tolist() == [["1", "what is\ta tab"], ["2", "naïve query"]]
    assert dataset.get_qrels().values.tolist() == [["1", "d1", 2], ["1", "d9", -1], ["2", "d2", 0]]
    assert list(dataset.get_corpus_iter(verbose=False)) == [
        {"docno": "d1", "text": "one\u2028\x0ctext", "title": ""},
        {"docno": "d2", "text": "", "title": "Two"},
    ]
    assert dataset.text_loader()(pd.DataFrame({"docno": ["d2", "d1"]}))["title"].tolist() == ["Two", ""]
    with pytest.raises(ValueError, match="variant='test'"):
        dataset.get_qrels("test")


def test_folder_says_what_is_missing(folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*docs\.jsonl"):
        FolderDataset(folder / "nowhere")
    (folder / "docs.jsonl").write_text('{"docno": "d1", "text": "one"}\n')
    (folder / "qrels.txt").unlink()
    dataset = FolderDataset(folder)
    assert dataset.documents == {"d1": {"docno": "d1", "text": "one"}}  # nobody has a title
    assert len(dataset.get_topics()) == 2
    assert [dataset._describe_component(name) for name in ("corpus", "topics", "qrels")] == [True, True, None]
    with pytest.raises(FileNotFoundError, match=r"qrels\.txt"):
        dataset.get_qrels()


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("docs.jsonl", "{not json", "JSON"),
        ("docs.jsonl", '["d3"]', "JSON object"),
        ("docs.jsonl", '{"docno": 3, "text": "x"}', "'docno'"),
        ("docs.jsonl", '{"docno": "d3"}', "'text'"),
        ("docs.jsonl", '{"docno": "d3", "text": "x", "title": 1}', "'title'"),
        ("docs.jsonl", '{"docno": "d1", "text": "x"}', "'d1' is there twice"),
        ("topics.tsv", "3 no tab", "qid<tab>query"),
        ("topics.tsv", "3\t ", "qid<tab>query"),
        ("topics.tsv", "1\tanother", "'1' is there twice"),
        ("qrels.txt", "1 0 d1", "qid iteration docno label"),
        ("qrels.txt", "1 0 d1 yes", "qid iteration docno label"),
    ],
)
def test_folder_names_the_malformed_line(folder, file, line, message):
    content = (folder / file).read_text("utf-8").rstrip("\n").split("\n")
    (folder / file).write_text("\n".join([*content, "", line]), "utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read(FolderDataset(folder))
    assert str(error.value).startswith(f"{folder / file}:{len(content) + 2}: ")


def test_a_malformed_file_breaks_no_other(folder):
    for file in folder.iterdir():
        file.write_text("malformed\n1\thow\n" if file.name != "topics.tsv" else "1\thow\n")
    assert FolderDataset(folder).get_topics().values.tolist() == [["1", "how"]]
