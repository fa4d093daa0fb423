"""What the scripts of the packaged models choose, leave out and count."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ir_measures
import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the scripts are called as such, and import one another so

import evaluate_questions
import train_firstp
import train_heads
import train_questions
from train_questions import ABOVE, Passage


def test_ndcg_is_that_of_ir_measures():
    rng = np.random.default_rng(0)
    rows = [(f"q{q}", f"d{d}", float(rng.normal()), int(rng.random() < 0.3)) for q in range(40) for d in range(20)]
    frame = pd.DataFrame(rows, columns=["qid", "docno", "score", "label"])
    frame["relevant"] = frame.groupby("qid")["label"].transform("sum") + (frame["qid"] == "q3")  # one is not found
    frame = frame[frame["relevant"] > 0]
    qrels = pd.concat([frame, pd.DataFrame([("q3", "never", 0.0, 1, 0)], columns=frame.columns)])
    given = [
        table.rename(columns=dict(zip(["qid", "docno", "label"], ["query_id", "doc_id", "relevance"], strict=True)))
        for table in (qrels, frame)
    ]
    found = pd.DataFrame(ir_measures.iter_calc([ir_measures.nDCG @ 10], *given))
    expected = found.set_index("query_id")["value"].sort_index()
    assert evaluate_questions.ndcg(frame).to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-12)


def test_ties_keep_the_order_of_bm25():
    frame = pd.DataFrame({"qid": "q", "score": [3.0, 2.0, 1.0], "label": [0, 1, 0], "relevant": 1})
    second, third = 1 / np.log2(3), 1 / np.log2(4)
    assert evaluate_questions.ndcg(frame, np.zeros(3)).tolist() == [pytest.approx(second)]
    assert evaluate_questions.ndcg(frame, np.array([0.0, 0.0, 1.0])).tolist() == [pytest.approx(third)]


def test_scores_are_put_on_one_scale_for_each_query():
    frame = pd.DataFrame({"qid": list("aab"), "docno": list("xyx"), "score": 9.0})
    scores = pd.Series([1.0, 3.0, 7.0])
    assert evaluate_questions.scaled(frame, scores, "min-max").tolist() == [0, 1, 0]
    assert evaluate_questions.scaled(frame, scores, "rank").tolist() == [1 / 62, 1 / 61, 1 / 61]
    assert evaluate_questions.scaled(frame, scores, "z").tolist() == [-1, 1, 0]


def scored(qid: str, answer: float, others: list[float]) -> pd.DataFrame:
    """Return what a model says of a question's answer and of BM25's best others."""
    rows = [(qid, "query", f"{qid}-{i}", "", f"text {i}", int(i == 0), s) for i, s in enumerate([answer, *others])]
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "title", "text", "label", "score"])


def test_the_hardest_negatives_exclude_those_scored_far_above_the_answer(monkeypatch):
    monkeypatch.setattr(train_questions, "EMPTY", 0.0)
    far = 2.0 + ABOVE
    frame = pd.concat([scored("a", 2.0, [0.5, far, 2.9, -1.0, 1.5, 0.7]), scored("b", 0.0, [far, far, far, 1.0])])
    chosen = train_questions.hardest(frame)
    assert chosen["docno"].tolist() == ["a-0", "a-3", "a-5", "a-6", "a-1"]  # of b are too few left
    assert chosen["label"].tolist() == [1, 0, 0, 0, 0]


def test_some_negatives_become_empty_but_no_answer_does(monkeypatch):
    monkeypatch.setattr(train_questions, "EMPTY", 1.0)
    chosen = train_questions.hardest(scored("a", 2.0, [0.5, 1.0, 1.5, 0.7]))
    assert (chosen["text"] == "").sum() == 1
    assert chosen["text"].iloc[0] == "text 0"


@pytest.mark.parametrize("seed", range(5))
def test_a_long_passage_is_truncated_around_its_answer(seed):
    text = " ".join(f"w{i}" for i in range(300))
    start = text.index("w170")
    cut = train_questions.around(text, (start, start + len("w170 w171")), 50, train_questions.Random(seed))
    assert len(cut.split()) == 50
    assert "w170 w171" in cut
    assert train_questions.around("short text", (0, 5), 50, train_questions.Random(seed)) == "short text"


def test_answers_and_their_copies_are_not_negatives():
    text = " ".join(f"word{i}" for i in range(60))
    other = " ".join(f"other{i}" for i in range(60))
    passages = [Passage("d", "", each) for each in (text, f"  {text.upper()} ", f"{text} and more", other)]
    assert [train_questions._differs(passages, i, (0,)) for i in range(4)] == [False, False, False, True]


def test_answers_can_be_removed_from_a_document():
    text = "one two three four five six"
    answers = [Passage("d", "", "two ", 4), Passage("d", "", "five ", 19)]
    assert train_heads.without_answers(text, answers) == "one three four six"
    assert train_heads.without_answers(text, [Passage("d", "", text[:20], 0)]) == ""


def test_an_interrupted_evaluation_leaves_no_partial_file_of_scores(tmp_path, monkeypatch):
    def broken(frame: pd.DataFrame) -> pd.DataFrame:
        raise KeyboardInterrupt

    (tmp_path / "data").mkdir()
    frame = pd.DataFrame({"qid": ["q"], "query": ["a"], "docno": ["d"], "title": [""], "text": ["b"]})
    frame = frame.assign(score=1.0, rank=0, label=1, relevant=1)
    with gzip.open(tmp_path / "data" / "dev-docstrings-documents.jsonl.gz", "wt") as file:
        frame.to_json(file, orient="records", lines=True)
    args = SimpleNamespace(best=3, only=[], split="dev", questions=5, dtype="float32")
    monkeypatch.setattr(evaluate_questions, "model_of", lambda *_, **__: broken)
    with pytest.raises(KeyboardInterrupt):
        evaluate_questions.score(tmp_path, ["m"], args)
    assert list((tmp_path / "scores").iterdir()) == []
    monkeypatch.setattr(evaluate_questions, "model_of", lambda *_, **__: lambda own: own.assign(score=2.0))
    evaluate_questions.score(tmp_path, ["m"], args)
    assert [file.name for file in (tmp_path / "scores").iterdir()] == ["dev-docstrings-documents-m+best3.csv"]
    assert list(evaluate_questions.scored(tmp_path, "dev", ["m+best3"], [])) == ["docstrings-documents"]


@pytest.fixture
def stories(tmp_path):
    """A collection `squad` with a document of twelve passages, and a question for the sixth."""
    folder = tmp_path / "squad"
    folder.mkdir()
    text = "\n".join(" ".join(f"x{p} {w}" for w in range(22)) for p in range(12))
    places = [(text.index(f"x{p} 0"), text.index(f"x{p} 21") + len(f"x{p} 21")) for p in range(12)]
    answer = {"answer_start": text.index("x5 9"), "answer_end": text.index("x5 9") + 4}
    rows = {
        "docs.jsonl": [{"docno": "x", "title": "title", "text": text}],
        "passages.jsonl": [{"docno": "x", "start": start, "end": end} for start, end in places],
        "spans.jsonl": [{"qid": "q", "docno": "x", "start": places[5][0], "end": places[5][1], **answer}],
    }
    texts = {name: "\n".join(map(json.dumps, lines)) for name, lines in rows.items()}
    texts |= {"topics.tsv": "q\twhere", "qrels.txt": "q 0 x 1", "splits.tsv": "q\ttrain", "findable.txt": "q"}
    for name, content in texts.items():
        (folder / name).write_text(f"{content}\n")
    return tmp_path


@pytest.mark.parametrize("seed", range(5))
def test_the_answer_stands_in_the_right_page_of_firstp_and_not_in_the_same_document(stories, seed):
    source = train_firstp.Source("squad", stories, "train")
    (question,), rng = source.questions, train_firstp.Random(seed)
    right, same = source.right(question, rng), source.same(question, "x", rng)
    assert "x5 9" in right.text
    assert source.texts.end("x", right.start, train_firstp.TOKENS) - right.start >= len(right.text)
    assert same.docno == "x"
    assert "x5" not in same.text


@pytest.mark.parametrize("seed", range(5))
def test_a_text_among_others_stands_in_what_firstp_reads(stories, seed):
    source = train_firstp.Source("squad", stories, "train")
    texts = {"own": "the own text"} | {d: " ".join([d] * 90) for d in "abcdefgh"}
    source.texts, source.places = train_firstp.Texts(texts), [(d, 0) for d in "abcdefgh"]
    text = source.among("own", texts["own"], train_firstp.Random(seed))
    assert len(text[: text.index(texts["own"])].split()) + 3 <= train_firstp.TOKENS
