"""Recipes, schedules, and what is drawn from the training data."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from pyterrier_longdoc.training.sampling import draw_epoch, examples_per_epoch, make_example
from pyterrier_longdoc.training.schedule import parameter_groups, rate_factor

from pyterrier_longdoc.data import position_augmentation
from pyterrier_longdoc.training import (
    PRESETS,
    Group,
    Lora,
    TeacherScores,
    TrainingArgs,
    fit_in_turn,
    make_groups,
    pseudo_qrels,
    recipes,
)

from ..training.test_training import RUN, TEXTS, Toy, qrels

GROUPS = [Group(f"q{i}", f"query {i}", tuple("abcdef"), (0.0, 1.0, 0.0, 2.0, -1.0, 0.0)) for i in range(20)]


# Recipes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "hinge"}, "loss='hinge' is unknown; choose one of pairwise_margin"),
        ({"schedule": "cosine"}, "schedule='cosine' is unknown; choose one of constant, linear, one_cycle"),
        ({"loss": "ranknet", "sampling": "pointwise"}, "needs sampling='pairs'"),
        ({"patience": 0}, "patience=0 must be a whole number of at least 1"),
        ({"max_steps": True}, "max_steps=True must be a whole number"),
        ({"alpha": 1.5}, "alpha=1.5 must be a weight"),
        ({"epoch_decay": 0}, "epoch_decay=0 must be above 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be above 0"),
        ({"augment": "rotate"}, "augment='rotate' must be a function"),
        ({"dtype": "int8"}, "dtype='int8' is unknown"),
    ],
)
def test_recipes_that_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        TrainingArgs(**arguments)


def test_recipe_as_json():
    args = TrainingArgs(augment=rotate, lora=Lora(rank=4), checkpoint="/secret/folder", trackers=("tensorboard",))
    found = json.loads(json.dumps(args.as_dict()))
    assert (found["augment"], found["lora"]["rank"]) == ("rotate", 4)
    assert "secret" not in json.dumps(found)
    assert pickle.loads(pickle.dumps(args)) == args
    rates = {"": 1.0}
    frozen = TrainingArgs(learning_rates=rates)
    rates[""] = 2.0
    assert frozen.learning_rates[""] == 1.0
    with pytest.raises(TypeError):
        frozen.learning_rates[""] = 3.0


def test_presets():
    assert {"boytsov2025", "parade", "cedr", "best", "robust04", "leaderboard"} <= set(PRESETS)
    # The defaults are Boytsov et al. 2025; over one epoch the preset differs in its pool of negatives alone.
    boytsov = TrainingArgs.preset("boytsov2025")
    assert replace(boytsov, negative_pool=None, epoch_decay=1.0, restart_each_epoch=False) == TrainingArgs()
    parade = TrainingArgs.preset("parade", epochs=1)
    assert (parade.epochs, parade.queries_per_step, parade.learning_rates[""], parade.schedule) == (
        1,
        32,
        3e-6,
        "linear",
    )
    assert [args.schedule for args in recipes("leaderboard")] == ["constant", "constant", "one_cycle"]
    assert len(recipes("cedr")) == 2
    assert TrainingArgs.preset("robust04").epochs == 100
    assert TrainingArgs.preset("parade-distillation").alpha == 0.75
    with pytest.raises(ValueError, match="'leaderboard' has 3 rounds"):
        TrainingArgs.preset("leaderboard")
    with pytest.raises(ValueError, match="there is no recipe 'bm25'; known are boytsov2025"):
        recipes("bm25")


# Schedules.


@pytest.mark.parametrize("total", [10, 50, 97])
def test_one_cycle_is_torchs(total):
    args = TrainingArgs(schedule="one_cycle", warmup=0.2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=0.2, anneal_strategy="linear"
    )
    for step in range(total):
        assert rate_factor(args, step, total, total) == pytest.approx(torchs.get_last_lr()[0])
        optimizer.step()
        if step + 1 < total:
            torchs.step()


def test_linear_decay_reaches_zero_after_the_last_step():
    args = TrainingArgs(schedule="linear", warmup=0.2)
    factors = [rate_factor(args, step, 10, 10) for step in range(11)]
    np.testing.assert_allclose(factors, [1 / 2, 1, *(i / 9 for i in range(8, -1, -1))])


def test_decay_and_restart_by_epoch():
    decayed = TrainingArgs(epoch_decay=0.5, warmup=0.0)
    assert [rate_factor(decayed, step, 2, 6) for step in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    restarted = replace(decayed, warmup=0.5, restart_each_epoch=True)
    assert [rate_factor(restarted, step, 4, 8) for step in range(8)] == [0.5, 1, 1, 1, 0.25, 0.5, 0.5, 0.5]
    # A training that ends within an epoch has a shorter schedule in that one.
    assert rate_factor(replace(restarted, warmup=1.0), 5, 4, 6) == 0.5


def test_weight_decay_on_matrices_alone():
    groups = parameter_groups(Toy(), TrainingArgs(weight_decay=0.1, decay="matrices"))
    assert all((group["weight_decay"] == 0.1) == (p.ndim > 1) for group in groups for p in group["params"])
    assert sum(len(group["params"]) for group in groups) == 5
    assert {group["weight_decay"] for group in parameter_groups(Toy(), TrainingArgs(weight_decay=0.1))} == {0.1}


# Groups.


def test_labels():
    judged = qrels(("1", "d2", 1), ("1", "d3", 2), ("1", "d4", -1))
    (group,) = make_groups(RUN, TEXTS, judged, TrainingArgs(min_label=2))
    assert (group.positives, group.negatives) == ([2], [0, 1, 3])
    assert group.labels == (1.0, -1.0, 2.0, 0.0)  # d1 is not judged
    (group,) = make_groups(RUN, TEXTS, judged, TrainingArgs(unjudged="skip"))
    assert group.labels == (1.0, -1.0, 2.0)


def test_pool_of_negatives():
    frame = pd.DataFrame({"qid": "1", "query": "a", "docno": [f"d{i}" for i in range(50)]})
    texts = frame["docno"].tolist()
    judged = qrels(("1", "d7", 1), ("1", "d45", 1))
    args = TrainingArgs(negative_pool=5, max_negative_rank=20)
    (group,) = make_groups(frame, texts, judged, args)
    assert (len(group.texts), len(group.positives)) == (7, 2)
    assert all(int(group.texts[i][1:]) < 20 for i in group.negatives)
    assert make_groups(frame, texts, judged, args) == [group]
    assert make_groups(frame, texts, judged, replace(args, seed=1)) != [group]
    assert len(make_groups(frame, texts, judged, replace(args, negative_pool=500))[0].negatives) == 19


def test_teacher_column():
    run = RUN.assign(teacher_score=np.arange(7.0), other=np.nan)
    (group,) = make_groups(run, TEXTS, qrels(("1", "d3", 1)))
    assert group.targets == (1.0, 3.0, 2.0, 0.0)
    assert make_groups(RUN, TEXTS, qrels(("1", "d3", 1)))[0].targets is None
    with pytest.raises(ValueError, match="teacher's scores in the column 'other' are not all finite"):
        make_groups(run, TEXTS, qrels(("1", "d3", 1)), TrainingArgs(teacher_field="other"))


def test_pseudo_labels():
    labels = pseudo_qrels(RUN, relevant=2)
    assert dict(zip(zip(labels["qid"], labels["docno"], strict=True), labels["label"], strict=True)) == {
        **{("1", "d1"): 0, ("1", "d2"): 1, ("1", "d3"): 0, ("1", "d4"): 1},
        **{("2", "d1"): 1, ("2", "d5"): 1, ("3", "d1"): 1},
    }
    (first,) = make_groups(RUN, TEXTS, labels)
    assert first.labels == (1.0, 1.0, 0.0, 0.0)


# Sampling.


def test_pairs():
    for negatives in (1, 3, 9):
        args = TrainingArgs(negatives=negatives)
        picks = draw_epoch(GROUPS, args, 0)
        assert sorted(pick.group for pick in picks) == list(range(20))
        for pick in picks:
            first, *others = pick.candidates
            assert first in GROUPS[0].positives
            assert set(others) <= set(GROUPS[0].negatives)
            assert len(others) == negatives
            counts = Counter(others).values()
            assert max(counts) - min(counts) <= (1 if len(counts) == 4 else 0)


def test_pointwise_takes_every_candidate_once():
    picks = draw_epoch(GROUPS, TrainingArgs(sampling="pointwise", loss="pointwise_bce"), 0)
    assert len(picks) == examples_per_epoch(GROUPS, TrainingArgs(sampling="pointwise", loss="pointwise_bce")) == 120
    assert Counter((pick.group, pick.candidates) for pick in picks) == Counter(
        (g, (i,)) for g in range(20) for i in range(6)
    )


def test_lists_have_a_positive():
    args = TrainingArgs(sampling="listwise", loss="lambda_loss", negatives=3)
    for pick in draw_epoch(GROUPS, args, 0):
        assert len(set(pick.candidates)) == 4
        assert set(pick.candidates) & set(GROUPS[0].positives)
    assert all(len(p.candidates) == 6 for p in draw_epoch(GROUPS, replace(args, negatives=99), 0))


def test_draws_depend_on_seed_and_epoch_alone():
    args = TrainingArgs()
    state = random.getstate()
    first = draw_epoch(GROUPS, args, 3)
    random.seed(7)
    assert draw_epoch(GROUPS, args, 3) == first
    random.setstate(state)
    assert draw_epoch(GROUPS, args, 4) != first
    assert draw_epoch(GROUPS, replace(args, seed=1), 3) != first
    # A query's draw does not depend on which others there are.
    some = {GROUPS[::2][pick.group].qid: pick.candidates for pick in draw_epoch(GROUPS[::2], args, 3)}
    every = {GROUPS[pick.group].qid: pick.candidates for pick in first}
    assert some.items() <= every.items()


def rotate(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text) + 1)
    return text[start:] + text[:start]


def test_augmented_texts():
    group = Group("q", "query", ("abcdefgh", "ABCDEFGH"), (2.0, 0.0))
    args = TrainingArgs(augment=rotate)
    (pick,) = draw_epoch([group], args, 0)
    example = make_example(pick, [group], args, 0)
    assert [sorted(text) for text in example.texts] == [list("abcdefgh"), list("ABCDEFGH")]
    assert make_example(pick, [group], args, 0) == example
    seen = {make_example(pick, [group], args, epoch).texts for epoch in range(20)}
    assert len(seen) > 5
    assert make_example(pick, [group], TrainingArgs(), 0).texts == group.texts


def test_labels_of_examples_begin_at_min_label():
    group = Group("q", "query", ("a", "b", "c"), (3.0, 1.0, -1.0), min_label=2)
    args = TrainingArgs(sampling="listwise", loss="lambda_loss", negatives=2)
    (pick,) = draw_epoch([group], args, 0)
    assert make_example(pick, [group], args, 0).labels == (2.0, 0.0, 0.0)


def test_unjudged_candidates_are_below_every_judged_positive():
    run = pd.DataFrame({"qid": "1", "query": "a", "docno": list("abc"), "score": [3.0, 2.0, 1.0]})
    judged = pd.DataFrame({"qid": "1", "docno": ["a", "b"], "label": [0, -2]})
    (group,) = make_groups(run, list("abc"), judged, TrainingArgs(min_label=0))
    assert (group.positives, group.negatives) == ([0], [1, 2])


def bounded(text: str, rng: random.Random, *, length: int = 3) -> str:
    return text[:length]


class Cut:
    def __call__(self, text: str, rng: random.Random) -> str:
        return text[:2]

    def first(self, text: str, rng: random.Random) -> str:
        return text[:1]


@pytest.mark.parametrize(
    ("augment", "described"),
    [
        (bounded, "bounded"),
        (partial(bounded, length=5), "bounded(length=5)"),
        (position_augmentation("windows"), None),
        (Cut(), "Cut"),
        (Cut().first, "Cut.first"),
        (partial(bounded, length=Cut()), "bounded(length=Cut)"),
    ],
)
def test_a_recipe_describes_its_augmentation_alike_in_every_process(augment, described):
    found = TrainingArgs(augment=augment).as_dict()["augment"]
    assert "0x" not in found
    if described is not None:
        assert found == described
    assert TrainingArgs(augment=partial(bounded, length=6)).as_dict()["augment"] != "bounded(length=5)"


# Teachers and rounds.


def test_teacher_scores():
    teacher = pt.apply.doc_score(lambda row: float(len(row["text"])))
    run = RUN.assign(text=TEXTS)
    before = run.copy()
    out = TeacherScores(teacher, column="t")(run.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(run, before)
    assert out["t"].tolist() == [float(len(text)) for text in out["text"]]
    pd.testing.assert_series_equal(out["score"], run.sample(frac=1, random_state=0)["score"])
    with pytest.raises(ValueError, match="no score for 4 of 7 candidates"):
        TeacherScores(pt.apply.generic(lambda frame: frame[frame["qid"] != "1"]))(run)
    twice = pt.apply.generic(lambda frame: pd.concat([frame, frame.iloc[:1].assign(score=-9.0)]))
    with pytest.raises(ValueError, match="the teacher gives 1 candidates several scores"):
        TeacherScores(twice)(run)
    doubled = pd.concat([run, run.iloc[:1]])
    assert TeacherScores(pt.Transformer.identity())(doubled)["teacher_score"].tolist() == doubled["score"].tolist()


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
