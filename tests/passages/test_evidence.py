"""Evidence keeps the best windows of all documents of a query within one budget of tokens."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.common.language import token_counter

from ..support import tiny
from ..support.systems import QUIET, make

pytestmark = QUIET

WORDS = token_counter(lambda text: len(text.split()))
"""Counts words, and the mark as one."""


def row(docno, text, *windows, qid="1", rank=0, **columns):
    """A result with windows, each a text that stands in the document's text and its score."""
    spans = [(text.index(window), text.index(window) + len(window)) for window, _ in windows] or [(0, 0)]
    scores = [score for _, score in windows] or [0.0]
    base = {"qid": qid, "query": "cats", "docno": docno, "text": text, "score": max(scores), "rank": rank}
    return {**base, "window_spans": spans, "window_scores": scores, **columns}


def frame(*rows):
    return pd.DataFrame(list(rows))


def count(text):
    return len(text.split())


def evidence(results, tokens=100, **arguments):
    return ld.Evidence(tokens, **{"tokenizer": count, "document_weight": 0, **arguments})(results)


CATS = row(
    "cats", "A cat purrs. Dogs bark all day. Cats sleep.", ("A cat purrs.", 5), ("Dogs bark", 1), ("Cats sleep.", 4)
)
DOGS = row("dogs", "Dogs. No cat. Dogs.", ("No cat.", 4.5), rank=1)


def test_the_best_windows_of_all_documents_are_kept_in_document_order():
    out = evidence(frame(CATS, DOGS), 8)
    assert out["text"].tolist() == ["A cat purrs. [...] Cats sleep.", "No cat."]
    assert out["evidence_tokens"].tolist() == [6, 2]
    assert out["evidence_spans"].tolist() == [[(0, 12), (32, 43)], [(6, 13)]]


def test_windows_are_added_while_they_and_their_marks_fit_the_budget():
    for tokens, texts in [
        (4, ["A cat purrs.", ""]),
        (6, ["A cat purrs.", "No cat."]),
        (7, ["A cat purrs. Dogs bark", "No cat."]),  # 2 tokens; the better one costs 3, with its mark
    ]:
        assert evidence(frame(CATS, DOGS), tokens)["text"].tolist() == texts


def test_a_window_that_does_not_fit_leaves_room_for_smaller_ones():
    large = row("large", "a b c d e f g h", ("a b c d e f g h", 9))
    assert evidence(frame(large, CATS, DOGS), 5)["text"].tolist() == ["", "A cat purrs.", "No cat."]


def test_document_weight_prefers_windows_of_better_documents():
    for scores, tokens, weight, texts in [
        ([3.0, 1.0], 5, 0, ["A cat purrs.", "No cat."]),  # by 5 and 4.5
        ([3.0, 1.0], 5, 0.1, ["A cat purrs.", "No cat."]),  # 4.6 and 4.3
        ([3.0, 1.0], 6, 1, ["A cat purrs. [...] Cats sleep.", ""]),
        ([1.0, 3.0], 5, 1, ["A cat purrs.", "No cat."]),
    ]:
        results = frame(CATS, DOGS).assign(score=scores)
        assert evidence(results, tokens, document_weight=weight)["text"].tolist() == texts


def test_windows_that_overlap_are_counted_and_shown_once():
    text = "one two three four five six"
    results = frame(row("d", text, ("one two three four", 3), ("one two three four", 2), ("three four five six", 1)))
    assert evidence(results, 6).loc[0, ["text", "evidence_tokens"]].tolist() == [text, 6]
    assert evidence(results, 6)["evidence_spans"].tolist() == [[(0, len(text))]]
    assert evidence(results, 5)["text"].tolist() == ["one two three four"]


def test_neighbouring_windows_keep_the_white_space_between_them():
    for between in ["\n\n", "  ", "\u200b "]:
        results = frame(row("d", f" One.{between}Two. ", ("One.", 1), ("Two.", 2)))
        assert evidence(results)["text"].tolist() == [f"One.{between}Two."]


def test_each_query_has_its_own_budget():
    results = frame(CATS, {**CATS, "qid": "2", "window_scores": [1.0, 9.0, 2.0]}, DOGS)
    out = evidence(results, 5)
    assert out["text"].tolist() == ["A cat purrs.", "Dogs bark [...] Cats sleep.", "No cat."]
    assert out.groupby("qid")["evidence_tokens"].sum().tolist() == [5, 5]


THREE = frame(CATS, row("poor", "Rain. Snow.", ("Rain.", -5), ("Snow.", -4), rank=1), DOGS | {"rank": 2})


