import gzip
import json
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest
from transformers import AutoTokenizer

from pyterrier_longdoc.analysis.positions import token_reader
from pyterrier_longdoc.common.language import count_tokens, named_tokenizer, token_counter
from pyterrier_longdoc.data import FolderDataset, read_far_relevant, read_longembed, write_far_relevant
from pyterrier_longdoc.data.collection import GOLD_COLUMNS

from ..support import tiny
from ..support.sources import build, passages, qrels

# ---------------------------------------------------------------- folder


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
    assert [dataset._describe_component(name) for name in ("corpus", "topics", "index")] == [True, True, None]
    for read in (dataset.get_topics, dataset.get_qrels):
        with pytest.raises(ValueError, match=r"no variants of its (topics|qrels), but 'test' was asked for"):
            read("test")


def test_folder_says_what_is_missing(folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere is missing; .*docs\.jsonl.*topics\.tsv.*qrels\.txt"):
        FolderDataset(folder / "nowhere")
    (folder / "docs.jsonl").write_text('{"docno": "d1", "text": "one"}\n')
    (folder / "qrels.txt").unlink()
    dataset = FolderDataset(folder)
    assert dataset.documents == {"d1": {"docno": "d1", "text": "one"}}  # nobody has a title
    assert len(dataset.get_topics()) == 2
    with pytest.raises(FileNotFoundError, match=r"qrels\.txt is missing"):
        dataset.get_qrels()
    (folder / "docs.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"docs\.jsonl is missing"):
        FolderDataset(folder)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("docs.jsonl", "{not json", "not a JSON object"),
        ("docs.jsonl", '["d3"]', "expected a JSON object, got \"\\['d3'\\]\""),
        ("docs.jsonl", '{"docno": 3, "text": "x"}', "field 'docno' must be a string, got 3"),
        ("docs.jsonl", '{"docno": "d3"}', "field 'text' must be a string, got None"),
        ("docs.jsonl", '{"docno": "d3", "text": "x", "title": 1}', "field 'title' must be a string, got 1"),
        ("docs.jsonl", '{"docno": "d1", "text": "x"}', "docno 'd1' is there twice"),
        ("topics.tsv", "3 no tab", "expected 'qid<tab>query', got '3 no tab'"),
        ("topics.tsv", "3\t ", "expected 'qid<tab>query'"),
        ("topics.tsv", "1\tanother", "qid '1' is there twice"),
        ("qrels.txt", "1 0 d1", "expected 'qid iteration docno label', got '1 0 d1'"),
        ("qrels.txt", "1 0 d1 yes", "expected 'qid iteration docno label'"),
    ],
)
def test_folder_names_the_malformed_line(folder, file, line, message):
    content = (folder / file).read_text("utf-8").rstrip("\n").split("\n")
    (folder / file).write_text("\n".join([*content, "", line]), "utf-8")
    dataset = FolderDataset(folder)
    read = {"docs.jsonl": lambda: dataset.documents, "topics.tsv": dataset.get_topics, "qrels.txt": dataset.get_qrels}
    with pytest.raises(ValueError, match=message) as error:
        read[file]()
    assert str(error.value).startswith(f"{folder / file}:{len(content) + 2}: ")


def test_a_real_collection(time_collection):
    dataset = pt.get_dataset(f"longdoc:folder:{time_collection}")
    topics, qrels = dataset.get_topicsqrels()
    assert (len(dataset.documents), len(topics), len(qrels)) == (423, 83, 324)
    assert set(qrels["docno"]) - set(dataset.documents) == {"424", "425"}
    assert set(qrels["qid"]) <= set(topics["qid"])


# ---------------------------------------------------------------- FarRelevant's files


def released(folder, part="bitext", **changes):
    """A collection in files, as released: with further fields, and without gold positions."""
    files = {
        "AnswerFields.jsonl": '{"DOCNO": "d1", "text_raw": "a text", "x": 1}\n\n{"DOCNO": "d2", "text_raw": "b"}\n',
        "QuestionFields.jsonl": '{"DOCNO": "q1", "text_raw": "a query"}\n',
        "qrels.txt": "q1 0 d1 1\n",
        **changes,
    }
    (folder / part).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content:
            (folder / part / name).write_text(content)
    return folder


