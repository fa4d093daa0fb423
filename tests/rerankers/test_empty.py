"""Rows without text and empty queries are counted, and told of once in each call, whatever reads them."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.listwise import Reply
from pyterrier_longdoc.training import fit_seeds, k_fold_fit

from ..support import served
from ..support.systems import QUIET, REPRESENTATIVE, SYSTEMS, make, slow_but

pytestmark = QUIET

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


def likely(messages):
    return Reply("Yes", 30, 1, logprobs={"Yes": -1.0, "No": -2.0})


MODELS = {
    **{name: lambda name=name: make(name) for name in SYSTEMS},
    "function": lambda: ld.MaxP(ld.PairScorer(overlap), window_size=10, stride=5),
    "RankGPT": lambda: ld.RankGPT(lambda messages: "[1]", on_failure="keep", answer=ld.listwise.Permutation()),
    "Pointwise": lambda: ld.Pointwise(likely, concurrency=2),
}


def told(what) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what()
    messages = [warning for warning in caught if warning.category is ld.EmptyTextWarning]
    assert {warning.filename for warning in messages} <= {__file__}  # the user's line
    return [str(warning.message) for warning in messages]


def counts(coverage) -> tuple[int, int, int, int]:
    return coverage.rows, coverage.rows_without_text, coverage.rows_without_query, coverage.queries_empty


QUICK = [*REPRESENTATIVE, "Birch", "TKL", "function", "RankGPT", "Pointwise"]


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_every_model_counts_and_tells_once(name):
    model = MODELS[name]()
    [message] = told(lambda: model(RUN))
    assert message.startswith(f"{model!r}: 5 of 7 rows have no text (column 'text'); ")
    assert counts(model.coverage) == (7, 5, 0, 0)
    assert "of 7 rows 5 have no text, 0 no query" in str(model.coverage)
    empty = RUN.assign(query=["dog"] * 5 + ["  ", None])
    [message] = told(lambda: model(empty))
    said = "5 of 7 rows have no text (column 'text'), 2 of 7 rows have no query (column 'query'; 2 qids); "
    assert said in message
    assert counts(model.coverage) == (7, 5, 2, 2)
    assert told(lambda: model(RUN.assign(text="a dog"))) == []
    assert counts(model.coverage) == (7, 0, 0, 0)


def test_a_served_model_tells_too():
    with served.reranker(served.TeiForm) as server:
        model = ld.FirstP(ld.ScoreServer(server.url, api="tei", model="tiny"), window_size=10)
        [message] = told(lambda: model(RUN))
    assert "5 of 7 rows have no text" in message
    assert counts(model.coverage) == (7, 5, 0, 0)


@pytest.mark.parametrize("blank", BLANK)
@pytest.mark.parametrize("dtype", [object, "str"])
def test_scores_are_those_of_the_empty_text(blank, dtype, cross_encoder):
    model, frame = make("MaxP", cross_encoder), RUN.head(2).assign(text=pd.Series(["a dog", blank], dtype=dtype))
    before = frame.copy(deep=True)
    [message] = told(lambda: model(frame))
    assert "1 of 2 rows have no text" in message
    pd.testing.assert_frame_equal(frame, before)
    np.testing.assert_array_equal(model(frame)["score"], model(frame.assign(text=["a dog", ""]))["score"])


def test_a_row_with_any_text_has_text(cross_encoder):
    frame = RUN.assign(title=["a", "a", None, " ", "", "a", "a"])
    for repeat in (None, "title"):
        model = make("MaxP", cross_encoder, text_field=("title", "text"), repeat=repeat)
        [message] = told(lambda model=model: model(frame))
        assert "3 of 7 rows have no text (columns 'title', 'text'); " in message
        assert model.summary(frame).coverage.rows_without_text == 3


def test_texts_that_are_loaded_are_counted(cross_encoder):
    loader = pt.apply.generic(lambda frame: frame.assign(text=frame["docno"].map({"d0": "a dog", "d5": "a cat"})))
    model = make("MaxP", cross_encoder, text_loader=loader, training=TRAINING)
    bare = RUN.drop(columns="text")
    assert len(told(lambda: model(bare))) == 1
    assert counts(model.coverage) == (7, 5, 0, 0)
    [message] = told(lambda: model.fit(bare, QRELS, bare, QRELS))
    assert counts(model.coverage)[0] < 7  # of what was drawn
    drawn, empty = counts(model.coverage)[:2]
    assert f"in fit: {empty} of {drawn} rows have no text (column 'text'); " in message


def test_fit_tells_once_whatever_the_epochs(cross_encoder):
    recipe = ld.TrainingArgs(epochs=3, negatives=1)
    for validation in ((), (RUN, QRELS)):
        model = make("MaxP", cross_encoder, training=recipe)
        name = repr(model)
        [message] = told(lambda model=model, validation=validation: model.fit(RUN, QRELS, *validation))
        assert message.startswith(f"{name} in fit: 5 of 7 rows have no text (column 'text'); ")
        assert counts(model.coverage) == (7, 5, 0, 0)
        assert model.coverage.documents > 0


def test_seeds_and_folds_tell_once(cross_encoder):
    def seeds():
        return fit_seeds(make("MaxP", cross_encoder, training=TRAINING), [0, 1], RUN, QRELS, RUN, QRELS)

    words = {"1": "dog", "2": "cat", "3": "fish"}  # with which each fold's model becomes another one
    run = pd.concat([RUN.head(5).assign(qid=qid, query=word) for qid, word in words.items()], ignore_index=True)
    qrels = pd.DataFrame({"qid": list("123"), "docno": "d0", "label": 1})
    folds = []

    def cross_validate():
        folds.append(k_fold_fit(make("MaxP", cross_encoder, training=TRAINING), run, qrels, [["1"], ["2"], ["3"]]))

    assert len(told(seeds)) == 1
    assert len(told(cross_validate)) == 1
    assert len({repr(model) for model in folds[0].models}) == 3
    for _ in range(2):
        [message] = told(lambda: folds[0](run))
        assert message.startswith(f"{folds[0]!r}: 12 of 15 rows have no text (column 'text'); ")


def test_an_experiment_tells_once_for_each_system(cross_encoder):
    first = pt.Transformer.from_df(RUN)
    systems = {name: lambda seed: first >> make("MaxP", cross_encoder, seed=seed) for name in "ab"}
    topics = RUN[["qid", "query"]].drop_duplicates()
    messages = told(lambda: ld.Experiment(systems, topics, QRELS, ["AP"], seeds=[0, 1], efficiency=True))
    assert [message[:4] for message in messages] == ["'a':", "'b':"]
    assert all("5 of 7 rows" in message for message in messages)


def test_a_job_on_disk_tells_once_of_all_its_blocks(cross_encoder, tmp_path):
    pytest.importorskip("pyarrow")
    model = make("MaxP", cross_encoder)
    done = []
    [message] = told(lambda: done.append(ld.rerank_to_disk(model, RUN, tmp_path / "job")))
    assert message.startswith(f"{model!r}: 5 of 7 rows have no text (column 'text'); ")
    assert counts(done[0].coverage) == (7, 5, 0, 0)
    assert (done[0].coverage.documents, done[0].coverage.tokens) == (5, 4)
    assert told(lambda: done.append(ld.rerank_to_disk(model, RUN, tmp_path / "job"))) == []  # nothing is left
    assert done[1].coverage is None
    assert told(lambda: ld.rerank_to_disk(model, RUN, tmp_path / "other", dry_run=True)) == []
    pipeline = model >> ld.Pointwise(likely)
    messages = told(lambda: done.append(ld.rerank_to_disk(pipeline, RUN, tmp_path / "two")))
    assert [message.partition("(")[0] for message in messages] == ["MaxP", "Pointwise"]


def test_a_job_that_fails_tells_what_it_has_seen(cross_encoder, tmp_path):
    pytest.importorskip("pyarrow")
    model = make("MaxP", cross_encoder)

    def fail(frame):
        if "3" in set(frame["qid"]):
            raise OSError("no")
        return frame

    def job():
        with pytest.raises(RuntimeError, match="no"):
            ld.rerank_to_disk(model >> pt.apply.generic(fail), RUN, tmp_path / "job")

    assert len(told(job)) == 1


@pytest.mark.slow
def test_workers_tell_once_together(cross_encoder, tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    with ld.distributed(make("MaxP", cross_encoder), workers=2, gpus_per_worker=0, block_rows=1) as model:
        for _ in range(2):
            [message] = told(lambda: model(RUN))
            assert "5 of 7 rows have no text" in message
            assert counts(model.coverage) == (7, 5, 0, 0)
        done = []
        job = lambda: done.append(ld.rerank_to_disk(model.model, RUN, tmp_path / "job", executor=model))  # noqa: E731
        [message] = told(job)
        assert "5 of 7 rows have no text" in message
        assert counts(done[0].coverage) == (7, 5, 0, 0)
