"""Collections of far_relevant in files: written, read again, and as released by others."""

import json
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest
from transformers import AutoTokenizer

from pyterrier_longdoc.common.language import named_tokenizer, token_counter
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


def test_a_written_collection_is_read_back_completely(tmp_path):
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
    assert dataset.text_loader()(dataset.qrels).equals(collection.text_loader()(dataset.qrels))
    of_splits = [read.statistics().sort_values("split", ignore_index=True) for read in (dataset, collection)]
    pd.testing.assert_frame_equal(*of_splits)  # folders come in the order of their names
    lines = (tmp_path / "input_data" / "bitext" / "QuestionFields.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(json.loads(lines[0])) == {"DOCNO", "text_raw"}


def test_a_collection_without_splits_is_written_as_one(tmp_path):
    write_far_relevant(build(), tmp_path)
    assert read_far_relevant(str(tmp_path)).splits == {"all": [f"q{i}" for i in range(5)]}


LONGER = {"min_offset": 60, "max_doc_len": 200}


def word_pieces(tmp_path):
    """A tokenizer that makes more tokens of these passages than there are words, in a folder."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def numbers(collection) -> list[list[int]]:
    return collection.gold[["first_token", "length"]].values.tolist()


@pytest.mark.parametrize("give", [Path, AutoTokenizer.from_pretrained])
def test_positions_and_lengths_are_in_tokens_of_the_recorded_tokenizer(tmp_path, give):
    written = build(tokenizer=give(word_pieces(tmp_path)), **LONGER)
    write_far_relevant(written, tmp_path / "c")
    read = read_far_relevant(tmp_path / "c")
    assert numbers(read) == numbers(written) != numbers(build(**LONGER))
    length_of = dict(zip(read.documents, read.lengths(), strict=True))
    assert read.gold["length"].tolist() == [length_of[docno] for docno in read.gold["docno"]]
    assert (read.gold["first_token"] < read.gold["length"]).all()
    assert read.statistics().equals(written.statistics())
    assert [len(tokenized(read.tokenizer, row["text"])) for row in read.corpus] == read.lengths().tolist()


@pytest.mark.parametrize("recorded", [True, False])
def test_positions_are_counted_again_by_another_tokenizer_or_in_words_if_none_is_recorded(tmp_path, recorded):
    pieces = word_pieces(tmp_path)
    write_far_relevant(build(**LONGER, tokenizer=None if recorded else pieces), tmp_path / "c")
    if not recorded:
        (tmp_path / "c" / "unit.jsonl").unlink()
    tokenizer = pieces if recorded else None
    read = read_far_relevant(tmp_path / "c", tokenizer=tokenizer)
    for docno, start, *found in read.gold[["docno", "start", "first_token", "length"]].values.tolist():
        text = read.documents[docno]["text"]
        assert found == token_counter(tokenizer)([text[:start], text])


def test_stored_positions_do_not_need_the_recorded_tokenizer_but_lengths_do(tmp_path):
    pieces = word_pieces(tmp_path)
    written = build(tokenizer=pieces, **LONGER)
    write_far_relevant(written, tmp_path / "c")
    pieces.rename(tmp_path / "elsewhere")
    named_tokenizer.cache_clear()
    read = read_far_relevant(tmp_path / "c")
    assert numbers(read) == numbers(written)
    with pytest.raises(ValueError, match="tokenizer="):
        read.lengths()
    assert numbers(read_far_relevant(tmp_path / "c", tokenizer=tmp_path / "elsewhere")) == numbers(written)


def test_a_tokenizer_without_a_name_is_needed_again_for_lengths(tmp_path):
    written = build(tokenizer=lambda text: len(text.split()))
    write_far_relevant(written, tmp_path)
    read = read_far_relevant(tmp_path)
    assert numbers(read) == numbers(written)
    with pytest.raises(ValueError, match="tokenizer="):
        read.lengths()


def test_released_files_without_gold_positions_are_read(tmp_path):
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
        ({"AnswerFields.jsonl": '{"DOCNO": 7, "text_raw": "x"}'}, "jsonl:1"),
        ({"AnswerFields.jsonl": '{"DOCNO": "d", "text_raw": "x"}\n{"DOCNO": "d", "text_raw": "y"}'}, "jsonl:2"),
        ({"QuestionFields.jsonl": None}, "QuestionFields.jsonl"),
        ({"qrels.txt": None}, "qrels.txt"),
        ({"qrels.txt": "q1 0 d1 1\nq1 0 d1 0"}, "labels 1 and 0"),
        ({"unit.jsonl": '{"name": 3}'}, "unit.jsonl:1"),
    ],
)
def test_malformed_and_missing_files_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_far_relevant(released(tmp_path, **changes))