def test_at_least_and_at_most_limit_the_tokens_of_each_document():
    for limits, texts in [
        ({"tokens": 6}, ["A cat purrs.", "Snow.", "No cat."]),
        ({"tokens": 6, "at_least": 1}, ["A cat purrs.", "Snow.", "No cat."]),
        ({"tokens": 8}, ["A cat purrs. [...] Cats sleep.", "", "No cat."]),
        ({"tokens": 8, "at_least": 1}, ["A cat purrs. Dogs bark", "Snow.", "No cat."]),
        ({"tokens": 7, "at_least": 2}, ["A cat purrs.", "Rain. Snow.", "No cat."]),
        ({"at_most": 3}, ["A cat purrs.", "Rain. Snow.", "No cat."]),
    ]:
        assert evidence(THREE, **limits)["text"].tolist() == texts


def test_documents_with_fewer_tokens_than_at_least_cause_a_warning():
    with pytest.warns(TruncationWarning, match="at_least=3"):
        assert evidence(THREE, at_least=3)["text"].tolist()[1:] == ["Rain. Snow.", "No cat."]


@pytest.mark.parametrize(
    ("limits", "name"), [({"tokens": 1}, "tokens=1"), ({"at_most": 1}, "at_most=1")], ids=["tokens", "at_most"]
)
def test_limits_smaller_than_every_window_cause_a_warning(limits, name):
    with pytest.warns(TruncationWarning, match=name):
        out = evidence(frame(CATS, DOGS), **limits)
    assert out["text"].tolist() == [""] * 2
    assert out["evidence_spans"].tolist() == [[]] * 2


def test_ties_go_to_the_better_rank_and_the_earlier_window():
    rows = [row(name, f"{name} one. {name} two.", (f"{name} two.", 1), (f"{name} one.", 1)) for name in "abc"]
    results = frame(*rows).assign(rank=[2, 0, 1])
    assert evidence(results, 4)["text"].tolist() == ["", "b one. b two.", ""]
    assert evidence(results, 6)["text"].tolist() == ["", "b one. b two.", "c two."]
    permuted = results.iloc[[1, 2, 0]]
    assert evidence(permuted, 6)["text"].tolist() == ["b one. b two.", "c two.", ""]
    assert evidence(results.drop(columns="rank"), 4)["text"].tolist() == ["a one. a two.", "", ""]


def test_counting_a_long_document_takes_linear_time():
    """Each window once: texts that grow by a window each would be counted to the square of their length."""
    words, counted = [f"w{number}" for number in range(400)], []
    text = " ".join(words)

    def count_words(text):
        counted.append(len(text.split()))
        return counted[-1]

    windows = [(f"w{number} w{number + 1} ", number % 7) for number in range(100, 300, 4)]
    out = evidence(frame(row("long", text, *windows)), 120, tokenizer=count_words)
    assert out["evidence_tokens"].tolist() == [len(out["text"][0].split())]
    assert 117 < out["evidence_tokens"][0] <= 120
    assert sum(counted) < 3 * len(words)


def test_a_repeated_title_precedes_the_evidence_and_is_counted():
    results = frame({**CATS, "title": "On cats"}, {**DOGS, "title": "On dogs"}).rename(columns={"text": "body"})
    arguments = {"text_field": ("title", "body"), "repeat": "title"}
    out = evidence(results, 6, **arguments)
    assert out["body"].tolist() == ["On cats\nA cat purrs.", ""]
    assert out["title"].tolist() == results["title"].tolist()
    assert evidence(results, 9, **arguments)["body"].tolist() == ["On cats\nA cat purrs.", "On dogs\nNo cat."]


def test_evidence_of_joined_fields_goes_into_text():
    joined = frame({**row("d", "On cats A cat purrs.", ("A cat", 1)), "title": "On cats", "body": "A cat purrs."})
    out = evidence(joined.drop(columns="text"), text_field=("title", "body"))
    assert out[["body", "text"]].to_numpy().tolist() == [["A cat purrs.", "A cat"]]


def test_rows_columns_and_index_are_kept_and_the_input_is_unchanged():
    results = frame(DOGS, CATS | {"qid": "2"}, CATS, CATS).set_axis([7, 3, 3, 0]).assign(extra=[1, 2, 3, 4])
    before = results.copy(deep=True)
    out = evidence(results, 5)
    pd.testing.assert_frame_equal(results, before)
    assert out.columns.tolist() == [*results.columns, "evidence_spans", "evidence_tokens", "window_field"]
    others = [name for name in results if name != "text"]
    pd.testing.assert_frame_equal(out[others], before[others])


@pytest.mark.parametrize("columns", [[], ["title", "rank"]])
def test_an_empty_frame_gets_the_new_columns(columns):
    empty = pd.DataFrame(columns=["qid", "query", "docno", "text", "score", "window_scores", "window_spans", *columns])
    out = ld.Evidence()(empty)
    assert out.columns.tolist() == [*empty.columns, "evidence_spans", "evidence_tokens", "window_field"]
    assert len(out) == 0


