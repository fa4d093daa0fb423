"""Which queries are trained and validated on, and what fit says of it."""

from __future__ import annotations

import warnings

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.training import LeftOutWarning, TrainingArgs, fit_seeds, make_groups
from pyterrier_longdoc.training.queries import check_validation

from ..support.systems import CROSS_ENCODERS, QUIET, make
from ..support.toy import optimizer_steps, qrels, toy_task

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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(run, judged, run, judged)
    told = model.trained_on
    assert (told.queries, told.used, told.candidates, told.relevant, told.added) == (6, 2, 8, 2, 0)
    assert (told.unjudged, told.without_relevant, told.not_retrieved, told.without_negative) == (1, 1, 1, 1)
    assert (told.validation.queries, told.validation.used, told.validation.without_relevant) == (6, 5, 2)
    line = (
        "2 of 6 queries are trained on, with 8 candidates (2 relevant); left out: 1 not in the qrels, 1 without a "
        "relevant document in the qrels, 1 with none of their relevant documents among the candidates, 1 without a "
        "non-relevant candidate; validated on 5 of 6 (1 not in the qrels, 2 without a relevant candidate)"
    )
    assert str(told) == line
    shown = capsys.readouterr().out.splitlines()
    advice = "; retrieve deeper, or take TrainingArgs(judged='all')"
    assert shown == [f"MaxP: {line}{advice}", f"MaxP: trained on {model.coverage}"]
    assert not any(warning.category is LeftOutWarning for warning in caught)  # it would say the same again
    with pytest.warns(LeftOutWarning) as caught:
        make("MaxP", cross_encoder, training=RECIPE).fit(run, judged, run, judged)
    (said,) = [warning for warning in caught if warning.category is LeftOutWarning]
    assert str(said.message) == f"MaxP: {line}{advice}"
    assert said.filename == __file__


