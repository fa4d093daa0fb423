"""The files of MS MARCO FarRelevant, as its authors released them."""

import pyterrier as pt
import pytest

from pyterrier_longdoc.data import read_far_relevant
from pyterrier_longdoc.data.collection import GOLD_COLUMNS


def released(folder, part="bitext", **changes):
    """A part of a collection, with further fields."""
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


def test_each_folder_with_topics_is_a_part(tmp_path):
    released(tmp_path, "bitext")
    released(tmp_path, "dev", **{"QuestionFields.jsonl": '{"DOCNO": "q2", "text_raw": "x"}', "qrels.txt": "q2 0 d2 1"})
    assert pt.get_dataset(f"longdoc:far-relevant:{tmp_path}").get_topics()["qid"].tolist() == ["q1", "q2"]
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
    ],
)
def test_malformed_and_missing_files_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_far_relevant(released(tmp_path, **changes))
