"""The same training on several runs in turn, and for each fold."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import (
    ContinuedTrainingWarning,
    TrainingArgs,
    fit_in_turn,
    k_fold_fit,
    recipes,
)

from ..support.own import EDITED
from ..support.systems import make
from ..support.toy import optimizer_steps, qrels, toy_task

RUN, QRELS = toy_task(0, queries=6)
QIDS = list(dict.fromkeys(RUN["qid"]))
FOLDS = [QIDS[:2], QIDS[2:4], QIDS[4:]]
RECIPE = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-3}, metric="RR", save_steps=1)
STEPS = 4  # of a fold


@pytest.fixture
def maxp(cross_encoder):
    return make("MaxP", cross_encoder, training=RECIPE)


@pytest.fixture(scope="module")
def whole(cross_encoder, tmp_path_factory):
    """All folds in one go, and their folder, which is copied by tests that write to it."""
    folder = tmp_path_factory.mktemp("folds")
    return k_fold_fit(make("MaxP", cross_encoder, training=RECIPE), RUN, QRELS, FOLDS, folder=folder), folder


class Memory(pt.Estimator):
    """Scores 1 what it has seen to be relevant."""

    def __init__(self):
        self.relevant, self.data = set(), None

    def fit(self, topics_or_res_tr, qrels_tr, topics_or_res_va=None, qrels_va=None):
        self.data = [topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va]
        for judged in (qrels_tr, qrels_va):
            if judged is not None:
                self.relevant |= set(zip(judged["qid"], judged["docno"], strict=True))
        return self

    def transform(self, inp):
        known = [float(key in self.relevant) for key in zip(inp["qid"], inp["docno"], strict=True)]
        return pt.model.add_ranks(inp.assign(score=known))

    def qids(self, part):
        return set() if self.data[part] is None else set(self.data[part]["qid"])


class Dropping(Memory):
    def transform(self, inp):
        return super().transform(inp).head(1)


ONE = Memory()


def test_a_second_fit_warns_that_it_continues(maxp):
    def said(fit):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit()
        own = [warning for warning in caught if issubclass(warning.category, ContinuedTrainingWarning)]
        assert {warning.filename for warning in own} <= {__file__}
        return [str(warning.message) for warning in own]

    assert said(lambda: maxp.fit(RUN, QRELS)) == []
    [message] = said(lambda: maxp.fit(RUN, QRELS))
    assert message.startswith("this MaxP is already trained")
    started = maxp.apply_attributes().start_from(maxp)
    assert [len(said(lambda: started.fit(RUN, QRELS))) for _ in range(2)] == [0, 1]
    assert said(lambda: fit_in_turn(maxp, [RUN, RUN], QRELS, training=[RECIPE, RECIPE])) == []
    assert said(lambda: k_fold_fit(maxp, RUN, QRELS, FOLDS)) == []


# Runs.


class Recorder:
    """Stands for a reranker."""

    def __init__(self):
        self.training, self.calls = "before", []

    def fit(self, *data):
        self.calls.append((self.training, *data))


def test_fit_in_turn_trains_on_several_runs_with_their_recipes(tmp_path):
    model, judged = Recorder(), qrels(("1", "d1", 1))
    assert fit_in_turn(model, ["a", "b", "c"], judged, training=recipes("leaderboard", checkpoint=tmp_path)) is model
    assert [call[1] for call in model.calls] == ["a", "b", "c"]
    assert [call[0].schedule for call in model.calls] == ["constant", "constant", "one_cycle"]
    assert [call[0].checkpoint for call in model.calls] == [tmp_path / f"round-{i}" for i in (1, 2, 3)]
    assert model.training == "before"


# Folds.


@pytest.mark.parametrize("validation", [None, "next fold"])
def test_the_model_of_a_fold_is_not_trained_on_its_queries(validation):
    folds = k_fold_fit(Memory, RUN, QRELS, FOLDS, validation=validation)
    assert (folds.run["score"] == 0).all()
    for number, (model, own) in enumerate(zip(folds.models, FOLDS, strict=True)):
        train, held_out = model.qids(0), model.qids(2)
        assert train | held_out == set(QIDS) - set(own)
        assert not train & held_out
        assert (model.qids(1), model.qids(3)) == (train, held_out)
        assert len(held_out) == {None: 0, "next fold": 2}[validation]
        if validation == "next fold":
            assert held_out == set(FOLDS[(number + 1) % 3])
    # The same model would have told: every judged document of the other folds is known to it.
    others = RUN[~RUN["qid"].isin(FOLDS[0])]
    assert folds.models[0](others)["score"].sum() == 4


def test_each_model_equals_one_trained_on_the_other_folds(maxp, whole):
    folds, _ = whole
    for own, model in list(zip(FOLDS, folds.models, strict=True))[:2]:
        rest, test = RUN[~RUN["qid"].isin(own)], RUN[RUN["qid"].isin(own)]
        by_hand = maxp.apply_attributes().fit(rest, QRELS[~QRELS["qid"].isin(own)])
        assert folds.run[folds.run["qid"].isin(own)]["score"].tolist() == by_hand(test)["score"].tolist()
        assert model(test)["score"].tolist() == by_hand(test)["score"].tolist()
    assert folds.run[["qid", "docno"]].equals(RUN[["qid", "docno"]])
    assert list(folds.run) == ["qid", "query", "docno", "score", "rank"]
    assert folds.history["fold"].tolist() == [0, 1, 2]


def test_training_run_replaces_the_candidates_for_training():
    more = pd.concat([RUN.head(1).assign(docno=["new"]), RUN, RUN.tail(1).assign(qid="silent")], ignore_index=True)
    folds = k_fold_fit(
        Memory, RUN, QRELS, [*FOLDS[:2], [*FOLDS[2], "silent"]], training_run=more, validation="next fold"
    )
    for number, model in enumerate(folds.models):
        run, _, validation, _ = model.data
        assert "new" not in set(validation["docno"])
        assert ("new" in set(run["docno"])) == (QIDS[0] in set(run["qid"])) == (number == 1)
        assert ("silent" in set(run["qid"])) == (number == 0)
    assert folds.run[["qid", "docno"]].equals(RUN[["qid", "docno"]])
    with pytest.raises(ValueError, match="'silent'"):
        k_fold_fit(Memory, RUN, QRELS, FOLDS, training_run=more)


def test_folds_as_a_transformer_keep_rows_and_order(whole):
    folds, _ = whole
    mixed = RUN.sample(frac=1.0, random_state=0).assign(extra=1)
    mixed.index = [7] * len(mixed)
    copy = mixed.copy()
    out = folds(mixed)
    pd.testing.assert_frame_equal(mixed, copy)
    pd.testing.assert_frame_equal(out.drop(columns=["score", "rank"]), mixed.drop(columns="score"))
    # `rank` of equal rows is that of the whole.
    expected = folds.run.set_index(["qid", "docno"]).loc[list(zip(mixed["qid"], mixed["docno"], strict=True))]
    assert out[["score", "rank"]].to_numpy().tolist() == expected[["score", "rank"]].to_numpy().tolist()
    assert set(folds(mixed.head(0)).columns) == set(out.columns)
    assert len(folds(RUN[RUN["qid"] == QIDS[0]])) == 4
    with pytest.raises(ValueError, match="'other'"):
        folds(RUN.head(1).assign(qid="other"))


def test_an_interrupted_k_fold_fit_continues_with_the_same_results(maxp, whole, tmp_path, monkeypatch):
    before = maxp(RUN)["score"].tolist()
    with optimizer_steps(stop_at=STEPS + 3):
        k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    with optimizer_steps() as steps:
        resumed = k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    # The first fold is read; the second goes on after the step that was saved last.
    assert len(steps) == 3 * STEPS - (STEPS + 2)
    assert maxp(RUN)["score"].tolist() == before
    pd.testing.assert_frame_equal(resumed.run, whole[0].run)
    pd.testing.assert_frame_equal(resumed(RUN), whole[0](RUN))
    assert [len(model.history) for model in resumed.models] == [1, 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained again"))
        again = k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    pd.testing.assert_frame_equal(again.run, resumed.run)


def test_models_of_an_edited_class_are_refused(cross_encoder, tmp_path):
    make_edited, _ = EDITED["head"]
    for _ in range(2):
        k_fold_fit(make_edited(1, cross_encoder, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path)
    with pytest.raises(ValueError, match="fold-0"):
        k_fold_fit(make_edited(-1, cross_encoder, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path)


def test_other_training_data_is_refused_and_keeps_finished_models(maxp, whole, tmp_path):
    folder = shutil.copytree(whole[1], tmp_path / "folds")
    longer = pd.concat([RUN, RUN[RUN["qid"] == QIDS[0]].assign(docno="new", text="cat")], ignore_index=True)
    notes = folder / "fold-0" / "finished.json"
    before = notes.read_bytes()
    # The new candidate is of fold 0, on which the other models are trained.
    with pytest.raises(ValueError, match="fold-1"):
        k_fold_fit(maxp, longer, QRELS, FOLDS, folder=folder)
    assert notes.read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"training": TrainingArgs(epochs=2)}, {"preselect": ld.FirstK(1)}, {"trained": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_folder_of_other_models_is_refused(changes, cross_encoder, whole):
    changes = {"training": RECIPE, **changes}
    fits = changes.pop("trained", False)
    other = make("MaxP", cross_encoder, **changes)
    with pytest.raises(ValueError, match=r"fold-0.*another training"):
        k_fold_fit(other.fit(RUN, QRELS) if fits else other, RUN, QRELS, FOLDS, folder=whole[1])
    # What changes no weights may change.
    other = make("MaxP", Path(cross_encoder), training=RECIPE, device="cpu", batch_size=7)
    models = k_fold_fit(other, RUN, QRELS, FOLDS, folder=whole[1]).models
    assert [model.batch_size for model in models] == [7, 7, 7]


def test_models_that_cannot_be_saved_in_a_folder_are_refused(cross_encoder, tmp_path):
    with pytest.raises(ValueError, match="folder="):
        k_fold_fit(make("MaxP", cross_encoder, trust_remote_code=True), RUN, QRELS, FOLDS, folder=tmp_path)
    with pytest.raises(ValueError, match="checkpoint"):
        k_fold_fit(make("MaxP", cross_encoder, training=replace(RECIPE, checkpoint=tmp_path)), RUN, QRELS, FOLDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"folds": FOLDS[:2]}, QIDS[4]),
        ({"folds": [*FOLDS, QIDS[:1]]}, QIDS[0]),
        ({"validation": 0.1}, r"validation=0\.1"),
        ({"run": RUN.drop(columns="query")}, "query"),
        ({"model": lambda: ONE}, "twice"),
        ({"model": Dropping}, "must return the same rows"),
        ({"model": Memory, "folder": "unused"}, "folder="),
    ],
)
def test_wrong_input_is_refused_by_name(changes, named):
    arguments = {"model": Memory, "run": RUN, "qrels": QRELS, "folds": FOLDS, **changes}
    with pytest.raises(ValueError, match=named):
        k_fold_fit(**arguments)
