"""relevant_positions: where the first relevant text of documents is, by known passages or by a judge."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import RelevantPositions
from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.listwise import CallableBackend

from ..support import tiny
from ..support.passages import Writer, collection

KNOWN = collection(6)
TOPICS, QRELS, CORPUS, PASSAGES = KNOWN.topics, KNOWN.qrels, KNOWN.corpus, KNOWN.passages
FIRST = KNOWN.gold["first_token"].tolist()


def find(topics=TOPICS, qrels=QRELS, corpus=CORPUS, passages=PASSAGES, **arguments) -> RelevantPositions:
    return ld.relevant_positions(topics, qrels, corpus, passages=passages, **arguments)


def judged(documents: list[str], judge, **arguments) -> RelevantPositions:
    """Positions in documents that are all relevant for "wet cats", in chunks of 8 tokens."""
    topics = pd.DataFrame({"qid": ["1", "2"], "query": ["wet cats", "old dogs"]})
    corpus = pd.DataFrame({"docno": [f"d{i}" for i in range(len(documents))], "text": documents})
    qrels = corpus[["docno"]].assign(qid="1", label=1)
    return find(topics, qrels, corpus, None, judge=judge, **{"chunk_tokens": 8, **arguments})


def says_wet(query: str, chunk: str) -> bool:
    return "wet" in chunk


DRY, WET = "The sun is out again. ", "Cats are wet today. "


# Passages.


def test_positions_of_known_passages_are_exact():
    before = [frame.copy() for frame in (TOPICS, QRELS, CORPUS, PASSAGES)]
    found = find()
    assert found.frame["first_token"].tolist() == FIRST
    assert found.frame["length"].tolist() == [count_tokens(text) for text in CORPUS["text"]]
    for row, text, passage in zip(found.matched.itertuples(), CORPUS["text"], PASSAGES["text"], strict=True):
        assert text[row.start : row.end] == passage
        assert row.end_token == row.first_token + count_tokens(passage)
    assert found.unmatched == 0.0
    for frame, old in zip((TOPICS, QRELS, CORPUS, PASSAGES), before, strict=True):
        pd.testing.assert_frame_equal(frame, old)


def test_known_places_are_used_unchanged():
    searched = find().frame.dropna(subset="start")
    known = searched[["qid", "docno", "start", "end"]].astype({"start": int, "end": int})
    found = find(passages=known).frame.set_index(["qid", "docno"])
    expected = searched.set_index(["qid", "docno"])
    for column in ("first_token", "end_token", "start", "end", "length"):
        assert found.loc[expected.index, column].tolist() == expected[column].tolist()
    assert set(found.loc[expected.index, "method"]) == {"known"}


@pytest.mark.parametrize(
    ("starts", "ends", "start", "reason"),
    [([9, 2], [10, 3], 2, ""), ([0], [10_000], -1, "passage ends after the text"), ([], [], -1, "no passage")],
)
def test_the_first_known_place_counts_or_there_is_a_reason(starts, ends, start, reason):
    places = pd.DataFrame({"qid": QRELS["qid"][0], "docno": QRELS["docno"][0], "start": starts, "end": ends})
    found = find(qrels=QRELS.head(1), passages=places).frame.fillna(-1).iloc[0]
    assert (found["start"], found["reason"]) == (start, reason)


def test_positions_are_in_tokens_of_the_tokenizer(tmp_path):
    tokenizer = tiny.tokenizer()
    found = find(tokenizer=tokenizer)
    for row, text in zip(found.matched.itertuples(), CORPUS["text"], strict=True):
        before, document = (len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (text[: row.start], text))
        assert (row.first_token, row.length) == (before, document)
    tokenizer.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(find(tokenizer=str(tmp_path)).frame, found.frame)


@pytest.mark.parametrize(
    "arguments",
    [
        {"corpus": (dict(row) for row in CORPUS.to_dict("records"))},
        {"corpus": CORPUS.assign(title="", body=CORPUS["text"]), "text_field": ("title", "body")},
        {"corpus": pd.concat([CORPUS, pd.DataFrame({"docno": ["other", "other"], "text": "?"})])},
    ],
    ids=["iterator", "several fields", "documents without judgements"],
)
def test_the_corpus_can_have_any_form(arguments):
    pd.testing.assert_frame_equal(find(**arguments).frame, find().frame)


def test_the_first_of_several_passages_counts_even_if_others_match_better():
    text, passage = CORPUS["text"][0], PASSAGES["text"][0]
    edited = " ".join([*passage.split(" ")[:-4], "unheard", "unheard", "unheard", "unheard"])
    several = pd.DataFrame({"qid": "q0", "text": [text[-200:], Writer(99).prose(30), edited]})
    row = find(qrels=QRELS.head(1), passages=several).frame.iloc[0]
    assert (row["first_token"], row["passage"], row["similarity"]) == (FIRST[0], 2, 0.9)


def test_a_document_without_a_position_has_a_reason():
    topics = pd.concat([TOPICS, pd.DataFrame({"qid": ["none", "short"], "query": "?"})])
    short = pd.DataFrame({"qid": ["short"], "text": [" ".join(CORPUS["text"][0].split()[:3])]})
    texts = pd.concat([CORPUS, pd.DataFrame({"docno": ["blank", "null"], "text": [" \n", None]})])
    expected = {
        ("q0", "d1"): "passage not found",
        ("q0", "blank"): "document empty",
        ("q0", "null"): "document empty",
        ("q0", "gone"): "document not in corpus",
        ("none", "d0"): "no passage",
        ("short", "d0"): "passage too short",
    }
    qrels = pd.DataFrame(expected.keys(), columns=["qid", "docno"]).assign(label=1)
    found = find(topics, qrels, texts, pd.concat([PASSAGES, short]))
    assert found.frame["reason"].tolist() == list(expected.values())
    assert found.frame[["first_token", "end_token", "start", "end", "passage"]].isna().all(axis=None)
    assert found.frame["length"].isna().tolist() == [False, False, False, True, False, False]
    assert (found.unmatched, len(found.matched), found.reasons()["document empty"]) == (1.0, 0, 2)


def test_relevant_documents_are_chosen_by_label_topic_and_sample():
    qrels = QRELS.assign(label=[2, 0, 1, -2, 1, 3])
    qrels = pd.concat([qrels, qrels.head(1)])

    def docnos(**arguments):
        return find(qrels=qrels, **arguments).frame["docno"].tolist()

    assert docnos() == docnos(sample=100) == ["d0", "d2", "d4", "d5"]
    assert docnos(relevant_from=2) == ["d0", "d5"]
    assert docnos(topics=TOPICS.tail(2)) == ["d4", "d5"]
    assert len(docnos(sample=2, seed=1)) == 2
    assert docnos(sample=2, seed=1) == docnos(sample=2, seed=1)


# Judges.


def test_a_judge_is_asked_until_the_first_relevant_chunk():
    asked = []

    def judge(query, chunk):
        asked.append((query, chunk))
        return says_wet(query, chunk)

    frame = judged([DRY + WET + DRY + WET, DRY * 3, "", WET], judge).frame
    assert asked[:2] == [("wet cats", DRY.strip()), ("wet cats", WET.strip())]
    assert len(asked) == 2 + 3 + 1
    assert frame["reason"].tolist() == ["", "no relevant chunk", "document empty", ""]
    found = frame[["first_token", "chunk", "chunks", "judged"]].fillna(-1).to_numpy().tolist()
    assert found == [[6, 1, 4, 2], [-1, -1, 3, 3], [-1, -1, -1, -1], [0, 0, 1, 1]]
    assert (frame["start"][0], frame["end"][0]) == (len(DRY), len(DRY + WET) - 1)


def test_a_document_of_several_queries_is_judged_for_each():
    topics = pd.DataFrame({"qid": ["1", "2"], "query": ["wet cats", "sun"]})
    qrels = pd.DataFrame({"qid": ["1", "2", "2"], "docno": ["d0", "d0", "gone"], "label": 1})
    corpus = pd.DataFrame({"docno": ["d0"], "text": [DRY * 2 + WET]})
    frame = find(topics, qrels, corpus, None, judge=lambda query, chunk: query[:3] in chunk, chunk_tokens=8).frame
    assert frame["chunk"].fillna(-1).tolist()[::2] == [2, -1]
    assert frame["start"].fillna(-1).tolist() == [len(DRY * 2), 0, -1]
    assert frame["reason"].tolist() == ["", "", "document not in corpus"]


def test_tokens_beyond_max_chunks_are_counted_and_cause_a_warning():
    documents = [DRY * 5 + WET, DRY * 3, WET + DRY * 5]
    with pytest.warns(ld.TruncationWarning, match=r"17 of 88 tokens \(19.3%\)"):
        found = judged(documents, says_wet, max_chunks=3)
    frame = found.frame
    assert frame["reason"].tolist() == ["no relevant chunk among those judged", "no relevant chunk", ""]
    assert frame[["chunks", "judged"]].to_numpy().tolist() == [[6, 3], [3, 3], [6, 1]]
    assert frame["unread"].tolist() == [17, 0, 0]  # after the first relevant chunk there is nothing to look for
    assert found.summary()[["documents cut", "tokens unread"]].tolist() == pytest.approx([1 / 3, 17 / 88])


def grading(concurrency: int = 1) -> ld.RelevanceJudge:
    """Grades wet chunks 2, dry ones 0, and cannot say of others."""

    def reply(messages):
        shown = messages[-1]["content"]
        return "grade: 2" if "are wet" in shown else "grade: 0" if "out again" in shown else "I cannot say"

    backend = CallableBackend(reply, name="wet")
    return ld.RelevanceJudge(backend, concurrency=concurrency, on_failure="unjudged", retries=0)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_language_model_can_judge(concurrency):
    judge = grading(concurrency)
    documents = [DRY + WET + DRY, DRY, WET * 2, "So it is not. " * 2 + WET, "So it is not. " * 2] * 2
    frame = judged(documents, judge).frame
    assert frame["chunk"].fillna(-1).tolist() == [1, -1, 0, 2, -1] * 2
    assert frame["grade"].fillna(-1).tolist() == [2, -1, 2, 2, -1] * 2
    assert frame["unjudged"].tolist() == [0, 0, 0, 2, 2] * 2
    assert frame["reason"].tolist() == ["", "no relevant chunk", "", "", "no readable grade"] * 2
    assert judge.client.calls == 9 * 2


# Bad input.


TWICE = pd.concat([CORPUS, CORPUS.tail(1)])
JUDGE = {"passages": None, "judge": says_wet}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"corpus": CORPUS[["text"]]}, "docno"),
        ({"passages": PASSAGES[["text"]]}, "qid"),
        ({"corpus": [{"docno": "d0", "text": b"?"}]}, "'text'"),
        ({"corpus": TWICE}, "'d5'"),
        ({"corpus": TWICE.to_dict("records")}, "'d5'"),
        ({"judge": says_wet}, "passages="),
        ({"passages": None}, "passages="),
        ({"relevant_from": 2}, "at least 2"),
        ({**JUDGE, "chunk_tokens": 0}, "chunk_tokens"),
        ({**JUDGE, "judge": pt.Transformer.identity()}, "judge="),
        ({**JUDGE, "judge": 3}, "judge="),
        ({**JUDGE, "judge": lambda query, chunk: float("nan")}, "judge="),
        ({"tokenizer": str.split}, "tokenizer="),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=word):
        find(**changes)


# Statistics and the figure.


def positions(starts: list[int | None], lengths: list[int], width: int = 100) -> RelevantPositions:
    first = pd.array([pd.NA if start is None else start for start in starts], dtype="Int64")
    frame = pd.DataFrame({"qid": [f"q{i // 2}" for i in range(len(starts))], "docno": "d", "label": 1})
    frame = frame.assign(first_token=first, end_token=first + width, length=pd.array(lengths, dtype="Int64"))
    return RelevantPositions(frame.assign(start=first, end=first + width))


def test_summary_has_shares_and_quantiles_of_positions_and_lengths():
    found = positions([0, 400, None, None, 900, 500], [100, 1000, 300, 200, 1000, 600])
    expected = {
        "queries": 3,
        "documents": 6,
        "unmatched": 2 / 6,
        "queries matched": 2 / 3,
        "position median": 450,
        "position mean": 450,
        "position p90": 780,
        "length median": 450,
        "length mean": 3200 / 6,
        "length p90": 1000,
        "starts in first 477": 0.5,
        "ends in first 477": 0.25,
        "starts in first 477 by chance": (1 + 477 / 901 * 2 + 477 / 501) / 4,
        "relative position": (0 + 400 / 900 + 1 + 1) / 4,
    }
    pd.testing.assert_series_equal(found.summary(), pd.Series(expected, name="positions"))
    assert all(name in found._repr_html_() for name in expected)
    assert found.summary(first=1000)["starts in first 1000"] == 1


def test_the_figure_shows_shares_of_positions_and_of_lengths():
    ax = positions([0, 300, 5000, None], [200, 900, 6000, 700]).plot(max_tokens=1024)
    lengths, starts = ([bar.get_height() for bar in bars] for bars in ax.containers)
    np.testing.assert_allclose(lengths, [1 / 4, 0, 1 / 4, 2 / 4])  # what lies beyond counts in the last bar
    np.testing.assert_allclose(starts, [1 / 3, 1 / 3, 0, 1 / 3])