def test_rows_without_windows_of_a_sum_are_refused():
    results = frame(CATS, DOGS)
    left, right = (pt.Transformer.from_df(rows) for rows in (results.iloc[:1], results))
    with pytest.raises(ValueError, match=r"'dogs'.*a \+ b"):
        evidence((left + right)(results[["qid", "query"]].iloc[:1]))


def test_a_missing_column_is_named():
    for column, fields in [
        ("window_spans", "text"),
        ("text", "text"),
        ("text", ("title", "text")),
        ("qid", "text"),
        ("score", "text"),
    ]:
        with pytest.raises(pt.validate.InputValidationError, match=column):
            evidence(frame(CATS, DOGS).drop(columns=column), text_field=fields)


def test_the_document_with_wrong_windows_is_named():
    for changes, docno in [
        ({"window_scores": [[np.nan, 1.0, 2.0], [1.0]]}, "cats"),
        ({"window_scores": [[1.0, 2.0], [1.0]]}, "cats"),
        ({"window_scores": [[1.0, 2.0, 3.0, 4.0], [1.0]]}, "cats"),
        ({"window_scores": [CATS["window_scores"], None]}, "dogs"),
        ({"text": "short"}, "cats"),
    ]:
        with pytest.raises(ValueError, match=f"'{docno}'"):
            evidence(frame(CATS, DOGS).assign(**changes))


def test_wrong_arguments_are_refused_by_name():
    for arguments, name in [
        ({"tokens": 300, "at_least": 200, "at_most": 100}, "at_least=200"),
        ({"text_field": ()}, "text_field"),
        ({"repeat": "title"}, "repeat='title'"),
    ]:
        with pytest.raises(ValueError, match=name):
            ld.Evidence(**arguments)


@pytest.fixture
def windows_of_body(results) -> pd.DataFrame:
    """Explained results with windows of the column `body`."""
    titled = results.assign(title="a title", text=results["text"].fillna(""), body=results["text"].fillna("") + " more")
    return make("MaxP", explain=True, text_field=("title", "body"), repeat="title")(titled)


def test_windows_are_taken_from_the_column_that_the_model_read(windows_of_body):
    out = ld.Evidence(60, text_field=("title", "body"), repeat="title")(windows_of_body)
    assert set(out["body"].str[:7]) <= {"a title", ""}
    assert ld.show(windows_of_body, "1", text_field="body").documents


@pytest.mark.parametrize(
    "reads",
    [
        ld.Evidence(60),
        ld.Evidence(60, text_field=("title", "body")),
        ld.Evidence(60, text_field="title"),
        lambda frame: ld.show(frame, "1"),
        lambda frame: ld.evidence_recall(frame, frame[["qid", "docno"]].assign(start=0, end=1)),
    ],
)
def test_windows_of_another_column_are_refused(reads, windows_of_body):
    with pytest.raises(ValueError, match="'body'"):
        reads(windows_of_body)


@pytest.mark.parametrize("again", [ld.Evidence(30), lambda frame: ld.show(frame, "1")])
def test_windows_of_texts_replaced_by_evidence_are_refused(again, results):
    once = (make("MaxP", explain=True) >> ld.Evidence(60))(results)
    with pytest.raises(ValueError, match="replaced"):
        again(once)


def best_passages(**passages):
    """The best passage of two documents, explained, and the texts of the documents."""
    texts = {"a": " ".join(tiny.WORDS), "b": " ".join(reversed(tiny.WORDS))}
    results = pd.DataFrame({"qid": "1", "query": "red fish", "docno": list(texts), "text": list(texts.values())})
    model = make("MaxP", explain=True, window_size=6, stride=6)
    cut = ld.Passages(ld.SlidingWindows(15, 15), **passages)
    return (cut >> model >> pt.text.max_passage())(results), texts


def of_documents(best, texts):
    return best.assign(text=best["docno"].map(texts))


def test_windows_of_a_passage_are_mapped_to_the_document():
    best, texts = best_passages()
    assert max(start for start, _ in best["passage_span"]) > 0
    passages, documents = evidence(best, 10), evidence(of_documents(best, texts), 10)
    assert passages["text"].tolist() == documents["text"].tolist() != ["", ""]
    for row in documents.itertuples():
        assert " [...] ".join(texts[row.docno][slice(*span)] for span in row.evidence_spans) == row.text


def test_gold_text_is_found_in_windows_of_a_passage():
    best, texts = best_passages()
    start, _ = best.loc[best["docno"] == "b", "passage_span"].item()
    gold = pd.DataFrame({"qid": ["1"], "docno": "b", "start": start, "end": start + 1})
    recall = ld.evidence_recall(of_documents(best, texts), gold, k=3)  # all windows of the passage
    assert recall["value"][recall["name"] == "model"].tolist() == [1.0]
    elsewhere = 0 if start else len(texts["b"]) - 1
    recall = ld.evidence_recall(of_documents(best, texts), gold.assign(start=elsewhere, end=elsewhere + 1), k=3)
    assert recall["value"][recall["name"] == "model"].tolist() == [0.0]


