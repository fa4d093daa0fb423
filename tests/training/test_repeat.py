"""The same training on several runs in turn, for each fold, and with several seeds."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import (
    ContinuedTrainingWarning,
    FoldModels,
    SeedModels,
    TrainingArgs,
    fit_in_turn,
    fit_seeds,
    k_fold_fit,
    recipes,
)

from ..support.lines import shown_lines
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


NO_FIT = pt.Transformer.identity()
ONE = Memory()


def test_a_second_fit_says_that_it_goes_on(maxp, tmp_path):
    def said(fit):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit()
        own = [warning for warning in caught if issubclass(warning.category, ContinuedTrainingWarning)]
        assert {warning.filename for warning in own} <= {__file__}
        return [str(warning.message) for warning in own]

    assert said(lambda: maxp.fit(RUN, QRELS)) == []
    [message] = said(lambda: maxp.fit(RUN, QRELS))
    assert message.startswith("this MaxP is trained already: fit goes on from its weights")
    maxp.save(tmp_path / "model")
    loaded = ld.MaxP.load(tmp_path / "model")
    assert len(said(lambda: loaded.fit(RUN, QRELS))) == 1
    started = maxp.apply_attributes().start_from(loaded)
    assert [len(said(lambda: started.fit(RUN, QRELS))) for _ in range(2)] == [0, 1]
    assert said(lambda: fit_in_turn(maxp, [RUN, RUN], QRELS, training=[RECIPE, RECIPE])) == []
    assert said(lambda: k_fold_fit(maxp, RUN, QRELS, FOLDS)) == []
    maxp.training = replace(RECIPE, checkpoint=tmp_path / "state")
    with optimizer_steps(stop_at=STEPS):
        assert len(said(lambda: maxp.fit(RUN, QRELS))) == 1
    assert said(lambda: maxp.fit(RUN, QRELS)) == []  # the same training, resumed


# Runs.


class Recorder:
    """Stands for a reranker."""

    def __init__(self):
        self.training, self.calls = "before", []

    def fit(self, *data):
        self.calls.append((self.training, *data))


def test_several_runs_in_turn(tmp_path):
    model, judged = Recorder(), qrels(("1", "d1", 1))
    assert fit_in_turn(model, ["a", "b", "c"], judged, training=recipes("leaderboard", checkpoint=tmp_path)) is model
    assert [call[1] for call in model.calls] == ["a", "b", "c"]
    assert [call[0].schedule for call in model.calls] == ["constant", "constant", "one_cycle"]
    assert [call[0].checkpoint for call in model.calls] == [tmp_path / f"round-{i}" for i in (1, 2, 3)]
    assert model.training == "before"
    with pytest.raises(ValueError, match="2 candidate runs and 3 recipes"):
        fit_in_turn(model, ["a", "b"], judged, training=recipes("leaderboard"))


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


def test_each_model_is_the_one_trained_on_the_other_folds(maxp, whole):
    folds, _ = whole
    for own, model in list(zip(FOLDS, folds.models, strict=True))[:2]:
        rest, test = RUN[~RUN["qid"].isin(own)], RUN[RUN["qid"].isin(own)]
        by_hand = maxp.apply_attributes().fit(rest, QRELS[~QRELS["qid"].isin(own)])
        assert folds.run[folds.run["qid"].isin(own)]["score"].tolist() == by_hand(test)["score"].tolist()
        assert model(test)["score"].tolist() == by_hand(test)["score"].tolist()
    assert folds.run[["qid", "docno"]].equals(RUN[["qid", "docno"]])
    assert list(folds.run) == ["qid", "query", "docno", "score", "rank"]
    assert folds.history["fold"].tolist() == [0, 1, 2]


def test_candidates_to_train_on_may_be_others():
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
    with pytest.raises(ValueError, match=r"1 are in no fold, e\.g\. 'silent'"):
        k_fold_fit(Memory, RUN, QRELS, FOLDS, training_run=more)


def test_judged_documents_belong_to_a_finished_model(cross_encoder, tmp_path):
    judged = pd.concat([QRELS, qrels((QIDS[0], "missed", 1))])

    def folds(text, **changes):
        recipe, loader = replace(RECIPE, **{"judged": "all", **changes}), pt.apply.text(lambda row: text)
        model = make("MaxP", cross_encoder, training=recipe, text_loader=loader)
        with optimizer_steps() as steps:
            k_fold_fit(model, RUN, judged, FOLDS, folder=tmp_path)
        return len(steps)

    assert folds("cat") == 3 * STEPS
    assert folds("cat") == 0
    for text, changes, what in (("dog", {}, "text loader"), ("cat", {"judged": "retrieved"}, "recipe \\(judged\\)")):
        with pytest.raises(ValueError, match=f"not the same are its .*{what}"):
            folds(text, **changes)


def test_transformer_keeps_rows_and_order(whole):
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
    with pytest.raises(ValueError, match=r"queries 'other' \(1 in all\): they are in no fold"):
        folds(RUN.head(1).assign(qid="other"))
    with pytest.raises(pt.validate.InputValidationError, match="qid"):
        folds(RUN.drop(columns="qid"))
    cut = FoldModels([NO_FIT % 1] * 3, folds.folds, folds.run)
    with pytest.raises(ValueError, match="does not return the rows that it is given"):
        cut(pt.model.add_ranks(RUN))


def test_in_a_pipeline_and_an_experiment(whole):
    folds, retrieve = whole[0], pt.Transformer.from_df(RUN)
    topics = RUN[["qid", "query"]].drop_duplicates()
    table = pt.Experiment({"folds": retrieve >> folds, "run": folds.run}, topics, QRELS, ["map"], plan="tree")
    assert table["map"].nunique() == 1
    assert repr(folds) == f"FoldModels(3 folds: {folds.models[0]!r}, ...)"


def test_one_line_for_each_fold_and_seed(cross_encoder, capsys):
    model = make("MaxP", cross_encoder, training=RECIPE, verbose=True)
    k_fold_fit(model, RUN, QRELS, FOLDS, validation="next fold", verbose=True)
    assert shown_lines(capsys) == ["fold 1/3", "fold 2/3", "fold 3/3"]
    fit_seeds(model, [0, 7], RUN, QRELS, RUN, QRELS, verbose=True)
    assert shown_lines(capsys) == ["seed 0", "seed 7"]


def test_integer_qids(whole):
    numbers = {qid: number for number, qid in enumerate(QIDS)}
    run, judged = (frame.assign(qid=frame["qid"].map(numbers)) for frame in (RUN, QRELS))
    folds = k_fold_fit(Memory, run, judged, [[0, 1], [2, 3], [4, 5]])
    of_strings = [frame.astype({"qid": str}) for frame in (run, judged)]
    pd.testing.assert_frame_equal(folds.run, k_fold_fit(Memory, *of_strings, [["0", "1"], "23", "45"]).run)
    assert folds(run)["score"].tolist() == folds.run["score"].tolist()


@pytest.mark.bytes
def test_interrupted_and_resumed(maxp, whole, tmp_path, monkeypatch):
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
    # Finished: nothing is trained, nothing is scored.
    with monkeypatch.context() as patch:
        patch.setattr(ld.MaxP, "fit", lambda *_: pytest.fail("trained again"))
        patch.setattr(ld.MaxP, "transform", lambda *_: pytest.fail("scored again"))
        again = k_fold_fit(maxp, RUN, QRELS, FOLDS, folder=tmp_path)
    pd.testing.assert_frame_equal(again.run, resumed.run)
    names = [path.name for path in (tmp_path / "fold-1").iterdir()]
    assert sorted(names) == ["finished.json", "model", "run.res.gz", "scored.json"]


def test_finished_models_of_ones_own_are_read_with_a_word_and_score_anew(cross_encoder, tmp_path):
    make_edited, name = EDITED["head"]
    k_fold_fit(make_edited(1, cross_encoder, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path)
    edited = make_edited(-1, cross_encoder, training=RECIPE)
    with optimizer_steps() as steps, pytest.warns(UserWarning, match=f"fold-1' was begun before.*code of .*{name}"):
        again = k_fold_fit(edited, RUN, QRELS, FOLDS, folder=tmp_path)
    assert not steps
    assert again.run["score"].tolist() == pytest.approx(again(RUN)["score"].tolist())


def test_other_candidates_are_scored_anew(maxp, whole, tmp_path):
    folder = shutil.copytree(whole[1], tmp_path / "folds")
    longer = pd.concat([RUN, RUN[RUN["qid"] == QIDS[0]].assign(docno="new", text="cat")], ignore_index=True)
    notes = folder / "fold-0" / "finished.json"
    before = notes.read_bytes()
    with pytest.raises(ValueError, match=r"fold-1.*another training: not the same are its training data"):
        k_fold_fit(maxp, longer, QRELS, FOLDS, folder=folder)
    assert notes.read_bytes() == before
    # The candidates of fold 0 are no training data of its model: that stays, and its run is made anew.
    run = pd.read_csv(folder / "fold-0" / "run.res.gz", sep=" ", header=None)
    assert "new" in run[2].tolist()


def test_folder_of_other_models(cross_encoder, whole):
    folder = whole[1]
    for changes, message in (
        ({"seed": 1}, r"arguments \(seed\)"),
        ({"max_doc_len": 5}, r"arguments \(max_doc_len\)"),
        ({"training": TrainingArgs(epochs=2)}, r"recipe \(epochs, .*learning_rates"),
    ):
        other = make("MaxP", cross_encoder, **{"training": RECIPE, **changes})
        with pytest.raises(ValueError, match=f"fold-0.*another training: not the same are its {message}"):
            k_fold_fit(other, RUN, QRELS, FOLDS, folder=folder)
    started = make("MaxP", cross_encoder, training=RECIPE).fit(RUN, QRELS)
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        k_fold_fit(started, RUN, QRELS, FOLDS, folder=folder)
    # What changes nothing in weights and scores may change.
    other = make("MaxP", Path(cross_encoder), training=RECIPE, device="cpu", batch_size=7)
    models = k_fold_fit(other, RUN, QRELS, FOLDS, folder=folder).models
    assert [model.batch_size for model in models] == [7, 7, 7]
    notes = json.loads((folder / "fold-0" / "finished.json").read_text())
    assert (notes["class"], notes["recipe"]["seed"]) == ("MaxP", 42)


def test_folder_of_a_backbone_that_has_changed(cross_encoder, tmp_path):
    backbone = shutil.copytree(cross_encoder, tmp_path / "backbone")
    k_fold_fit(make("MaxP", backbone, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path / "folds")
    file = backbone / "model.safetensors"
    weights = {name: value + 0.01 for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        k_fold_fit(make("MaxP", backbone, training=RECIPE), RUN, QRELS, FOLDS, folder=tmp_path / "folds")


def test_models_that_cannot_be_in_a_folder(cross_encoder, tmp_path):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, checkpoint=tmp_path / "state"))
    for folder in (None, tmp_path / "folds"):
        with pytest.raises(ValueError, match=r"TrainingArgs\(checkpoint=...\) is for one training.*folder="):
            k_fold_fit(model, RUN, QRELS, FOLDS, folder=folder)
    with pytest.raises(ValueError, match="remote code cannot be saved"):
        k_fold_fit(make("MaxP", cross_encoder, trust_remote_code=True), RUN, QRELS, FOLDS, folder=tmp_path)
    assert not list(tmp_path.iterdir())


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
        ({"model": lambda: ONE}, ValueError, "must make a new model at each call"),
        ({"model": Dropping}, ValueError, "does not return the rows that it is given, in their order"),
        ({"model": Memory, "folder": "unused"}, TypeError, "leave folder= out"),
    ],
)
def test_bad_input(changes, error, message):
    arguments = {"model": Memory, "run": RUN, "qrels": QRELS, "folds": FOLDS, **changes}
    with pytest.raises(error, match=message):
        k_fold_fit(**arguments)


# Seeds.


@pytest.mark.bytes
def test_seeds(plain_encoder, tmp_path):
    model = make("PARADE-transformer", plain_encoder, training=RECIPE)
    whole = fit_seeds(model, [0, 1], RUN, QRELS)
    scores = {seed: whole[seed](RUN)["score"].tolist() for seed in whole}
    assert list(whole) == [0, 1]
    assert scores[0] != scores[1]
    assert [(m.seed, m.training.seed) for m in whole.values()] == [(0, 0), (1, 1)]
    assert model.seed == 42
    made = fit_seeds(
        lambda seed: make("PARADE-transformer", plain_encoder, training=RECIPE, seed=seed), (1,), RUN, QRELS
    )
    assert made[1](RUN)["score"].tolist() == pytest.approx(scores[1], rel=1e-5)
    with optimizer_steps(stop_at=6 + 2):
        fit_seeds(model, [0, 1], RUN, QRELS, folder=tmp_path)
    with optimizer_steps() as steps:
        resumed = fit_seeds(model, [0, 1], RUN, QRELS, folder=tmp_path)
    assert len(steps) == 6 - 1
    assert {seed: resumed[seed](RUN)["score"].tolist() for seed in resumed} == scores


class Seeded(Memory):
    def __init__(self, name="memory", *, seed=42):
        super().__init__()
        self.name, self.seed = name, seed


@pytest.mark.parametrize("function", [Seeded, lambda name="memory", seed=42: Seeded(name, seed=seed)])
def test_functions_get_the_seed_by_its_name(function):
    models = fit_seeds(function, [0, 3], RUN, QRELS)
    assert [(model.name, model.seed) for model in models.values()] == [("memory", 0), ("memory", 3)]


def test_a_trained_model_keeps_its_start(maxp):
    maxp.fit(RUN, QRELS)
    models = fit_seeds(maxp, [0, 1], RUN, QRELS)
    assert [(model.seed, model.training.seed) for model in models.values()] == [(42, 0), (42, 1)]
    assert models[0](RUN)["score"].tolist() != models[1](RUN)["score"].tolist()
    assert len(maxp.history) == 1


def test_means_over_seeds():
    shuffled = {seed: np.random.default_rng(seed).permutation(len(RUN)).tolist() for seed in (3, 4)}
    models = SeedModels(
        {s: pt.apply.generic(lambda f, own=own: pt.model.add_ranks(f.assign(score=own))) for s, own in shuffled.items()}
    )
    topics = RUN[["qid", "query"]].drop_duplicates()
    results = ld.Experiment({"model": models.behind(pt.Transformer.from_df(RUN))}, topics, QRELS, ["AP"], seeds=[3, 4])
    by_hand = [pt.Experiment([m(RUN)], topics, QRELS, ["map"], perquery=True) for m in models.values()]
    expected = pd.concat(by_hand).groupby("qid")["value"].mean()
    np.testing.assert_allclose(results.perquery.set_index("qid")["value"].loc[expected.index], expected)
    assert results.seeds == {"model": [3, 4]}


@pytest.mark.parametrize(
    ("model", "seeds", "error", "message"),
    [
        (Memory, [], ValueError, "must be a list of whole numbers"),
        (Memory, [0, 0], ValueError, "a seed twice"),
        (Memory, [0.5], ValueError, "whole numbers"),
        (NO_FIT, [0], TypeError, "give a function"),
        (lambda seed: NO_FIT, [0], TypeError, "has no fit"),
        (lambda seed: ONE, [0, 1], ValueError, "must make a new model"),
        (Memory, [0, 1], ValueError, "takes no seed: all models would be the same"),
    ],
)
def test_bad_seeds(model, seeds, error, message):
    with pytest.raises(error, match=message):
        fit_seeds(model, seeds, RUN, QRELS)


def test_folds_with_a_selecting_model_are_read_again_whatever_it_is_called(cross_encoder, tmp_path):
    """The selecting model is saved with each fold, and so goes by another name afterwards; its weights stay."""
    make("FirstP", cross_encoder, training=TrainingArgs()).fit(RUN, QRELS).save(tmp_path / "selector")
    made = []
    for _ in range(2):
        selector = ld.FirstP.load(tmp_path / "selector")
        model = make("MaxP", cross_encoder, preselect=ld.CrossEncoderWindows(1, selector), training=TrainingArgs())
        made.append(k_fold_fit(model, RUN, QRELS, FOLDS, folder=tmp_path / "folds"))
    pd.testing.assert_frame_equal(made[0].run, made[1].run)
