"""Rows without text and empty queries are counted, and each model tells of them in every call."""

from __future__ import annotations

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld

from ..support.systems import QUIET, REPRESENTATIVE, make, told_of

pytestmark = QUIET

UNSEEN = ["\u200b", "\ufeff \u00ad", "\x07", "\ue000", "\u0301"]
BLANK = [None, float("nan"), "", "  \n"]
RUN = pd.DataFrame(
    [("1", "dog", "a dog")] + [("1", "dog", text) for text in BLANK] + [("2", "cat", "a cat"), ("3", "cat", "")],
    columns=["qid", "query", "text"],
    dtype=object,
).assign(docno=[f"d{i}" for i in range(7)], score=[6.0 - i for i in range(7)])
QRELS = pd.DataFrame({"qid": list("1223"), "docno": ["d0", "d5", "d6", "d6"], "label": [1, 1, 1, 1]})
TRAINING = ld.TrainingArgs(max_steps=2)


def overlap(queries, texts) -> list[float]:
    return [float(query in text) for query, text in zip(queries, texts, strict=True)]


def first(messages):
    return "[1]"


MODELS = {
    **{name: lambda name=name: make(name) for name in (*REPRESENTATIVE, "Birch")},
    "function": lambda: ld.MaxP(ld.PairScorer(overlap), window_size=10, stride=5),
    "RankGPT": lambda: ld.RankGPT(first, on_failure="keep"),
}


def told(what) -> list[str]:
    return told_of(ld.EmptyTextWarning, what)


def counts(coverage) -> tuple[int, int, int, int]:
    return coverage.rows, coverage.rows_without_text, coverage.rows_without_query, coverage.queries_empty


@pytest.mark.parametrize("name", MODELS)
def test_every_model_counts_empty_texts_and_queries_and_warns(name):
    model = MODELS[name]()
    for _ in range(2):  # in every call
        [message] = told(lambda: model(RUN))
        assert message.startswith(f"{type(model).__name__}: 5 of 7 rows have no text (in 'text')")
    assert counts(model.coverage) == (7, 5, 0, 0)
    [message] = told(lambda: model(RUN.assign(text="a dog", query=["dog"] * 5 + ["  ", None])))
    assert message.startswith(f"{type(model).__name__}: 2 of 7 rows have no query")
    assert counts(model.coverage) == (7, 0, 2, 2)
    assert told(lambda: model(RUN.assign(text="a dog"))) == []
    assert counts(model.coverage) == (7, 0, 0, 0)


def test_invisible_characters_do_not_count_as_text(cross_encoder):
    for unseen in UNSEEN:
        model = make("MaxP", cross_encoder)
        frame = RUN.head(2).assign(text=["a dog", unseen])
        assert model(frame)["score"][1] == pytest.approx(model(frame.assign(text=["a dog", ""]))["score"][1])
        told(lambda model=model, frame=frame: model(frame))
        assert counts(model.coverage) == (2, 1, 0, 0)
        frame = frame.assign(text="a dog", query=unseen)
        told(lambda model=model, frame=frame: model(frame))
        assert counts(model.coverage) == (2, 0, 2, 1)


def test_every_visible_character_counts_as_text(cross_encoder):
    model = make("MaxP", cross_encoder)
    assert told(lambda: model(RUN.head(5).assign(text=["\u00a8", "?", "犬", "\U0001f415", "٣"]))) == []


def test_a_row_counts_as_empty_only_if_all_its_text_fields_are(cross_encoder):
    frame = RUN.assign(title=["a", "a", None, " ", "", "a", "a"])
    for repeat in (None, "title"):
        model = make("MaxP", cross_encoder, text_field=("title", "text"), repeat=repeat)
        [message] = told(lambda model=model: model(frame))
        assert "3 of 7 rows have no text (in 'title', 'text')" in message
        assert model.summary(frame).rows_without_text == 3


def test_empty_texts_of_a_text_loader_are_counted(cross_encoder):
    loader = pt.apply.generic(lambda frame: frame.assign(text=frame["docno"].map({"d0": "a dog", "d5": "a cat"})))
    model, bare = make("MaxP", cross_encoder, text_loader=loader, training=TRAINING), RUN.drop(columns="text")
    assert len(told(lambda: model(bare))) == 1
    assert counts(model.coverage) == (7, 5, 0, 0)
    assert any(message.startswith("MaxP in fit") for message in told(lambda: model.fit(bare, QRELS, bare, QRELS)))
    drawn, empty = counts(model.coverage)[:2]
    assert empty < drawn < 7


def test_fit_warns_once_about_empty_texts_for_any_number_of_epochs(cross_encoder):
    model = make("MaxP", cross_encoder, training=ld.TrainingArgs(epochs=3, negatives=1))
    [message] = told(lambda: model.fit(RUN, QRELS))
    drawn, empty = counts(model.coverage)[:2]
    assert message.startswith(f"MaxP in fit: {empty} of {drawn} rows have no text")
    assert 0 < empty < drawn <= 7


def test_a_job_on_disk_warns_once_about_empty_texts_of_all_blocks(cross_encoder, tmp_path):
    pytest.importorskip("pyarrow")
    model = make("MaxP", cross_encoder)
    messages = told(lambda: ld.rerank_to_disk(model >> MODELS["RankGPT"](), RUN, tmp_path / "two"))
    assert [message.partition(":")[0] for message in messages] == ["MaxP", "RankGPT"]


def test_several_texts_of_a_document_are_reported(cross_encoder):
    model = make("MaxP", cross_encoder)
    rows = RUN.head(2).assign(docno="d0", text=["a dog", "a cat"])
    assert any("'d0'" in message for message in told_of(UserWarning, lambda: model(rows)))
    for harmless in (rows.assign(text="a dog"), rows.assign(qid=["1", "2"]), rows.assign(docno=["d0%p0", "d0%p1"])):
        assert told_of(UserWarning, lambda harmless=harmless: make("MaxP", cross_encoder)(harmless)) == []
