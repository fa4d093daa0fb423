"""LongEmbed in the layout in which others publish it: invented rows, the published names of files and fields."""

import gzip
import json

import pyterrier as pt
import pytest

from pyterrier_longdoc.data import read_longembed


def write(path, rows, form="jsonl"):
    """A table, its format added to the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(f"{path.name}.{form}")
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(content) if form == "jsonl.gz" else content)
    return path


LONGEMBED = {
    "corpus": [{"doc_id": f"d{i}", "text": f"text {i}", "context_length": 256 * (1 + i % 2)} for i in range(4)],
    "queries": [{"qid": f"q{i}", "text": f"query {i}", "context_length": 256 * (1 + i % 2)} for i in range(2)],
    "qrels": [{"qid": f"q{i}", "doc_id": f"d{i}"} for i in range(2)],
}


def longembed(folder, form="jsonl"):
    for name, rows in LONGEMBED.items():
        write(folder / name, rows, form)
    return folder


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_longembed_has_a_split_for_each_length(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:longembed:{longembed(tmp_path, form)}")
    assert collection.splits == {"256": ["q0"], "512": ["q1"]}
    assert collection.get_qrels("512").values.tolist() == [["q1", "d1", 1]]
    assert sorted(collection.candidates("256", pool="same_length")["docno"]) == ["d0", "d2"]
    assert len(collection.candidates()) == 8
    assert collection.documents["d3"] == {"docno": "d3", "text": "text 3"}
    assert len(collection.gold) == 0
    assert collection.statistics()["queries"].tolist() == [1, 1, 2]


@pytest.mark.parametrize(("table", "field"), [("corpus", "doc_id"), ("queries", "text"), ("qrels", "qid")])
def test_a_missing_field_is_named(table, field, tmp_path):
    file = longembed(tmp_path) / f"{table}.jsonl"
    file.write_text(file.read_text().replace(f'"{field}"', '"other"'))
    with pytest.raises(ValueError, match=rf"{table}\.jsonl:1.*'{field}'"):
        read_longembed(tmp_path)


def test_a_document_can_be_repeated_but_not_with_another_text(tmp_path):
    corpus = longembed(tmp_path) / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + corpus.read_text())
    assert len(read_longembed(tmp_path).documents) == 4
    corpus.write_text(corpus.read_text() + '{"doc_id": "d0", "text": "another"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:9: 'd0'"):
        read_longembed(tmp_path)


def test_a_table_needs_all_of_its_parts(tmp_path):
    (longembed(tmp_path) / "corpus.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="corpus"):
        read_longembed(tmp_path)
    for part in range(2):
        write(tmp_path / f"corpus-0000{part}-of-00002", LONGEMBED["corpus"][2 * part : 2 * part + 2])
    assert list(read_longembed(tmp_path).documents) == [f"d{i}" for i in range(4)]
    (tmp_path / "corpus-00001-of-00002.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="corpus"):
        read_longembed(tmp_path)
