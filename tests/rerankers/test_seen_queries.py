"""A model warns if it scores queries that it was trained on."""

from __future__ import annotations

import pickle
import re

import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import fit_on_best_segments, k_fold_fit

from ..support.systems import QUIET, make, told_of
from ..support.toy import optimizer_steps, toy_task

pytestmark = QUIET
TASK, LABELS = toy_task(0, queries=6)
QIDS = TASK["qid"].unique().tolist()
FOLDS = [QIDS[:2], QIDS[2:4], QIDS[4:]]


def of(*folds):
    return TASK[TASK["qid"].isin([qid for fold in folds for qid in FOLDS[fold]])]


def untrained(**arguments):
    return make("MaxP", training=ld.TrainingArgs(max_steps=1, metric="RR"), **arguments)


def seen(what) -> list[int]:
    """The numbers in the warnings."""
    return [int(re.search(r"\d+", message)[0]) for message in told_of(ld.SeenQueriesWarning, what)]


def best(**options):
    return fit_on_best_segments(untrained, of(0), LABELS, of(0), LABELS, **options).model


def saved(model, folder):
    model.save(folder)
    return folder


WAYS = {
    "fit": lambda model, folder: model,
    "fit again": lambda model, folder: model.fit(of(1), LABELS),
    "copy": lambda model, folder: model.apply_attributes(batch_size=2),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "start_from": lambda model, folder: untrained().start_from(model),
    "save and load": lambda model, folder: ld.MaxP.load(saved(model, folder)),
    "artifact": lambda model, folder: pt.Artifact.load(saved(model, folder)),
    "PairScorer": lambda model, folder: ld.MaxP(ld.PairScorer(pt.Transformer.identity() >> model)),
    "BeST": lambda model, folder: best(iterations=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_queries_of_the_training_cause_one_warning(way, tmp_path):
    model = WAYS[way](untrained().fit(of(0), LABELS), tmp_path / "model")
    assert seen(lambda: model(TASK.assign(qid="of another collection"))) == [4 if way == "fit again" else 2]
    assert seen(lambda: model(TASK)) == []


def test_other_queries_cause_no_warning():
    model = untrained().fit(of(0), LABELS)
    assert seen(lambda: model(of(1, 2))) == []
    assert seen(lambda: model(of(0).assign(query="dogs"))) == []  # of another collection with the same qids
    assert seen(lambda: model(TASK)) == [2]


def test_training_itself_causes_no_warning():
    model = untrained()
    assert seen(lambda: model.fit(of(0), LABELS, of(0), LABELS)) == []
    assert seen(lambda: best(iterations=2)) == []
    folds = []
    assert seen(lambda: folds.append(k_fold_fit(untrained(), TASK, LABELS, FOLDS))) == []
    assert seen(lambda: folds[0](TASK)) == []
    assert seen(lambda: folds[0].models[0](TASK)) == [4]
    assert seen(lambda: model(TASK)) == [2]


def test_a_training_that_fails_before_its_first_step_leaves_no_queries():
    model = untrained()
    with optimizer_steps(stop_at=1):
        model.fit(of(0), LABELS)
    assert seen(lambda: model(TASK)) == []


def test_an_experiment_shows_the_warning_once():
    model, topics = untrained().fit(of(0), LABELS), TASK[["qid", "query"]].drop_duplicates()
    first = pt.Transformer.from_df(TASK)
    systems = [first >> model, first >> model % 2]
    assert seen(lambda: pt.Experiment(systems, topics, LABELS, ["map"])) == [2]


def test_an_audit_causes_no_warning():
    model = untrained().fit(of(0), LABELS)
    assert seen(lambda: ld.audit(model, query=of(0)["query"].iloc[0], lengths=[20])) == []
