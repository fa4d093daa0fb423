import json
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest
from transformers import AutoTokenizer

from pyterrier_longdoc.common.language import count_tokens, named_tokenizer, token_counter
from pyterrier_longdoc.data import read_far_relevant, write_far_relevant
from pyterrier_longdoc.data.collection import GOLD_COLUMNS
from pyterrier_longdoc.modelling.tokens import tokenized

from ..support import tiny
from ..support.sources import build, passages, qrels


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


@pytest.mark.parametrize("give", [Path, AutoTokenizer.from_pretrained])
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
    # As `relevant_positions` takes it.
    assert [len(tokenized(read.tokenizer, row["text"])) for row in read.corpus] == read.lengths().tolist()
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
    (tmp_path / "words" / "unit.jsonl").unlink()  # where nothing is recorded, words are counted
    assert numbers(read_far_relevant(tmp_path / "words")) == numbers(in_words)
    for recorded in (True, False):
        other = read_far_relevant(tmp_path / "pieces", tokenizer=count_tokens if recorded else None)
        assert numbers(other) != numbers(in_pieces)
        length_of = dict(zip(other.documents, other.lengths(), strict=True))
        assert other.gold["length"].tolist() == [length_of[docno] for docno in other.gold["docno"]]
        (tmp_path / "pieces" / "unit.jsonl").unlink(missing_ok=True)


def test_a_recorded_tokenizer_that_is_not_to_be_had(tmp_path):
    pieces = word_pieces(tmp_path)
    written = build(tokenizer=pieces, **LONGER)
    write_far_relevant(written, tmp_path / "named")
    pieces.rename(tmp_path / "elsewhere")
    named_tokenizer.cache_clear()
    read = read_far_relevant(tmp_path / "named")
    assert numbers(read) == numbers(written)  # these stand in the file
    with pytest.raises(ValueError, match="tokenizer="):
        read.lengths()
    assert numbers(read_far_relevant(tmp_path / "named", tokenizer=tmp_path / "elsewhere")) == numbers(written)
    # One without a name, and several.
    write_far_relevant(build(tokenizer=lambda text: len(text.split())), tmp_path / "unnamed")
    (tmp_path / "named" / "input_data" / "unit.jsonl").write_text('{"tokens": "words", "name": ""}')
    for folder, named in (("unnamed", "<lambda>"), ("named", "words and punctuation marks")):
        with pytest.raises(ValueError, match=rf"{named}.* give tokenizer="):
            read_far_relevant(tmp_path / folder)
        assert len(read_far_relevant(tmp_path / folder, tokenizer=tmp_path / "elsewhere").gold) == 10


def test_names_that_could_not_be_read_back_are_not_written(tmp_path):
    for blank in ("a b", "a\u00a0b", "a\u2028"):
        source = [{**passages()[0], "docno": blank}, *passages()[1:]]
        with pytest.raises(ValueError, match=r"docno 'q0_a.*' cannot be written"):
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
        ({"AnswerFields.jsonl": '{"DOCNO": 7, "text_raw": "x"}'}, "jsonl:1: field 'DOCNO'"),
        ({"AnswerFields.jsonl": '{"DOCNO": "d", "text_raw": "x"}\n{"DOCNO": "d", "text_raw": "y"}'}, "'d' .* twice"),
        ({"QuestionFields.jsonl": None}, "QuestionFields.jsonl"),
        ({"qrels.txt": None}, "qrels.txt"),
        ({"unit.jsonl": '{"tokens": "bytes", "name": "x"}'}, "'x': give tokenizer="),
    ],
)
def test_malformed_files_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_far_relevant(released(tmp_path, **changes))