@pytest.mark.parametrize("left", [2, 5, 6])
def test_warned_where_queries_are_left_out(left, cross_encoder, capsys):
    model = make("MaxP", cross_encoder, training=RECIPE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(RUN, JUDGED.head(left))
        models = fit_seeds(lambda seed: make("MaxP", cross_encoder, seed=seed), [0, 1], RUN, JUDGED.head(left))
    # Once for the model, once for the seeds together.
    assert sum(warning.category is LeftOutWarning for warning in caught) == (2 if left < 6 else 0)
    assert [models[seed].trained_on.used for seed in (0, 1)] == [left, left]
    assert capsys.readouterr().out == ""


def test_judged_documents_that_were_added_are_counted(cross_encoder):
    run, judged = mixed()
    loader = pt.apply.text(lambda row: "cat")
    recipe = TrainingArgs(judged="all")
    told = make("MaxP", cross_encoder, training=recipe, text_loader=loader).fit(run, judged).trained_on
    assert (told.used, told.added, told.candidates, told.not_retrieved) == (3, 1, 12, 0)
    assert "; judged documents added that were not retrieved: 1; left out: 1 not in" in str(told)


@pytest.mark.parametrize(
    ("run", "judged", "message"),
    [
        (RUN.iloc[:0], JUDGED, "there are no training candidates: the frame has no rows"),
        (
            RUN.assign(qid=RUN.groupby("qid", sort=False).ngroup()),
            JUDGED,
            rf"qids of the training .* do not match: .* have 0, 1, 2 \(int64\), the qrels '{UNJUDGED}', .*\)",
        ),
        (RUN, JUDGED.iloc[:0], r"qids .* do not match: .* the qrels none \("),
        (RUN, JUDGED.assign(label=0), "no positives: no document of the 6 training .* at least 1, the highest is 0"),
        (
            RUN.assign(docno="doc/" + RUN["docno"]),
            JUDGED,
            r"docnos of the training .* do not match: .* have 'doc/d0', 'doc/d1', 'doc/d2' \(.*\), the qrels 'd0' \(",
        ),
        (
            RUN[RUN["docno"] != "d0"],
            pd.concat([JUDGED, JUDGED.assign(docno="d1", label=0)]),
            r"no positives among the training .* for 6 of 6 .* \(which have up to 3\): retrieve deeper, or .*'all'",
        ),
        (RUN[RUN["docno"] == "d0"], JUDGED, r"6 of 6 queries have a relevant .* \(max_negative_rank=100"),
    ],
)  # fmt: skip
def test_errors_say_why_nothing_can_be_trained_on(run, judged, message):
    with pytest.raises(ValueError, match=message):
        make_groups(run, judged)


def test_why_nothing_can_be_trained_on_where_queries_differ():
    run, judged = mixed()
    rest = ~run["qid"].isin(USED)
    with pytest.raises(ValueError, match="1 of 4 queries have a relevant candidate, but none of these has a non-relev"):
        make_groups(run[rest], judged)
    of_two = run["qid"].isin([NOT_RELEVANT, UNJUDGED])
    with pytest.raises(ValueError, match="no positives: no document of the 1 training queries that they judge"):
        make_groups(run[of_two], judged)


@pytest.mark.parametrize("check", [make_groups, check_validation])
def test_two_judgements_that_disagree_are_named(check):
    """The last one counts; where that leaves no positive, there is a label of 1 and the error must not deny it."""
    twice = pd.concat([JUDGED, JUDGED.assign(label=0)], ignore_index=True)
    with pytest.raises(ValueError, match="judge") as error:
        check(RUN, twice)
    told = str(error.value)
    assert repr(str(UNJUDGED)) in told  # the first query
    assert "'d0'" in told
    assert "labels 1 and 0" in told
    assert "no document" not in told


def test_ids_match_whatever_their_type():
    numbered = RUN.assign(qid=RUN.groupby("qid", sort=False).ngroup())
    judged = qrels(*[(str(number), "d0", 1) for number in range(6)])
    assert check_validation(numbered, judged) == check_validation(numbered, judged.astype({"qid": int}))
    assert check_validation(numbered, judged).used == 6
    with pytest.raises(ValueError, match=r"have 0, 1, 2 \(int64\), the qrels 0\.0, 1\.0, 2\.0 \(float64\)"):
        check_validation(numbered, judged.astype({"qid": float}))


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
    """Where each candidate is drawn, and a text that is drawn twice counts once."""
    recipe = TrainingArgs(sampling="pointwise", loss="pointwise_bce", epochs=2)
    run = RUN.assign(query=RUN["query"] + " the old")
    model = make(name, training=recipe, **changes).fit(run, JUDGED)
    read = model.coverage
    model(run)
    assert read == model.coverage
    assert read.documents >= run["text"].nunique()
    assert read.tokens_computed >= read.tokens_encoded > read.tokens_read
    assert read.dtype == "float32"


def test_coverage_of_a_layout_that_query_and_text_share():
    recipe = TrainingArgs(sampling="pointwise", loss="pointwise_bce")
    long = "cat dog bird " * 60
    run = RUN.assign(query=[long if qid == USED[0] else "cat" for qid in RUN["qid"]], text=RUN["text"] + long)
    model = make("FirstP", training=recipe, layout="shared", window_size=None)
    read = model.fit(run, JUDGED).coverage
    assert read.queries_cut == 1
    model(run)
    assert read == model.coverage


def test_coverage_of_what_is_drawn_since_a_kill(cross_encoder, tmp_path):
    recipe = TrainingArgs(queries_per_step=1, max_steps=4, checkpoint=tmp_path, save_steps=1)
    with optimizer_steps(stop_at=3):
        (stopped := make("MaxP", cross_encoder, training=recipe)).fit(RUN, JUDGED)
    assert (stopped.coverage.queries, stopped.coverage.documents) == (3, 6)
    assert stopped.trained_on.used == 6
    resumed = make("MaxP", cross_encoder, training=recipe)
    assert (resumed.fit(RUN, JUDGED).coverage.queries, resumed.coverage.documents) == (2, 4)
    assert resumed.fit(RUN, JUDGED).coverage == Coverage()


def test_text_that_is_not_read_is_warned_of_once(cross_encoder):
    model = make("FirstP", cross_encoder, training=RECIPE, max_doc_len=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(RUN, JUDGED)
        model(RUN)
    (said,) = [str(warning.message) for warning in caught if "did not read" in str(warning.message)]
    assert " in fit did not read " in said
    assert said.endswith("cut by max_doc_len=5 (see .coverage).")
