"""Collections in the layout in which others publish them: invented rows, the published names of files and fields."""

import gzip
import json

import pyterrier as pt
import pytest

from pyterrier_longdoc.data import read_mldr

from ..support.systems import QUIET

pytestmark = QUIET

FORMATS = ["jsonl", "jsonl.gz", "parquet"]


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


# ---------------------------------------------------------------- LongEmbed


LONGEMBED = {
    "corpus": [{"doc_id": f"d{i}", "text": f"text {i}", "context_length": 256 * (1 + i % 2)} for i in range(4)],
    "queries": [{"qid": f"q{i}", "text": f"query {i}", "context_length": 256 * (1 + i % 2)} for i in range(2)],
    "qrels": [{"qid": f"q{i}", "doc_id": f"d{i}"} for i in range(2)],
}


def test_longembed_has_a_split_for_each_length(tmp_path):
    for name, rows in LONGEMBED.items():
        write(tmp_path / name, rows)
    collection = pt.get_dataset(f"longdoc:longembed:{tmp_path}")
    assert collection.splits == {"256": ["q0"], "512": ["q1"]}
    assert collection.get_qrels("512").values.tolist() == [["q1", "d1", 1]]
    assert sorted(collection.candidates("256", pool="same_length")["docno"]) == ["d0", "d2"]
    assert len(collection.candidates()) == 8
    assert collection.documents["d3"] == {"docno": "d3", "text": "text 3"}
    assert len(collection.gold) == 0
    assert collection.statistics()["queries"].tolist() == [1, 1, 2]


# ---------------------------------------------------------------- MLDR


def mldr(folder, form="jsonl.gz", splits=("train", "dev", "test"), documents=8):
    texts = [f"Article {i} tells of river {i}. " * 50 for i in range(documents)]
    write(folder / "corpus", [{"docid": f"doc-en-{i}", "text": text} for i, text in enumerate(texts)], form)
    for number, split in enumerate(splits):
        passages = [{"docid": f"doc-en-{i}", "text": texts[i]} for i in range(number, number + 3)]
        row = {"query_id": f"q-en-{number}", "query": f"Which river is in article {number}?"}
        negative = passages[1:] if split == "train" else []
        write(folder / split, [{**row, "positive_passages": passages[:1], "negative_passages": negative}], form)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_mldr_is_read_in_each_format(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:mldr:{mldr(tmp_path / 'mldr-v1.0-en', form)}")
    assert collection.splits == {"train": ["q-en-0"], "dev": ["q-en-1"], "test": ["q-en-2"]}
    assert collection.get_topics().values.tolist() == [["q-en-2", "Which river is in article 2?"]]  # test
    labels = collection.get_qrels("train").set_index("docno")["label"].to_dict()
    assert labels == {"doc-en-0": 1, "doc-en-1": 0, "doc-en-2": 0}
    assert len(collection.documents) == 8
    assert collection.text_loader()(collection.qrels)["text"].str.startswith("Article").all()


def test_mldr_only_reads_the_requested_splits(tmp_path):
    folder = mldr(tmp_path, splits=("train", "dev"))
    assert list(read_mldr(folder).splits) == ["train", "dev"]
    assert len(read_mldr(folder).get_topics()) == 2  # without test, all
    (folder / "train.jsonl.gz").write_bytes(b"never read")
    assert list(read_mldr(folder, splits=["dev"]).splits) == ["dev"]


def test_missing_and_unknown_splits_of_mldr_are_named(tmp_path):
    folder = mldr(tmp_path, splits=("train", "dev"))
    with pytest.raises(FileNotFoundError, match=r"test\.parquet"):
        read_mldr(folder, splits=["test"])
    with pytest.raises(ValueError, match="splits='validation'"):
        read_mldr(folder, splits=["validation"])


@pytest.mark.parametrize("field", ["positive_passages", "docid"])
def test_a_missing_field_is_named_on_first_use(field, tmp_path):
    for file in mldr(tmp_path, "jsonl").iterdir():
        file.write_text(file.read_text().replace(f'"{field}"', '"other"'))
    collection = read_mldr(tmp_path)
    with pytest.raises(ValueError, match=f"field '{field}'"):
        collection.get_topics()


def test_a_document_can_be_repeated_but_not_with_another_text(tmp_path):
    corpus = mldr(tmp_path, "jsonl") / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + corpus.read_text())
    assert len(read_mldr(tmp_path).documents) == len(list(read_mldr(tmp_path).corpus)) == 8
    corpus.write_text(corpus.read_text() + '{"docid": "doc-en-0", "text": "another"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:17: 'doc-en-0'"):
        read_mldr(tmp_path).get_topics()


def test_a_table_needs_all_of_its_parts(tmp_path):
    folder = mldr(tmp_path, "jsonl")
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "corpus.jsonl").unlink()
    for part in range(2):
        (folder / f"corpus-0000{part}-of-00002.jsonl").write_text("".join(lines[4 * part : 4 * part + 4]))
    assert list(read_mldr(folder).documents) == [f"doc-en-{i}" for i in range(8)]
    (folder / "corpus-00001-of-00002.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="corpus"):
        read_mldr(folder)
