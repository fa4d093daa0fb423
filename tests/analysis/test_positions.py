"""First relevant positions of a collection: by passages, by judges, bad input, statistics and the figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.judging import tokenized
from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import far_relevant
from pyterrier_longdoc.listwise import CallableBackend

from ..support import tiny
from ..support.passages import Writer

TOPICS = pd.DataFrame({"qid": ["1", "2"], "query": ["wet cats", "old dogs"]})


def collection(count: int = 6) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame, list[int]]:
    """Topics, qrels, corpus and passages of known-item search, and the tokens before each passage."""
    writer = Writer(7)
    rows, passages, first = [], [], []
    for number in range(count):
        before, passage, after = (writer.prose(size) for size in (writer.rng.randint(0, 600), 40, 300))
        rows.append((f"d{number}", f"{before} {passage} {after}".strip()))
        passages.append((f"q{number}", passage))
        first.append(count_tokens(before))
    topics = pd.DataFrame({"qid": [qid for qid, _ in passages], "query": "?"})
    qrels = topics[["qid"]].assign(docno=[docno for docno, _ in rows], label=1)
    corpus = pd.DataFrame(rows, columns=["docno", "text"])
    return topics, qrels, corpus, pd.DataFrame(passages, columns=["qid", "text"]), first


def judged(documents: list[str], judge, **arguments) -> pd.DataFrame:
    """Positions in documents that are all relevant for "wet cats", in chunks of 8 tokens."""
    corpus = pd.DataFrame({"docno": [f"d{i}" for i in range(len(documents))], "text": documents})
    qrels = corpus[["docno"]].assign(qid="1", label=1)
    arguments = {"chunk_tokens": 8, **arguments}
    return ld.relevant_positions(TOPICS, qrels, corpus, judge=judge, **arguments).frame


def says_wet(query: str, chunk: str) -> bool:
    return "wet" in chunk


DRY, WET = "The sun is out again. ", "Cats are wet today. "


# Passages.


def test_known_positions_come_back():
    topics, qrels, corpus, passages, first = collection()
    found = ld.relevant_positions(topics, qrels, corpus, passages=passages)
    assert found.frame["first_token"].tolist() == first
    assert found.frame["length"].tolist() == [count_tokens(text) for text in corpus["text"]]
    for row, text, passage in zip(found.matched.itertuples(), corpus["text"], passages["text"], strict=True):
        assert text[row.start : row.end] == passage
        assert row.end_token == row.first_token + count_tokens(passage)
    assert found.unmatched == 0.0


@pytest.mark.parametrize("position", ["early", "uniform", "far"])
def test_gold_positions_of_far_relevant_collections_come_back(position):
    writer = Writer(8)
    passages = pd.DataFrame({"docno": [str(i) for i in range(200)], "text": [writer.prose(40) for _ in range(200)]})
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(30)], "query": "?"})
    qrels = topics[["qid"]].assign(docno=passages["docno"].head(30), label=1)
    made = far_relevant(passages, topics, qrels, position=position, min_offset=100, max_doc_len=400)
    asked = qrels[["qid"]].assign(text=passages["text"].head(30))
    found = ld.relevant_positions(made.topics, made.qrels, made.corpus, passages=asked).matched
    both = found.merge(made.gold, on=["qid", "docno"], suffixes=("", "_gold"), validate="1:1")
    assert len(both) == 30
    for name in ("first_token", "length", "start", "end"):
        assert both[name].tolist() == both[f"{name}_gold"].tolist()


def test_tokens_of_any_tokenizer():
    topics, qrels, corpus, passages, _ = collection(3)
    tokenizer = tiny.tokenizer()
    found = ld.relevant_positions(topics, qrels, corpus, passages=passages, tokenizer=tokenizer).matched
    for row, text in zip(found.itertuples(), corpus["text"], strict=True):
        before, document = (len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (text[: row.start], text))
        assert (row.first_token, row.length) == (before, document)


def test_a_tokenizer_by_its_folder(tmp_path):
    topics, qrels, corpus, passages, _ = collection(2)
    tiny.tokenizer().save_pretrained(tmp_path)
    by_folder, by_object = (
        ld.relevant_positions(topics, qrels, corpus, passages=passages, tokenizer=t).frame
        for t in (str(tmp_path), tiny.tokenizer())
    )
    pd.testing.assert_frame_equal(by_folder, by_object)


def test_any_kind_of_corpus_and_integer_names():
    topics, qrels, corpus, passages, _ = collection()
    as_frame = ld.relevant_positions(topics, qrels, corpus, passages=passages).frame
    dicts = (dict(row) for row in corpus.to_dict("records"))
    pd.testing.assert_frame_equal(ld.relevant_positions(topics, qrels, dicts, passages=passages).frame, as_frame)
    titled = corpus.assign(title="", body=corpus["text"])
    fields = ld.relevant_positions(topics, qrels, titled, passages=passages, text_field=("title", "body")).frame
    pd.testing.assert_frame_equal(fields, as_frame)
    numbers = [frame.assign(qid=[int(qid[1:]) for qid in frame["qid"]]) for frame in (topics, qrels, passages)]
    found = ld.relevant_positions(*numbers[:2], corpus, passages=numbers[2]).frame
    assert found["first_token"].tolist() == as_frame["first_token"].tolist()


def test_inputs_are_left_alone():
    frames = collection()[:4]
    before = [frame.copy() for frame in frames]
    ld.relevant_positions(*frames[:3], passages=frames[3])
    for frame, old in zip(frames, before, strict=True):
        pd.testing.assert_frame_equal(frame, old)


def test_the_first_of_several_passages_even_if_others_match_better():
    topics, qrels, corpus, passages, first = collection(1)
    later, absent = corpus["text"][0][-200:], Writer(99).prose(30)
    edited = " ".join([*passages["text"][0].split(" ")[:-4], "unheard", "unheard", "unheard", "unheard"])
    several = pd.DataFrame({"qid": "q0", "text": [later, absent, edited]})
    (row,) = ld.relevant_positions(topics, qrels, corpus, passages=several).frame.to_dict("records")
    assert (row["first_token"], row["passage"], row["similarity"]) == (first[0], 2, 0.9)


def test_a_token_that_ends_where_the_passage_begins_is_before_it():
    topics, qrels, corpus, passages, _ = collection(1)
    glued = corpus.assign(text=["one two:" + passages["text"][0]])
    (row,) = ld.relevant_positions(topics, qrels, glued, passages=passages).frame.to_dict("records")
    assert (row["start"], row["first_token"], row["end_token"]) == (8, 3, row["length"])


def test_reasons_for_having_no_position():
    topics, _, corpus, passages, _ = collection(2)
    topics = pd.concat([topics, pd.DataFrame({"qid": ["none", "short"], "query": "?"})])
    short = pd.DataFrame({"qid": ["short"], "text": [" ".join(corpus["text"][0].split()[:3])]})
    texts = pd.concat([corpus, pd.DataFrame({"docno": ["blank", "null"], "text": [" \n", None]})])
    pairs = [("q0", "d1"), ("q0", "blank"), ("q0", "null"), ("q0", "gone"), ("none", "d0"), ("short", "d0")]
    qrels = pd.DataFrame(pairs, columns=["qid", "docno"]).assign(label=1)
    found = ld.relevant_positions(topics, qrels, texts, passages=pd.concat([passages, short]))
    assert found.frame["reason"].tolist() == [
        "passage not found",
        "document empty",
        "document empty",
        "document not in corpus",
        "no passage",
        "passage too short",
    ]
    assert found.frame[["first_token", "end_token", "start", "end", "passage"]].isna().all(axis=None)
    assert found.frame["length"].isna().tolist() == [False, False, False, True, False, False]
    assert found.unmatched == 1.0
    assert len(found.matched) == 0
    assert found.reasons()["document empty"] == 2


def test_labels_topics_doubles_and_samples():
    topics, qrels, corpus, passages, _ = collection()
    qrels = pd.concat([qrels.assign(label=[2, 0, 1, -2, 1, 3]), qrels.head(1)])

    def find(topics=topics, **arguments):
        return ld.relevant_positions(topics, qrels, corpus, passages=passages, **arguments).frame

    assert find()["docno"].tolist() == ["d0", "d2", "d4", "d5"]
    assert find(relevant_from=2)["docno"].tolist() == ["d0", "d5"]
    assert find(topics=topics.tail(2))["docno"].tolist() == ["d4", "d5"]
    sampled = find(sample=2, seed=1)
    assert len(sampled) == 2
    pd.testing.assert_frame_equal(sampled, find(sample=2, seed=1))
    assert len(find(sample=100)) == 4


# Judges.


def test_a_function_finds_the_first_relevant_chunk_and_then_stops():
    asked = []

    def judge(query, chunk):
        asked.append((query, chunk))
        return says_wet(query, chunk)

    frame = judged([DRY + WET + DRY + WET, DRY * 3, WET], judge)
    assert asked[:2] == [("wet cats", DRY.strip()), ("wet cats", WET.strip())]
    assert len(asked) == 2 + 3 + 1
    assert frame["first_token"].tolist()[::2] == [6, 0]
    assert frame["chunk"].tolist()[::2] == [1, 0]
    assert frame["reason"].tolist() == ["", "no relevant chunk", ""]
    assert frame["chunks"].tolist() == [4, 3, 1]
    assert frame["judged"].tolist() == [2, 3, 1]
    assert (frame["start"][0], frame["end"][0]) == (len(DRY), len(DRY + WET) - 1)


def test_chunks_are_of_whole_sentences_and_not_too_long():
    sentences, shown = (
        [DRY, WET, "No. ", "Well then, it is. ", "One two three four five six seven eight nine ten. "],
        [],
    )
    judged(["".join(sentences)], lambda query, chunk: shown.append(chunk) or 0, chunk_tokens=10)
    assert shown == [
        DRY.strip(),
        (WET + "No. ").strip(),
        "Well then, it is.",
        "One two three four five six seven eight nine ten",
        ".",
    ]


def test_no_more_chunks_than_asked_for():
    frame = judged([DRY * 5 + WET, DRY * 3], says_wet, max_chunks=3)
    assert frame["reason"].tolist() == ["no relevant chunk among those judged", "no relevant chunk"]
    assert frame[["chunks", "judged"]].to_numpy().tolist() == [[6, 3], [3, 3]]
    assert judged([DRY * 50 + WET], says_wet, max_chunks=None)["chunk"].tolist() == [50]
    assert judged([DRY * 50 + WET], says_wet)["judged"].tolist() == [36]


def test_documents_without_text_are_not_judged():
    frame = judged(["", WET], says_wet)
    assert frame["reason"].tolist() == ["document empty", ""]
    assert frame["judged"].isna().tolist() == [True, False]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_language_model_as_judge(concurrency):
    def reply(messages):
        return f"grade: {2 if 'are wet' in messages[-1]['content'] else 0}"

    judge = ld.RelevanceJudge(CallableBackend(reply, name="wet"), concurrency=concurrency)
    frame = judged([DRY + WET + DRY, DRY, WET * 2] * 3, judge)
    assert frame["chunk"].fillna(-1).tolist() == [1, -1, 0] * 3
    assert frame["grade"].fillna(-1).tolist() == [2, -1, 2] * 3
    assert judge.ledger.table()["calls"].sum() <= 4 * 3
    strict = judged([DRY + WET], judge, threshold=2)
    assert strict["reason"].tolist() == ["no relevant chunk"]


def test_unreadable_grades_are_counted():
    def reply(messages):
        return "grade: 3" if "are wet" in messages[-1]["content"] else "I cannot say"

    judge = ld.RelevanceJudge(CallableBackend(reply, name="shy"), on_failure="unjudged", retries=0)
    frame = judged([DRY * 2 + WET, DRY], judge)
    assert frame["chunk"].fillna(-1).tolist() == [2, -1]
    assert frame["unjudged"].tolist() == [2, 1]


def wet_words() -> pt.Transformer:
    """A reranker that counts the word and returns its rows in another order."""
    return pt.apply.generic(
        lambda frame: pt.model.add_ranks(frame.assign(score=[float(t.count("wet")) for t in frame["text"]])).iloc[::-1]
    )


def test_a_reranker_as_judge(monkeypatch):
    documents = [DRY + WET + DRY + WET, "", DRY * 3, WET, DRY + "Wet wet wet cats. "]
    frame = judged(documents, wet_words(), threshold=0.5)
    assert frame["chunk"].fillna(-1).tolist() == [1, -1, -1, 0, 1]
    assert frame["grade"].fillna(-1).tolist() == [1, -1, -1, 1, 2]
    assert judged(documents, wet_words(), threshold=1)["chunk"].fillna(-1).tolist() == [-1, -1, -1, -1, 1]
    monkeypatch.setattr("pyterrier_longdoc.analysis.chunkjudges.BLOCK_CHUNKS", 3)
    pd.testing.assert_frame_equal(judged(documents, wet_words(), threshold=0.5), frame)


def test_a_cross_encoder_as_judge(tmp_path):
    model = ld.MaxP(tiny.checkpoint(tmp_path), window_size=40, stride=30)
    text = tiny.results()["text"][0]
    corpus = pd.DataFrame({"docno": ["d"], "text": [text]})
    qrels = pd.DataFrame({"qid": ["1"], "docno": ["d"], "label": [1]})
    tokens = tokenized(None, text)
    chunks = [text[a:b] for a, b in map(tokens.characters, ld.SentenceWindows(max_tokens=20)(tokens))]
    frame = pd.DataFrame(
        {"qid": "1", "query": "wet cats", "docno": [str(i) for i in range(len(chunks))], "text": chunks}
    )
    scores = model(frame)["score"].to_numpy()
    for threshold in (scores.min() - 1, np.median(scores), scores.max() + 1):
        found = ld.relevant_positions(TOPICS, qrels, corpus, judge=model, threshold=threshold, chunk_tokens=20)
        above = np.flatnonzero(scores > threshold)
        assert found.frame["chunk"].fillna(-1).tolist() == [above[0] if len(above) else -1]


# Bad input.


def find(**changes):
    topics, qrels, corpus, passages, _ = collection(2)
    arguments = {"topics": topics, "qrels": qrels, "corpus": corpus, "passages": passages, **changes}
    return ld.relevant_positions(arguments.pop("topics"), arguments.pop("qrels"), arguments.pop("corpus"), **arguments)


@pytest.mark.parametrize("argument", ["topics", "qrels", "corpus", "passages"])
def test_missing_columns(argument):
    topics, qrels, corpus, passages, _ = collection(2)
    frame = {"topics": topics, "qrels": qrels, "corpus": corpus, "passages": passages}[argument]
    dropped = frame.columns[0]
    with pytest.raises(ValueError, match=f"{argument} lack the column.s. {dropped}"):
        find(**{argument: frame.drop(columns=dropped)})


def test_a_document_without_the_text_field():
    with pytest.raises(ValueError, match="document 'd0' of the corpus lacks text; it has docno, body"):
        find(corpus=[{"docno": "d0", "body": "?"}])


@pytest.mark.parametrize("as_dicts", [False, True])
def test_a_document_that_is_there_twice(as_dicts):
    corpus = collection(2)[2]
    twice = pd.concat([corpus, corpus.tail(1)])
    with pytest.raises(ValueError, match="document 'd1' more than once"):
        find(corpus=twice.to_dict("records") if as_dicts else twice)
    unwanted = pd.DataFrame({"docno": ["other", "other"], "text": "?"})
    assert find(corpus=pd.concat([corpus, unwanted])).unmatched == 0


def test_a_topic_that_is_there_twice():
    with pytest.raises(ValueError, match="topics hold the qid 'q0' more than once"):
        find(topics=pd.DataFrame({"qid": ["q0", "q0"], "query": "?"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge": says_wet}, "either passages"),
        ({"passages": None}, "either passages"),
        ({"relevant_from": 2}, "no document in qrels has a label of at least 2"),
        ({"sample": 0}, "sample=0"),
        ({"qrels": collection(2)[1].astype({"label": str})}, "column label must hold numbers, not '1'"),
        ({"passages": None, "judge": 7}, "judge=7 must be"),
        ({"passages": None, "judge": says_wet, "chunk_tokens": 0}, "chunk_tokens=0"),
        ({"passages": None, "judge": says_wet, "max_chunks": 0}, "max_chunks=0"),
        ({"passages": None, "judge": says_wet, "threshold": float("nan")}, "threshold=nan"),
        ({"passages": None, "judge": wet_words()}, "needs threshold="),
        ({"passages": None, "judge": lambda query, chunk: None}, "returned None; it must return a number"),
        ({"passages": None, "judge": lambda query, chunk: "yes"}, "returned 'yes'; it must return a number"),
        ({"passages": None, "judge": wet_words() % 1, "threshold": 0}, "no finite score for .* chunks"),
        ({"tokenizer": len}, "must be a fast Hugging Face tokenizer"),
    ],
)
def test_clear_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        find(**changes)


def test_bytes_are_no_text():
    with pytest.raises(ValueError, match="'text' holds bytes"):
        find(corpus=[{"docno": "d0", "text": b"?"}])


# Statistics and the figure.


def positions(starts: list[int | None], lengths: list[int], width: int = 100) -> ld.RelevantPositions:
    frame = pd.DataFrame({"qid": [f"q{i // 2}" for i in range(len(starts))], "docno": "d", "label": 1})
    known = [start is not None for start in starts]
    first = [start if start is not None else pd.NA for start in starts]
    end = [start + width if start is not None else pd.NA for start in starts]
    for name, values in (
        ("first_token", first),
        ("end_token", end),
        ("length", lengths),
        ("start", first),
        ("end", end),
    ):
        frame[name] = pd.array(values, dtype="Int64")
    return ld.RelevantPositions(frame.assign(reason=["" if k else "passage not found" for k in known]))


def test_summary():
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
    assert found.summary(first=1000)["starts in first 1000"] == 1
    assert repr(found) == "RelevantPositions(6 documents, 33.3% unmatched)"


def test_summary_without_any_position():
    summary = positions([None], [10]).summary()
    assert summary["unmatched"] == 1
    assert summary[["position mean", "relative position", "starts in first 477"]].isna().all()


def test_the_figure_shows_shares_of_positions_and_of_lengths():
    ax = positions([0, 300, 5000, None], [200, 900, 6000, 700]).plot(max_tokens=1024)
    lengths, starts = ([bar.get_height() for bar in bars] for bars in ax.containers)
    np.testing.assert_allclose(lengths, [1 / 4, 0, 1 / 4, 2 / 4])  # what lies beyond counts in the last bar
    np.testing.assert_allclose(starts, [1 / 3, 1 / 3, 0, 1 / 3])
    assert [bars[0].get_facecolor()[:3] for bars in ax.containers][1][0] > 0.8  # red
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "length of 4 relevant documents",
        "first relevant position (25% unmatched)",
    ]
    assert "and beyond" in [text.get_text() for text in ax.texts]


def test_the_figure_ends_with_the_longest_documents():
    ax = positions([0, 300], [200, 900]).plot(bin_tokens=100)
    assert ax.get_xlim()[1] == 900
    assert positions([0], [900]).plot(bin_tokens=100).get_xlim()[1] == 1000


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        find(corpus=collection(2)[2].assign(docno="other").head(1)).plot()