def test_files_round_trip(tmp_path):
    odd = {"docno": 'é/猫"\\,'}
    source = [{**passages()[0], **odd}, *passages()[1:], {"docno": "é\u2028", "text": "ü\n\x0c"}]
    judged = qrels().assign(docno=[odd["docno"], *qrels()["docno"][1:]])
    collection = build(passages=source, qrels=judged, splits={"é, all": 2, "bitext": 3})
    write_far_relevant(collection, tmp_path)
    dataset = pt.get_dataset(f"longdoc:far-relevant:{tmp_path}")
    assert list(dataset.corpus) == list(collection.corpus)
    assert dataset.gold.equals(collection.gold)
    assert dataset.splits.keys() == collection.splits.keys()
    for split in collection.splits:
        assert dataset.get_topics(split).equals(collection.get_topics(split))
        expected = collection.get_qrels(split).values.tolist()
        assert sorted(dataset.get_qrels(split).values.tolist()) == sorted(expected)
    rows = collection.text_loader()(dataset.qrels)
    assert dataset.text_loader()(dataset.qrels).equals(rows)
    of_splits = [read.statistics().sort_values("split", ignore_index=True) for read in (dataset, collection)]
    pd.testing.assert_frame_equal(*of_splits)  # folders come in the order of their names
    lines = (tmp_path / "input_data" / "bitext" / "QuestionFields.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(json.loads(lines[0])) == {"DOCNO", "text_raw"}
    assert len(dataset.documents) == 10
    write_far_relevant(build(), tmp_path / "whole")
    assert read_far_relevant(str(tmp_path / "whole")).splits == {"all": [f"q{i}" for i in range(5)]}


LONGER = {"min_offset": 60, "max_doc_len": 200}


def word_pieces(tmp_path):
    """A tokenizer that makes more tokens of these passages than there are words, in a folder."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def numbers(collection) -> list[list[int]]:
    return collection.gold[["first_token", "length"]].values.tolist()


@pytest.mark.parametrize("give", [str, Path, AutoTokenizer.from_pretrained])
def test_positions_and_lengths_are_in_one_unit(tmp_path, give):
    """Positions in word pieces among lengths in words lay behind the ends of their documents."""
    written = build(tokenizer=give(word_pieces(tmp_path)), **LONGER)
    write_far_relevant(written, tmp_path / "c")
    read = read_far_relevant(tmp_path / "c")
    assert numbers(read) == numbers(written) != numbers(build(**LONGER))
    length_of = dict(zip(read.documents, read.lengths(), strict=True))
    assert read.gold["length"].tolist() == [length_of[docno] for docno in read.gold["docno"]]
    assert (read.gold["first_token"] < read.gold["length"]).all()
    assert read.statistics().equals(written.statistics())
    reader = token_reader(read.tokenizer)  # as `relevant_positions` takes it
    assert [len(reader(row["text"])) for row in read.corpus] == read.lengths().tolist()
    write_far_relevant(read, tmp_path / "again")
    assert (tmp_path / "again" / "unit.jsonl").read_bytes() == (tmp_path / "c" / "unit.jsonl").read_bytes()


def test_another_tokenizer_counts_positions_anew(tmp_path):
    pieces = word_pieces(tmp_path)
    in_words, in_pieces = build(), build(tokenizer=pieces, **LONGER)
    write_far_relevant(in_words, tmp_path / "words")
    write_far_relevant(in_pieces, tmp_path / "pieces")
    count = token_counter(pieces)
    anew = read_far_relevant(tmp_path / "words", tokenizer=pieces)
    for docno, start, *found in anew.gold[["docno", "start", "first_token", "length"]].values.tolist():
        text = anew.documents[docno]["text"]
        assert found == count([text[:start], text])
    for tokenizer in (lambda text: len(text.split()), count_tokens):
        other = read_far_relevant(tmp_path / "pieces", tokenizer=tokenizer)
        length_of = dict(zip(other.documents, other.lengths(), strict=True))
        assert other.gold["length"].tolist() == [length_of[docno] for docno in other.gold["docno"]]
    (tmp_path / "words" / "unit.jsonl").unlink()  # where nothing is recorded, words are counted
    assert numbers(read_far_relevant(tmp_path / "words")) == numbers(in_words)
    (tmp_path / "pieces" / "unit.jsonl").unlink()
    unknown = read_far_relevant(tmp_path / "pieces")
    assert numbers(unknown) != numbers(in_pieces)
    assert (unknown.gold["length"] == [count_tokens(unknown.documents[d]["text"]) for d in unknown.gold["docno"]]).all()


def test_a_recorded_tokenizer_that_is_not_to_be_had(tmp_path):
    pieces = word_pieces(tmp_path)
    written = build(tokenizer=pieces, **LONGER)
    write_far_relevant(written, tmp_path / "named")
    write_far_relevant(build(tokenizer=lambda text: len(text.split())), tmp_path / "unnamed")
    pieces.rename(tmp_path / "elsewhere")
    named_tokenizer.cache_clear()
    read = read_far_relevant(tmp_path / "named")
    assert numbers(read) == numbers(written)  # these stand in the file
    for folder, message in (
        ("named", r"tokens of '.*tokenizer'; .* cannot be loaded"),
        ("unnamed", "<lambda>.*no name"),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*") as error:
            read_far_relevant(tmp_path / folder).lengths()
        assert "read it with tokenizer=" in str(error.value)
    assert numbers(read_far_relevant(tmp_path / "named", tokenizer=tmp_path / "elsewhere")) == numbers(written)


def test_parts_in_different_tokens(tmp_path):
    write_far_relevant(build(), tmp_path / "c")
    other = {"tokens": "named", "name": str(word_pieces(tmp_path))}
    (tmp_path / "c" / "input_data" / "unit.jsonl").write_text(json.dumps(other))
    with pytest.raises(
        ValueError, match=r"tokens of '.*tokenizer' and in words and punctuation marks: give tokenizer="
    ):
        read_far_relevant(tmp_path / "c")
    read = read_far_relevant(tmp_path / "c", tokenizer=other["name"])
    assert read.gold["length"].tolist() == token_counter(other["name"])(
        [read.documents[docno]["text"] for docno in read.gold["docno"]]
    )


def test_names_that_could_not_be_read_back_are_not_written(tmp_path):
    for blank in ("a b", "a\u00a0b", "a\u2028"):
        source = [{**passages()[0], "docno": blank}, *passages()[1:]]
        with pytest.raises(ValueError, match=r"docno 'q0_a.*' cannot be written: .* no white space"):
            write_far_relevant(build(passages=source, qrels=qrels(1, 1).assign(docno=blank)), tmp_path / "blank")
    for part in ("", "..", "a/b"):
        with pytest.raises(ValueError, match=f"split {part!r} cannot be written"):
            write_far_relevant(build(splits={part: 1}), tmp_path / "blank")
    assert not (tmp_path / "blank").exists()


def test_released_files_are_read(tmp_path):
    released(tmp_path, "bitext")
    released(tmp_path, "dev", **{"QuestionFields.jsonl": '{"DOCNO": "q2", "text_raw": "x"}', "qrels.txt": "q2 0 d2 1"})
    collection = read_far_relevant(tmp_path, default="dev")
    assert collection.splits == {"bitext": ["q1"], "dev": ["q2"]}
    assert collection.get_topics()["qid"].tolist() == ["q2"]
    assert [row["text"] for row in collection.corpus] == ["a text", "b"]
    assert (len(collection.gold), list(collection.gold.columns)) == (0, list(GOLD_COLUMNS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"AnswerFields.jsonl": '{"DOCNO": 7, "text_raw": "x"}'}, r"jsonl:1: field 'DOCNO' must be a string, got 7"),
        ({"AnswerFields.jsonl": '{"DOCNO": "d", "text_raw": "x"}\n{"DOCNO": "d", "text_raw": "y"}'}, "'d' .* twice"),
        ({"QuestionFields.jsonl": None}, "holds no QuestionFields.jsonl or QuestionFields.jsonl.gz"),
        ({"qrels.txt": None}, "holds no qrels.txt"),
    ],
)
def test_malformed_files_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_far_relevant(released(tmp_path, **changes))


# ---------------------------------------------------------------- LongEmbed's files


LONGEMBED = {
    "corpus": [{"doc_id": f"d{i}", "text": f"text {i}", "context_length": 256 * (1 + i % 2)} for i in range(4)],
    "queries": [{"qid": f"q{i}", "text": f"query {i}", "context_length": 256 * (1 + i % 2)} for i in range(2)],
    "qrels": [{"qid": f"q{i}", "doc_id": f"d{i}"} for i in range(2)],
}


@pytest.mark.parametrize("source", ["rows", "jsonl", "jsonl.gz"])
def test_published_longembed_is_read(tmp_path, source):
    for name, rows in LONGEMBED.items():
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / f"{name}.{source}").write_bytes(gzip.compress(content) if source == "jsonl.gz" else content)
    rows = {name: iter(rows) for name, rows in LONGEMBED.items()}
    collection = read_longembed(rows) if source == "rows" else pt.get_dataset(f"longdoc:longembed:{tmp_path}")
    assert collection.splits == {"256": ["q0"], "512": ["q1"]}
    assert collection.get_qrels("512").values.tolist() == [["q1", "d1", 1]]
    assert sorted(collection.candidates("256", pool="same_length")["docno"]) == ["d0", "d2"]
    assert len(collection.candidates()) == 8
    assert collection.documents["d3"] == {"docno": "d3", "text": "text 3"}
    assert len(collection.gold) == 0
    assert collection.statistics()["queries"].tolist() == [1, 1, 2]


def test_real_tasks_have_no_lengths():
    bare = pd.DataFrame(LONGEMBED["corpus"]), pd.DataFrame(LONGEMBED["queries"])
    corpus, queries = (rows.drop(columns="context_length").to_dict("records") for rows in bare)
    collection = read_longembed({"corpus": corpus, "queries": queries, "qrels": LONGEMBED["qrels"]})
    assert collection.splits == {}
    assert len(collection.get_topics()) == 2


def test_malformed_longembed_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no corpus.jsonl or corpus.jsonl.gz"):
        read_longembed(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"id": 1}')
    with pytest.raises(ValueError, match=r"corpus.jsonl:1: field 'doc_id' must be a string, got None"):
        read_longembed(tmp_path)
    with pytest.raises(ValueError, match=r"corpus, row 2: doc_id 'd0' is there twice"):
        read_longembed({"corpus": [{"doc_id": "d0", "text": "x"}] * 2})
    with pytest.raises(ValueError, match=r"source lacks 'queries'; it has \['corpus'\]"):
        read_longembed({"corpus": LONGEMBED["corpus"]})
    with pytest.raises(ValueError, match=r"qrels, row 1: field 'doc_id' must be a string, got 3"):
        read_longembed({**LONGEMBED, "qrels": [{"qid": "q0", "doc_id": 3}]})