def test_windows_of_a_passage_that_cannot_be_located_are_refused():
    best, texts = best_passages()
    documents = of_documents(best, texts).drop(columns="passage_span")
    for reads in (evidence, ld.show, lambda frame: ld.evidence_recall(frame, frame.assign(start=0, end=1))):
        with pytest.raises(ValueError, match=r"'[ab]'"):
            reads(documents)
    titled, texts = best_passages(text_field=("text", "docno"), repeat="docno")
    with pytest.raises(ValueError, match=r"'[ab]'"):
        evidence(of_documents(titled, texts))


def test_windows_that_preselect_left_out_are_not_evidence(results):
    model = make("MaxP", explain=True, preselect=ld.BM25Windows(1))
    out = (model >> ld.Evidence(500))(results)
    assert all(len(spans) <= 1 for spans in out["evidence_spans"])
    assert out["evidence_spans"].tolist() == [
        [tuple(row.window_spans[0])] if row.text else [] for row in out.itertuples()
    ]


@pytest.mark.parametrize("name", ["MaxP", "PARADE-attn", "BiEncoder-max", "Birch", "MaxSim"])
def test_tokens_are_counted_by_the_tokenizer_of_the_model(name, results):
    model = make(name, explain=True)
    out = (model >> ld.Evidence(60))(results)
    counts = token_counter(model.model.tokenizer)(out["text"].tolist())
    assert out["evidence_tokens"].tolist() == counts
    assert out.groupby("qid")["evidence_tokens"].sum().between(40, 60).all()
    texts = results["text"].fillna("")
    shown = [
        " [...] ".join(text[a:b] for a, b in spans) for text, spans in zip(texts, out["evidence_spans"], strict=True)
    ]
    assert out["text"].tolist() == shown
    pd.testing.assert_frame_equal(ld.Evidence(60, tokenizer=tiny.encoder())(model(results)), out)


def test_the_tokenizer_name_survives_pyterrier_operators(results):
    summed = (0.3 * pt.Transformer.identity() + make("MaxP", explain=True)) % 1
    assert 0 < (summed >> ld.Evidence(60))(results)["evidence_tokens"].max() <= 60


def test_the_tokenizer_of_a_model_is_found_from_any_folder(results, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(tiny.encoder()).parent)
    explained = make("MaxP", Path(tiny.encoder()).name, explain=True)(results)
    monkeypatch.chdir(tmp_path)
    expected = ld.Evidence(60, tokenizer=tiny.encoder())(explained)
    pd.testing.assert_frame_equal(ld.Evidence(60)(explained), expected)


def test_words_are_counted_for_a_scorer_without_tokenizer(results):
    model = ld.MaxP(
        ld.PairScorer(lambda queries, texts: [len(text) for text in texts]), window_size=10, stride=5, explain=True
    )
    out = (model >> ld.Evidence(25))(results)
    assert out["evidence_tokens"].tolist() == WORDS(out["text"].tolist())
    assert out.groupby("qid")["evidence_tokens"].sum().tolist() == [25, 25]


SENTENCE = st.text(alphabet="ab é猫🐈‍\n.", min_size=0, max_size=12)


@given(
    texts=st.lists(SENTENCE, min_size=1, max_size=5),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 99),
    at_least=st.sampled_from([0, 1]),
    at_most=st.sampled_from([None, 4]),
)
def test_no_query_exceeds_its_budget_and_no_text_is_invented(texts, tokens, seed, at_least, at_most):
    rng = np.random.default_rng(seed)
    rows = []
    for number, text in enumerate(texts):
        ends = np.sort(rng.integers(0, len(text) + 1, size=(rng.integers(1, 4), 2)), axis=1).tolist()
        spans, scores = [tuple(each) for each in ends], rng.integers(0, 3, len(ends)).astype(float)
        base = {"qid": number % 2, "query": "q", "docno": number, "text": text, "rank": number, "score": -number}
        rows.append({**base, "window_spans": spans, "window_scores": scores.tolist()})
    odd = lambda text: len(text.replace("[...]", "!")) + text.count("[...]")  # noqa: E731 - marks are two tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        out = ld.Evidence(tokens, at_least=at_least, at_most=at_most, tokenizer=odd)(frame(*rows))
    assert out.groupby("qid")["evidence_tokens"].sum().max() <= tokens
    assert out["evidence_tokens"].max() <= (at_most or tokens)
    for text, old, spans in zip(out["text"], texts, out["evidence_spans"], strict=True):
        assert text == " [...] ".join(old[a:b].strip() for a, b in spans)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
