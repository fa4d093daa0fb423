"""Which queries are trained and validated on, and what fit says of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.data.collection import TextLoader
from pyterrier_longdoc.training import LeftOutWarning, TrainingArgs, make_groups

from ..support.systems import CROSS_ENCODERS, QUIET, make, told_of
from ..support.toy import qrels, toy_task

pytestmark = QUIET
RUN, JUDGED = toy_task(0, queries=6)  # d0 is relevant, d1 to d3 are candidates too
UNJUDGED, NOT_RELEVANT, NOT_RETRIEVED, ALL_RELEVANT, *USED = JUDGED["qid"]
RECIPE = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, warmup=0.0)


def mixed() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each of the first four queries is left out for another reason."""
    run = RUN[~((RUN["qid"] == NOT_RETRIEVED) & (RUN["docno"] == "d0"))]
    run = run[~((run["qid"] == ALL_RELEVANT) & (run["docno"] != "d0"))]
    judged = JUDGED[JUDGED["qid"] != UNJUDGED]
    judged = judged.assign(label=(judged["qid"] != NOT_RELEVANT).astype(int))
    return run.assign(text=run["text"]), judged


def test_every_query_is_trained_on_or_left_out_for_a_reason(cross_encoder, capsys):
    run, judged = mixed()
    model = make("MaxP", cross_encoder, training=RECIPE, verbose=True)
    assert model.trained_on is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeftOutWarning)  # it would say the same again
        model.fit(run, judged, run, judged)
    told = model.trained_on
    assert (told.queries, told.used, told.candidates, told.relevant, told.added) == (6, 2, 8, 2, 0)
    assert (told.unjudged, told.without_relevant, told.not_retrieved, told.without_negative) == (1, 1, 1, 1)
    assert told.validated == 5
    assert f"MaxP: {told}" in capsys.readouterr().out


@pytest.mark.parametrize("left", [2, 6])
def test_queries_that_are_left_out_cause_a_warning(left, cross_encoder, capsys):
    model = make("MaxP", cross_encoder, training=RECIPE)
    told = told_of(LeftOutWarning, lambda: model.fit(RUN, JUDGED.head(left)))
    assert ["trained_on" in message for message in told] == [True] * (left < 6)
    assert model.trained_on.used == left
    assert capsys.readouterr().out == ""


def test_judged_documents_that_were_added_are_counted(cross_encoder):
    run, judged = mixed()
    loader = pt.apply.text(lambda row: "cat")
    recipe = TrainingArgs(judged="all")
    told = make("MaxP", cross_encoder, training=recipe, text_loader=loader).fit(run, judged).trained_on
    assert (told.used, told.added, told.candidates, told.not_retrieved) == (3, 1, 12, 0)
    assert "not retrieved: 1" in str(told)


def collection(*docnos: str) -> TextLoader:
    return TextLoader({docno: {"docno": docno, "text": "cat"} for docno in docnos}, ["text"])


BARE = RUN.drop(columns="text")
ELSEWHERE = pd.concat([JUDGED, qrels((USED[0], "elsewhere", 0), (USED[0], "d9", 0))])
"""With judgements of two documents that were not retrieved."""


def test_judged_documents_that_the_collection_lacks_are_left_out_before_the_first_step(cross_encoder):
    recipe = replace(RECIPE, judged="all", epochs=2, negatives=5)
    loader = collection(*RUN["docno"], "d9")
    model = make("MaxP", cross_encoder, training=recipe, text_loader=loader)
    with pytest.warns(LeftOutWarning):
        told = model.fit(BARE, ELSEWHERE).trained_on
    assert (told.used, told.added, told.not_found) == (6, 1, 1)


def test_a_retrieved_document_that_the_collection_lacks_ends_the_training(cross_encoder):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, judged="all"), text_loader=collection("d0", "d9"))
    with pytest.raises(KeyError, match=r"'d[123]'"):
        model.fit(BARE, ELSEWHERE)


def test_judged_documents_that_a_terrier_index_lacks_are_left_out(cross_encoder, terrier_index):
    topics = pd.DataFrame({"qid": ["q"], "query": ["dog in the city"]})
    run = terrier_index.bm25()(topics).drop(columns="docid")
    judged = qrels(*(("q", docno, label) for docno, label in (("d5", 1), ("d6", 0), ("424", 1), ("425", 0))))
    assert not {"d6", "424", "425"} & set(run["docno"])
    model = make("MaxP", cross_encoder, training=replace(RECIPE, judged="all"), text_loader=terrier_index)
    with pytest.warns(LeftOutWarning):
        told = model.fit(run, judged).trained_on
    assert (told.used, told.added, told.not_found) == (1, 1, 2)


def test_errors_say_why_nothing_can_be_trained_on():
    for run, judged, named in [
        (RUN.iloc[:0], JUDGED, "of 0 queries"),
        (RUN.assign(qid=RUN.groupby("qid", sort=False).ngroup()), JUDGED, f"6 not in .*'{UNJUDGED}'"),
        (RUN, JUDGED.iloc[:0], "6 not in the qrels"),
        (RUN, JUDGED.assign(label=0), "6 without a relevant"),
        (RUN.assign(docno="doc/" + RUN["docno"]), JUDGED, "6 with none of their relevant.*'doc/d0'"),
        (RUN[RUN["docno"] == "d0"], JUDGED, "6 without a non-relevant"),
    ]:
        with pytest.raises(ValueError, match=named):
            make_groups(run, judged)


# What is read of the texts.


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *[(name, {}) for name in CROSS_ENCODERS],
        ("FirstP", {"window_size": 5}),
        ("MaxP", {"max_doc_len": 6}),
        ("MaxP", {"window_size": 5, "stride": 5, "max_windows": 1, "max_query_len": 1}),
        ("MaxP", {"window_size": 5, "stride": 5, "preselect": ld.BM25Windows(1)}),
    ],
)
def test_coverage_after_fit_is_that_of_transform(name, changes, cross_encoder):
    """If every candidate is drawn; a text that is drawn twice counts once."""
    recipe = TrainingArgs(sampling="pointwise", loss="pointwise_bce", epochs=2)
    run = RUN.assign(query=RUN["query"] + " the old")
    model = make(name, training=recipe, **changes).fit(run, JUDGED)
    read = model.coverage
    model(run)
    assert read == model.coverage
    assert read.pairs >= run["text"].nunique()
    assert read.tokens_computed >= read.tokens_encoded > read.tokens_read
    assert read.dtype == "float32"
