"""Cross-validated training, and training with several seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from pyterrier_longdoc.training.seeds import SeedModels

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import TrainingArgs, fit_seeds, k_fold_fit

from ..support.systems import make
from ..training.test_training import toy_task

RUN, QRELS = toy_task(0, queries=6)
QIDS = list(dict.fromkeys(RUN["qid"]))
FOLDS = [QIDS[:2], QIDS[2:4], QIDS[4:]]
COLUMNS = ["qid", "query", "docno", "score", "rank"]
RECIPE = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-3}, metric="RR", save_steps=1)


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
        for qrels in (qrels_tr, qrels_va):
            if qrels is not None:
                self.relevant |= set(zip(qrels["qid"], qrels["docno"], strict=True))
        return self

    def transform(self, inp):
        known = [float(key in self.relevant) for key in zip(inp["qid"], inp["docno"], strict=True)]
        return pt.model.add_ranks(inp.assign(score=known))

    def qids(self, part):
        return set() if self.data[part] is None else set(self.data[part]["qid"])


# Folds.


@pytest.mark.parametrize("validation", [None, "next fold", 0.3])
def test_nothing_of_a_fold_is_seen_by_its_model(validation):
    folds = k_fold_fit(Memory, RUN, QRELS, FOLDS, validation=validation)
    assert (folds.run["score"] == 0).all()
    for number, (model, own) in enumerate(zip(folds.models, FOLDS, strict=True)):
        train, held_out = model.qids(0), model.qids(2)
        assert train | held_out == set(QIDS) - set(own)
        assert not train & held_out
        assert (model.qids(1), model.qids(3)) == (train, held_out)
        assert len(held_out) == {None: 0, "next fold": 2, 0.3: 1}[validation]
        if validation == "next fold":
            assert held_out == set(FOLDS[(number + 1) % 3])
    # The same model would have told: every judged document of the other folds is known to it.
    others = RUN[~RUN["qid"].isin(FOLDS[0])]
    assert folds.models[0](others)["score"].sum() == 4


def test_share_for_validation_depends_on_the_seed():
    chosen = [
        [model.qids(2) for model in k_fold_fit(Memory, RUN, QRELS, FOLDS, validation=0.3, seed=seed).models]
        for seed in (0, 0, 1, 2, 3)
    ]
    assert chosen[0] == chosen[1]
    assert any(other != chosen[0] for other in chosen[2:])


def test_each_model_is_the_one_trained_on_the_other_folds(maxp):
    before = maxp(RUN)["score"].tolist()
    folds = k_fold_fit(maxp, RUN, QRELS, FOLDS)
    assert maxp(RUN)["score"].tolist() == before
    for own, model in zip(FOLDS, folds.models, strict=True):
        rest, test = RUN[~RUN["qid"].isin(own)], RUN[RUN["qid"].isin(own)]
        by_hand = maxp.apply_attributes().fit(rest, QRELS[~QRELS["qid"].isin(own)])
        assert folds.run[folds.run["qid"].isin(own)]["score"].tolist() == by_hand(test)["score"].tolist()
        assert model(test)["score"].tolist() == by_hand(test)["score"].tolist()
    assert folds.run["score"].tolist() != before
    assert folds.run[["qid", "docno"]].equals(RUN[["qid", "docno"]])
    assert list(folds.run) == COLUMNS
    assert folds.history["fold"].tolist() == [0, 1, 2]


def test_transformer_keeps_rows_and_order(whole):
    folds = whole
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
    with pytest.raises(ValueError, match=r"queries 'other' \(1 in all\): they are in no fold"):
        folds(RUN.head(1).assign(qid="other"))
    with pytest.raises(pt.validate.InputValidationError, match="qid"):
        folds(RUN.drop(columns="qid"))


def test_in_a_pipeline_and_an_experiment(whole):
    folds, retrieve = whole, pt.Transformer.from_df(RUN)
    topics = RUN[["qid", "query"]].drop_duplicates()
    table = pt.Experiment({"folds": retrieve >> folds, "run": folds.run}, topics, QRELS, ["map"], plan="tree")
    assert table["map"].nunique() == 1
    assert "FoldModels(3 x MaxP(" in repr(folds)


def test_integer_qids(maxp):
    numbers = {qid: number for number, qid in enumerate(QIDS)}
    run, qrels = (frame.assign(qid=frame["qid"].map(numbers)) for frame in (RUN, QRELS))
    folds = k_fold_fit(maxp, run, qrels, [[0, 1], [2, 3], [4, 5]])
    of_strings = [frame.astype({"qid": str}) for frame in (run, qrels)]
    pd.testing.assert_frame_equal(folds.run, k_fold_fit(maxp, *of_strings, [["0", "1"], "23", "45"]).run)
    assert folds(run)["score"].tolist() == folds.run["score"].tolist()


def interrupt_in_step(monkeypatch, number: int, counts: list[int]) -> None:
    """Every `fit` counts its steps, the one of that number over all is interrupted."""
    from pyterrier_longdoc.rerankers import base

    train = base.train

    def counted(*arguments, on_step, **options):
        counts.append(0)

        def step():
            counts[-1] += 1
            on_step()
            if sum(counts) == number:
                raise KeyboardInterrupt

        return train(*arguments, on_step=step, **options)

    monkeypatch.setattr(base, "train", counted)


def test_interrupted_and_resumed(maxp, whole, tmp_path, monkeypatch):
    counts: list[int] = []
    steps = 4
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, steps + 2, counts)
        with pytest.raises(KeyboardInterrupt):
            k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    assert counts == [steps, 2]
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, -1, again := [])
        resumed = k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    # The first fold is read; the second goes on after the step that was saved last (restoring counts as one call).
    assert len(again) == 2
    assert again[0] < steps + 1
    assert again[1] == steps
    pd.testing.assert_frame_equal(resumed.run, whole.run)
    pd.testing.assert_frame_equal(resumed(RUN), whole(RUN))
    assert [len(model.history) for model in resumed.models] == [1, 1, 1]
    # Finished: nothing is trained, nothing is scored.
    with monkeypatch.context() as patch:
        patch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained again"))
        patch.setattr(ld.MaxP, "transform", lambda *_: pytest.fail("scored again"))
        kept = k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    pd.testing.assert_frame_equal(kept.run, whole.run)
    assert sorted(path.name for path in (tmp_path / "fold-1").iterdir()) == [
        "finished.json", "model", "run.res.gz", "scored.json",
    ]  # fmt: skip


def test_other_candidates_are_scored_anew(maxp, tmp_path):
    k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    longer = pd.concat([RUN, RUN[RUN["qid"] == QIDS[0]].assign(docno="new", text="cat")], ignore_index=True)
    notes = tmp_path / "fold-0" / "finished.json"
    before = notes.read_bytes()
    with pytest.raises(ValueError, match=r"fold-1.*another training: not the same are its training data"):
        k_fold_fit(maxp, longer, QRELS, FOLDS, folder=tmp_path)
    assert notes.read_bytes() == before
    # The candidates of fold 0 are no training data of its model: that was kept, and its run made anew.
    run = pd.read_csv(tmp_path / "fold-0" / "run.res.gz", sep=" ", header=None)
    assert "new" in run[2].tolist()


def test_folder_of_another_model(cross_encoder, maxp, tmp_path):
    k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    for changes, message in (
        ({"seed": 1}, "arguments"),
        ({"training": TrainingArgs(epochs=2)}, r"recipe \(epochs, .*learning_rates"),
    ):
        other = make("MaxP", cross_encoder, **{"training": RECIPE, **changes})
        with pytest.raises(ValueError, match=f"fold-0.*another training: not the same are its {message}"):
            k_fold_fit(other, RUN, QRELS, FOLDS, folder=tmp_path)
    # What changes nothing in weights and scores may change.
    other = make("MaxP", Path(cross_encoder), training=RECIPE, device="cpu", batch_size=7)
    models = k_fold_fit(other, RUN, QRELS, FOLDS, folder=tmp_path).models
    assert [model.batch_size for model in models] == [7, 7, 7]


def test_folder_of_models_with_another_start(cross_encoder, maxp, whole, tmp_path):
    started = make("MaxP", cross_encoder, training=RECIPE).fit(RUN, QRELS)
    first = k_fold_fit(started, RUN, QRELS, FOLDS, folder=tmp_path)
    assert first.run["score"].tolist() != whole.run["score"].tolist()
    pd.testing.assert_frame_equal(k_fold_fit(started, RUN, QRELS, FOLDS, folder=tmp_path).run, first.run)
    with pytest.raises(ValueError, match="starting weights"):
        k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)


def test_an_unfinished_model_is_not_finished_as_another(cross_encoder, tmp_path, monkeypatch):
    interrupt_in_step(monkeypatch, 2, [])
    with pytest.raises(KeyboardInterrupt):
        k_fold_fit(make("MaxP", cross_encoder, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path)
    other = make("MaxP", cross_encoder, training=RECIPE, max_doc_len=5)
    with pytest.raises(ValueError, match=r"not the same are its arguments \(max_doc_len\)"):
        k_fold_fit(other, RUN, QRELS, FOLDS, folder=tmp_path)


@pytest.mark.parametrize("kept", [False, True])
def test_a_checkpoint_folder_is_for_one_training(kept, cross_encoder, tmp_path):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, checkpoint=tmp_path / "state"))
    with pytest.raises(ValueError, match=r"TrainingArgs\(checkpoint=...\) is for one training.*folder="):
        k_fold_fit(model, RUN, QRELS, FOLDS, folder=tmp_path / "folds" if kept else None)


NO_FIT = pt.Transformer.identity()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"folds": FOLDS[:2]}, ValueError, f"2 are in no fold, e.g. {QIDS[4]!r}, {QIDS[5]!r}"),
        ({"folds": [*FOLDS, QIDS[:1]]}, ValueError, "1 are in more than one fold"),
        ({"folds": [QIDS]}, ValueError, "at least two folds"),
        ({"folds": [*FOLDS, ["x"]]}, ValueError, r"folds 3 \(counted from 0\) have none of the queries"),
        ({"validation": 1.0}, ValueError, "validation=1.0 must be 'next fold', a share"),
        ({"validation": True}, ValueError, "validation=True must be"),
        ({"validation": "next fold", "folds": [QIDS[:3], QIDS[3:]]}, ValueError, "needs at least three folds"),
        ({"validation": 0.9}, ValueError, "leaves none of the 4 judged queries"),
        ({"qrels": QRELS.drop(columns="label")}, ValueError, "label"),
        ({"run": RUN.drop(columns="query")}, ValueError, "candidates lack the column.* query"),
        ({"model": lambda: NO_FIT}, TypeError, "has no fit"),
        ({"model": NO_FIT}, TypeError, "give a function that makes a new one"),
        ({"model": "MaxP"}, TypeError, "neither a model nor a function"),
        ({"model": Memory, "folder": "unused"}, TypeError, "leave folder= out"),
    ],
)
def test_bad_input(changes, error, message):
    arguments = {"model": Memory, "run": RUN, "qrels": QRELS, "folds": FOLDS, **changes}
    with pytest.raises(error, match=message):
        k_fold_fit(**arguments)


def test_one_model_for_all_folds_is_refused():
    one = Memory()
    with pytest.raises(ValueError, match="must make a new model at each call"):
        k_fold_fit(lambda: one, RUN, QRELS, FOLDS)


def test_validation_chooses_the_weights(cross_encoder):
    args = TrainingArgs(epochs=3, queries_per_step=1, learning_rates={"": 1e-2}, metric="RR")
    folds = k_fold_fit(make("MaxP", cross_encoder, training=args), RUN, QRELS, FOLDS, validation="next fold")
    assert folds.history["validation"].notna().all()
    assert folds.history.groupby("fold").size().tolist() == [3, 3, 3]


# Seeds.


def test_seeds_reproduce(plain_encoder, tmp_path, monkeypatch):
    model = make("PARADE-transformer", plain_encoder, training=RECIPE)
    whole = fit_seeds(model, [0, 1], RUN, QRELS)
    again = fit_seeds(
        lambda seed: make("PARADE-transformer", plain_encoder, training=RECIPE, seed=seed), (0, 1), RUN, QRELS
    )
    scores = {seed: whole[seed](RUN)["score"].tolist() for seed in whole}
    assert list(whole) == [0, 1]
    assert scores[0] != scores[1]
    assert {seed: again[seed](RUN)["score"].tolist() for seed in again} == scores
    assert [(m.seed, m.training.seed) for m in whole.values()] == [(0, 0), (1, 1)]
    assert model.seed == 42
    interrupt_in_step(monkeypatch, 7, counts := [])
    with pytest.raises(KeyboardInterrupt):
        fit_seeds(model, [0, 1], RUN, QRELS, folder=tmp_path)
    resumed = fit_seeds(model, [0, 1], RUN, QRELS, folder=tmp_path)
    assert len(counts) == 3
    assert {seed: resumed[seed](RUN)["score"].tolist() for seed in resumed} == scores


def test_means_over_seeds(maxp):
    models = fit_seeds(maxp, [3, 4], RUN, QRELS, RUN, QRELS)
    results = models.evaluate(RUN, QRELS, ["RR", "AP"], name="MaxP")
    by_hand = [
        pt.Experiment([m(RUN)], RUN[["qid", "query"]].drop_duplicates(), QRELS, ["map"], perquery=True)
        for m in models.values()
    ]
    expected = pd.concat(by_hand).groupby("qid")["value"].mean()
    own = results.perquery.query("measure == 'AP'").set_index("qid")["value"]
    np.testing.assert_allclose(own.loc[expected.index], expected)
    assert results.seeds == {"MaxP": [3, 4]}
    # The same by the experiment, behind a first stage.
    retrieve = pt.Transformer.from_df(RUN)
    topics = RUN[["qid", "query"]].drop_duplicates()
    systems = {"first": retrieve, "MaxP": models.behind(retrieve)}
    with pytest.warns(ld.ExperimentWarning):
        compared = ld.Experiment(systems, topics, QRELS, ["AP"], seeds=[3, 4], baselines=["first"])
    assert compared.means.loc["MaxP", "AP"] == pytest.approx(results.means.loc["MaxP", "AP"])


def test_a_trained_model_keeps_its_start(maxp):
    maxp.fit(RUN, QRELS)
    models = fit_seeds(maxp, [0, 1], RUN, QRELS)
    assert [model.training.seed for model in models.values()] == [0, 1]
    assert models[0](RUN)["score"].tolist() != models[1](RUN)["score"].tolist()
    assert len(maxp.history) == 1


@pytest.mark.parametrize(
    ("model", "seeds", "error", "message"),
    [
        (Memory, [], ValueError, "must be a list of whole numbers"),
        (Memory, [0, 0], ValueError, "a seed twice"),
        (Memory, [0.5], ValueError, "whole numbers"),
        (NO_FIT, [0], TypeError, "give a function"),
        (lambda seed: NO_FIT, [0], TypeError, "has no fit"),
    ],
)
def test_bad_seeds(model, seeds, error, message):
    with pytest.raises(error, match=message):
        fit_seeds(model, seeds, RUN, QRELS)


def test_one_model_for_all_seeds_is_refused():
    one = Memory()
    with pytest.raises(ValueError, match="must make a new model"):
        fit_seeds(lambda seed: one, [0, 1], RUN, QRELS)
    assert repr(SeedModels({0: "model"})) == "SeedModels({0: 'model'})"


def test_names_need_no_torch():
    code = "import sys, pyterrier_longdoc as ld; dir(ld); print('torch' in sys.modules, 'k_fold_fit' in dir(ld))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]


def test_kept_notes_are_json(maxp, tmp_path):
    fit_seeds(maxp, [5], RUN, QRELS, folder=tmp_path)
    notes = json.loads((tmp_path / "seed-5" / "finished.json").read_text())
    assert notes["class"] == "MaxP"
    assert notes["recipe"]["seed"] == 5
    assert notes["starting weights"] is None
