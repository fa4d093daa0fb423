"""The same training for each fold."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.training import ContinuedTrainingWarning, TrainingArgs, k_fold_fit

from ..support.systems import make, told_of
from ..support.toy import optimizer_steps, toy_task

RUN, QRELS = toy_task(0, queries=6)
QIDS = list(dict.fromkeys(RUN["qid"]))
FOLDS = [QIDS[:2], QIDS[2:4], QIDS[4:]]
RECIPE = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-3}, metric="RR", save_steps=1)
STEPS = 4  # of a fold


@pytest.fixture
def maxp(cross_encoder):
    return make("MaxP", cross_encoder, training=RECIPE)


@pytest.fixture(scope="module")
def whole(cross_encoder):
    """All folds in one go."""
    return k_fold_fit(make("MaxP", cross_encoder, training=RECIPE), RUN, QRELS, FOLDS)


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
    for own, model in list(zip(FOLDS, whole.models, strict=True))[:2]:
        rest, test = RUN[~RUN["qid"].isin(own)], RUN[RUN["qid"].isin(own)]
        by_hand = maxp.apply_attributes().fit(rest, QRELS[~QRELS["qid"].isin(own)])
        assert whole.run[whole.run["qid"].isin(own)]["score"].tolist() == by_hand(test)["score"].tolist()
        assert model(test)["score"].tolist() == by_hand(test)["score"].tolist()
    assert whole.run[["qid", "docno"]].equals(RUN[["qid", "docno"]])
    assert list(whole.run) == ["qid", "query", "docno", "score", "rank"]
    assert whole.history["fold"].tolist() == [0, 1, 2]


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
    mixed = RUN.sample(frac=1.0, random_state=0).assign(extra=1)
    mixed.index = [7] * len(mixed)
    copy = mixed.copy()
    out = whole(mixed)
    pd.testing.assert_frame_equal(mixed, copy)
    pd.testing.assert_frame_equal(out.drop(columns=["score", "rank"]), mixed.drop(columns="score"))
    # `rank` of equal rows is that of the whole.
    expected = whole.run.set_index(["qid", "docno"]).loc[list(zip(mixed["qid"], mixed["docno"], strict=True))]
    assert out[["score", "rank"]].to_numpy().tolist() == expected[["score", "rank"]].to_numpy().tolist()
    assert set(whole(mixed.head(0)).columns) == set(out.columns)
    assert len(whole(RUN[RUN["qid"] == QIDS[0]])) == 4
    with pytest.raises(ValueError, match="'other'"):
        whole(RUN.head(1).assign(qid="other"))


def test_interrupted_folds_continue_with_the_same_results(cross_encoder, whole, tmp_path):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, checkpoint=tmp_path))
    before = model(RUN)["score"].tolist()
    with optimizer_steps(stop_at=STEPS + 3):
        k_fold_fit(model, RUN, QRELS, FOLDS)
    for steps_to_do in (3 * STEPS - (STEPS + 2), 0):  # after the step that was saved last; of finished folds
        with optimizer_steps() as steps:
            resumed = k_fold_fit(model, RUN, QRELS, FOLDS)
        assert len(steps) == steps_to_do
        pd.testing.assert_frame_equal(resumed.run, whole.run)
        pd.testing.assert_frame_equal(resumed(RUN), whole(RUN))
        assert [len(fold.history) for fold in resumed.models] == [1, 1, 1]
    assert [fold.training.checkpoint for fold in resumed.models] == [tmp_path / f"fold-{i}" for i in range(3)]
    assert model.training.checkpoint == tmp_path
    assert model(RUN)["score"].tolist() == before


def test_other_training_data_is_refused(cross_encoder, tmp_path):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, checkpoint=tmp_path))
    k_fold_fit(model, RUN, QRELS, FOLDS)
    longer = pd.concat([RUN, RUN[RUN["qid"] == QIDS[0]].assign(docno="new", text="cat")], ignore_index=True)
    # The new candidate is of fold 0, on which the other models are trained.
    with pytest.raises(ValueError, match="fold-1"):
        k_fold_fit(model, longer, QRELS, FOLDS)


def test_folds_of_a_trained_model_continue_from_its_weights_without_a_warning(maxp):
    maxp.fit(RUN, QRELS)
    folds = []
    assert told_of(ContinuedTrainingWarning, lambda: folds.append(k_fold_fit(maxp, RUN, QRELS, FOLDS))) == []
    assert [fold.history["epoch"].tolist() for fold in folds[0].models] == [[1, 2]] * 3


def test_wrong_input_is_refused_by_name():
    for changes, named in [
        ({"folds": FOLDS[:2]}, QIDS[4]),
        ({"folds": [*FOLDS, QIDS[:1]]}, QIDS[0]),
        ({"validation": 0.1}, r"validation=0\.1"),
        ({"run": RUN.drop(columns="query")}, "query"),
        ({"model": lambda: ONE}, "twice"),
        ({"model": Dropping}, "must return the same rows"),
    ]:
        arguments = {"model": Memory, "run": RUN, "qrels": QRELS, "folds": FOLDS, **changes}
        with pytest.raises(ValueError, match=named):
            k_fold_fit(**arguments)
