"""The loop: optimiser and learning rates, steps, validation, interruptions, and what a model is meanwhile."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from safetensors.torch import load_file
from transformers import get_constant_schedule_with_warmup, get_linear_schedule_with_warmup

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.rerankers.cross_encoder import UntrainedWarning
from pyterrier_longdoc.training import Lora, TeacherScores, TrainingArgs, evaluate, plot_history, train
from pyterrier_longdoc.training.examples import draw_epoch, make_examples
from pyterrier_longdoc.training.loop import Run, ranking_loss
from pyterrier_longdoc.training.resume import ContinuedTrainingWarning
from pyterrier_longdoc.training.schedule import make_optimizer, rate_and_beta

from ..support import fit_in_processes, processes, tiny, tiny_long
from ..support.systems import CROSS_ENCODERS, QUIET, make
from ..support.toy import Broken, Toy, interrupt, optimizer_steps, qrels, toy_set, toy_task

pytestmark = QUIET
RUN, JUDGED = toy_task(0, queries=5)
RECIPE = TrainingArgs(epochs=2, queries_per_step=2, learning_rates={"": 1e-2}, metric="RR")


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    """A cross-encoder without dropout, so that how a step is divided makes no difference."""
    folder = tmp_path_factory.mktemp("calm")
    return tiny.checkpoint(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def fitted(backbone: str, name: str = "MaxP", data: tuple = (RUN, JUDGED), **changes):
    model = make(name, backbone, training=replace(RECIPE, **changes))
    model.model.head.dropout.p = 0.0
    return model.fit(*data)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.model.state_dict().items()}


def changed(model, before: dict[str, torch.Tensor]) -> set[str]:
    assert weights(model).keys() == before.keys()
    return {name for name, value in weights(model).items() if not torch.equal(value, before[name])}


# Optimiser and learning rates.


def test_the_longest_matching_prefix_gives_the_learning_rate():
    model = Toy()
    model.encoder["first"].bias.requires_grad_(False)
    rates = {"": 1.0, "encoder.": 2.0, "encoder.second.": 3.0, "head": 4.0}
    groups = make_optimizer(model, TrainingArgs(learning_rates=rates, weight_decay=0.1)).param_groups
    assert {group["weight_decay"] for group in groups} == {0.1}
    by_rate = {group["lr"]: [id(p) for p in group["params"]] for group in groups}
    assert by_rate == {
        2.0: [id(model.encoder["first"].weight)],
        3.0: [id(p) for p in model.encoder["second"].parameters()],
        4.0: [id(model.head.weight)],
    }


def test_the_history_has_the_rate_of_each_prefix(cross_encoder):
    recipe = TrainingArgs(epochs=2, warmup=0.0, learning_rates={"encoder.": 1e-5, "": 1e-4}, decay="matrices")
    history = make("MaxP", cross_encoder, training=recipe).fit(RUN, JUDGED).history
    assert history["learning_rate"].tolist() == [1e-4] * 2
    assert history["learning_rate encoder."].tolist() == [1e-5] * 2
    late = make("MaxSim", training=TrainingArgs(epochs=1, warmup=0.0, schedule="constant")).fit(RUN, JUDGED)
    assert late.history["learning_rate"].tolist() == [1e-4]  # although all of its weights have another rate


def test_weight_decay_of_matrices_excludes_biases():
    groups = make_optimizer(Toy(), TrainingArgs(weight_decay=0.1, decay="matrices")).param_groups
    assert all((group["weight_decay"] == 0.1) == (p.ndim > 1) for group in groups for p in group["params"])
    assert sum(len(group["params"]) for group in groups) == 5


def test_a_prefix_that_no_parameter_has_is_refused():
    with pytest.raises(ValueError, match="'backbone"):
        make_optimizer(Toy(), TrainingArgs(learning_rates={"": 1e-4, "backbone.": 1e-5}))


def test_the_encoder_learns_slower_than_the_head_by_default(cross_encoder):
    scorer = make("PARADE-transformer", cross_encoder).model
    low, high = sorted(make_optimizer(scorer, TrainingArgs()).param_groups, key=lambda group: group["lr"])
    assert (low["lr"], high["lr"]) == (1e-5, 1e-4)
    assert {id(p) for p in low["params"]} == {id(p) for p in scorer.encoder.parameters()}


def test_each_schedule_gives_its_learning_rates():
    for changes, steps_per_epoch, expected in [
        ({"warmup": 0.0}, 5, [1.0] * 10),
        ({"warmup": 0.2}, 5, [0.0, 0.5] + [1.0] * 8),
        ({"warmup": 1.0}, 5, [i / 10 for i in range(10)]),
        # Of a single step there is no warm-up: it would learn nothing.
        ({"warmup": 1.0}, 1, [1.0]),
        ({"warmup": 1.0, "schedule": "linear"}, 1, [1.0]),
        ({"schedule": "one_cycle"}, 1, [1.0]),
        ({"warmup": 1.0, "restart_each_epoch": True}, 1, [1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup": 0.2}, 10, [0, 1 / 2, *(i / 8 for i in range(8, 0, -1))]),
        ({"epoch_decay": 0.5, "warmup": 0.0}, 2, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"epoch_decay": 0.5, "warmup": 0.5, "restart_each_epoch": True}, 4, [0, 0.5, 1, 1, 0, 0.25, 0.5, 0.5]),
        # A training that ends within an epoch has a shorter schedule in that one.
        ({"warmup": 1.0, "restart_each_epoch": True}, 4, [0, 0.25, 0.5, 0.75, 0, 0.5]),
    ]:
        args = TrainingArgs(**changes)
        found = [rate_and_beta(args, step, steps_per_epoch, len(expected))[0] for step in range(len(expected))]
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("total", [4, 10, 97])
def test_warm_up_equals_that_of_transformers(total):
    """As FlexNeuART has it: the constant schedule, its warm-up a share of the steps that is rounded down."""
    optimizer, warmup = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), int(0.2 * total)
    for schedule, theirs in (
        ("constant", get_constant_schedule_with_warmup(optimizer, warmup)),
        ("linear", get_linear_schedule_with_warmup(optimizer, warmup, total)),
    ):
        args, (rate,) = TrainingArgs(schedule=schedule, warmup=0.2), theirs.lr_lambdas
        ours = [rate_and_beta(args, step, total, total)[0] for step in range(total)]
        np.testing.assert_allclose(ours, [rate(step) for step in range(total)])


@pytest.mark.parametrize("total", [10, 97])
def test_the_one_cycle_schedule_equals_that_of_torch(total):
    args = TrainingArgs(
        schedule="one_cycle", warmup=0.2, learning_rates={"": 1e-2, "head": 1e-1}, queries_per_step=1, weight_decay=0.1
    )
    ours, theirs = Toy(), Toy()
    torchs_optimizer = make_optimizer(theirs, args)
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        torchs_optimizer, max_lr=[1e-2, 1e-1], total_steps=total, pct_start=0.2, anneal_strategy="linear"
    )
    data = toy_set(total)
    run = Run(ours, data, args, ranking_loss, [], Coverage())
    for step, pick in enumerate(draw_epoch(data.groups, args, 0)):
        run.step([pick])
        ranking_loss(theirs, make_examples([pick], data, args, 0), args).backward()
        torchs_optimizer.step()
        torchs_optimizer.zero_grad()
        for mine, torchs_own in zip(run.optimizer.param_groups, torchs_optimizer.param_groups, strict=True):
            assert mine["lr"] == pytest.approx(torchs_own["lr"])
            assert mine["betas"] == pytest.approx(torchs_own["betas"])
        if step + 1 < total:
            torchs.step()
    for mine, torchs_own in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, torchs_own)


# Steps.


def test_each_epoch_trains_on_each_query_once():
    model = Toy()
    before = torch.get_rng_state(), random.getstate()
    train(model, toy_set(5), TrainingArgs(epochs=3, queries_per_step=2))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    orders = [[queries[0] for queries, _ in model.calls[start : start + 5]] for start in (0, 5, 10)]
    assert [sorted(order) for order in orders] == [[f"query {i}" for i in range(5)]] * 3
    assert all((texts[0][0], texts[1][0]) == ("+", "-") for _, texts in model.calls)
    assert all(model.modes)
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # With weights near 0 each query's loss is 1 - 2 w: gradient -2. The last step has what is left, 2 queries.
        ({}, [-6.0, -4.0]),
        ({"reduction": "mean"}, [-2.0, -2.0]),
        ({"max_grad_norm": 0.5}, [-0.5, -0.5]),
    ],
)
def test_a_step_adds_the_gradients_of_its_queries(changes, expected):
    args = TrainingArgs(queries_per_step=3, learning_rates={"": 1e-9}, warmup=1.0, **changes)
    with optimizer_steps() as steps:
        train(Toy(), toy_set(5), args)
    np.testing.assert_allclose([gradient.item() for _, gradient, _ in steps], expected, rtol=1e-4)
    np.testing.assert_allclose([rate for rate, _, _ in steps], [0.0, 0.5e-9])


@pytest.mark.parametrize("name", ["MaxP", "CEDR-knrm"])
def test_queries_per_forward_does_not_change_the_weights(name, calm):
    with optimizer_steps() as steps:
        for together in (1, 5):
            fitted(calm, name, queries_per_step=5, epochs=1, queries_per_forward=together)
    torch.testing.assert_close(steps[0][1], steps[1][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_the_weights_in_float32(dtype, calm):
    half, full = (fitted(calm, "CEDR-knrm", dtype=d, epochs=1, queries_per_step=5) for d in (dtype, "float32"))
    assert all(value.dtype == torch.float32 for value in half.model.parameters())
    assert half.history["loss"][0] == pytest.approx(full.history["loss"][0], rel=0.1)
    assert half.history["loss"][0] != full.history["loss"][0]


def test_overflow_in_fp16_skips_the_step():
    model, moved = Broken(1, math.inf), []
    args = TrainingArgs(queries_per_step=1, dtype="float16", learning_rates={"": 0.1}, warmup=0.0)
    train(model, toy_set(6), args, on_step=lambda: moved.append(model.head.weight.item()))
    assert moved[0] == 0.0
    assert moved[-1] != 0.0


@pytest.mark.parametrize(
    ("at", "factor", "step"), [(1, math.inf, 2), (2, math.inf, 3)], ids=["after one step", "after two steps"]
)
def test_a_loss_that_is_not_finite_is_an_error_of_the_next_step(at, factor, step):
    model, done = Broken(at, factor), []
    args = TrainingArgs(queries_per_step=1, learning_rates={"": 0.1}, warmup=0.0)
    with pytest.raises(FloatingPointError, match=f"step {step}.*'q"):
        train(model, toy_set(5), args, on_step=lambda: done.append(1))
    assert len(done) == at
    assert not model.training


def test_a_model_whose_training_diverged_does_not_score(cross_encoder):
    model = make("MaxP", cross_encoder, training=TrainingArgs(queries_per_step=5, learning_rates={"": 1e38}))
    with pytest.raises(FloatingPointError, match="after step 1"):
        model.fit(RUN, JUDGED)
    assert model.history.empty
    with pytest.raises(FloatingPointError):
        model(RUN)


def test_a_recipe_that_lacks_its_data_is_refused():
    for recipe, named in [
        ({"loss": "margin_mse", "teacher_field": "other"}, "'other'"),
        ({"patience": 2}, "patience=2"),
        ({"validate_steps": 2}, "validate_steps=2"),
    ]:
        with pytest.raises(ValueError, match=named):
            train(Toy(), toy_set(5), TrainingArgs(**recipe))


def test_a_student_learns_from_a_teacher_in_a_pipeline(cross_encoder):
    student = make("MaxP", cross_encoder, training=replace(RECIPE, loss="margin_mse"))
    (TeacherScores(make("AvgP", cross_encoder)) >> student).fit(RUN, JUDGED)
    assert len(student.history) == 2


@pytest.mark.parametrize("name", ["MaxP", "CEDR-knrm", "LateIR"])
def test_the_same_seed_gives_the_same_weights(name, cross_encoder):
    def state(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(random.randrange(100))
        recipe = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-2}, seed=seed)
        return weights(make(name, cross_encoder, training=recipe).fit(RUN, JUDGED))

    first, second, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


# Validation and history.


SCORED = pd.DataFrame({"qid": [1, 1, 2, 2], "docno": ["a", "b", "a", "b"], "score": [2.0, 1.0, 2.0, 1.0]})
JUDGED_SCORED = qrels(("1", "a", 1), ("2", "b", 2))


def test_evaluate_gives_the_mean_over_queries():
    for metric, expected in [("RR", (1 + 1 / 2) / 2), ("P@1", 1 / 2)]:
        assert evaluate(SCORED, JUDGED_SCORED, metric) == pytest.approx(expected)


def test_labels_may_be_whole_numbers_as_strings():
    written = JUDGED_SCORED.assign(label=["1.0", "2.0"])  # as pandas writes a column that had a gap
    assert evaluate(SCORED, written, "RR") == evaluate(SCORED, JUDGED_SCORED, "RR")


def test_labels_that_are_not_whole_numbers_cannot_be_evaluated():
    with pytest.raises(ValueError, match=r"0\.7"):
        evaluate(SCORED, qrels(("1", "a", 2), ("1", "b", 0.7)), "RR")


def test_judgements_of_other_queries_do_not_change_a_measure():
    more = pd.concat([JUDGED_SCORED, qrels(("other", "d", 1))])
    assert evaluate(SCORED, more, "RR") == evaluate(SCORED, JUDGED_SCORED, "RR")


def test_the_best_epoch_is_kept():
    seen, modes, model = [], [], Toy()
    figures = iter([0.2, 0.7, 0.7, 0.1])

    def validate() -> float:
        seen.append(model.head.weight.item())
        modes.append(model.training)
        return next(figures)

    history = train(model, toy_set(3), TrainingArgs(epochs=4, learning_rates={"": 0.1}), validate=validate)
    assert [entry["validation"] for entry in history] == [0.2, 0.7, 0.7, 0.1]
    assert len(set(seen)) == 4
    assert model.head.weight.item() == seen[1]  # the first of the two best
    assert modes == [False] * 4
    assert all(model.modes)


def test_validate_steps_adds_validations_between_epochs():
    args = TrainingArgs(epochs=2, queries_per_step=1, validate_steps=2)
    history = train(Toy(), toy_set(5), args, validate=lambda: 0.5)
    assert [(entry["epoch"], entry["step"], "validation" in entry) for entry in history] == [
        (1, 2, True), (1, 4, True), (1, 5, False), (2, 6, True), (2, 8, True), (2, 10, True),
    ]  # fmt: skip


def test_patience_ends_a_training():
    figures = iter([0.1, 0.3, 0.3, 0.2, 0.9])
    args = TrainingArgs(epochs=9, queries_per_step=5, patience=2)
    history = train(Toy(), toy_set(5), args, validate=lambda: next(figures))
    assert [entry["validation"] for entry in history] == [0.1, 0.3, 0.3, 0.2]


def test_max_steps_ends_a_training_within_an_epoch():
    model = Toy()
    history = train(model, toy_set(5), TrainingArgs(epochs=9, queries_per_step=2, max_steps=4))
    assert len(model.calls) == 2 + 2 + 1 + 2
    assert [(entry["epoch"], entry["step"]) for entry in history] == [(1, 3), (2, 4)]


def test_the_history_covers_both_of_two_trainings_and_their_data_stays_unchanged(cross_encoder):
    model = make("MaxP", cross_encoder, training=RECIPE)
    run, judged = RUN.copy(), JUDGED.copy()
    history = model.fit(run, judged, run, judged).fit(run, judged).history
    pd.testing.assert_frame_equal(run, RUN)
    pd.testing.assert_frame_equal(judged, JUDGED)
    assert list(history["epoch"]) == [1, 2, 3, 4]
    assert list(history["step"]) == [3, 6, 9, 12]


def test_a_plot_of_the_history_shows_losses_and_validations_by_step():
    history = pd.DataFrame({"step": [3, 6, 9], "loss": [3.0, 2.0, 1.0], "validation": [0.5, 0.7, np.nan]})
    left, right = plot_history(history).figure.axes
    assert list(left.lines[0].get_xdata()) == [3, 6, 9]
    assert list(right.lines[0].get_xdata()) == [3, 6]
    assert list(right.lines[0].get_ydata()) == [0.5, 0.7]
    assert len(plot_history(history.drop(columns="validation")).figure.axes) == 1
    with pytest.raises(ValueError, match="empty"):
        plot_history(history.head(0))


def test_validation_data_is_checked_before_training(cross_encoder):
    for run, judged, named in [
        (RUN.drop(columns="text"), JUDGED, "text"),
        (RUN, JUDGED.drop(columns="label"), "label"),
        (RUN, JUDGED.assign(qid="other"), "nothing to validate on"),
        (RUN[RUN["docno"] != "d0"], JUDGED, "nothing to validate on"),  # all weights would be equally good
        (RUN, JUDGED.assign(label="relevant"), "'relevant'"),
        (RUN, JUDGED.assign(label=1.5), r"1\.5"),
        (RUN, None, "both"),
    ]:
        model = make("MaxP", cross_encoder)
        with pytest.raises((ValueError, pt.validate.InputValidationError), match=named):
            model.fit(RUN, JUDGED, run, judged)
        assert model._model is None


# Interruptions.

FAST = TrainingArgs(queries_per_step=1, learning_rates={"": 3e-2}, metric="RR")


def test_a_training_stopped_before_its_first_step_leaves_the_model_untrained(plain_encoder):
    model = make("MaxP", plain_encoder, training=FAST)
    before = weights(model)
    with optimizer_steps(stop_at=1):
        model.fit(RUN, JUDGED)
    assert not changed(model, before)
    assert not model.is_trained
    with pytest.warns(UntrainedWarning):
        model(RUN)


def test_a_training_stopped_after_a_step_leaves_a_trained_model(plain_encoder):
    model = make("MaxP", plain_encoder, training=FAST)
    before = weights(model)
    with optimizer_steps(stop_at=3):
        model.fit(RUN, JUDGED)
    assert changed(model, before)
    assert model.is_trained
    assert all(parameter.grad is None for parameter in model.model.parameters())
    model.seed = 8
    with pytest.raises(ValueError, match="seed"):
        model(RUN)


def test_the_best_epoch_survives_an_interruption(cross_encoder):
    model = make("MaxP", cross_encoder, training=replace(FAST, epochs=5))
    with optimizer_steps(stop_at=4 * 5 + 3):  # in the fifth epoch
        model.fit(RUN, JUDGED, RUN, JUDGED)
    figures = model.history["validation"].tolist()
    assert len(figures) == 4
    assert len(set(figures)) > 1
    assert evaluate(model(RUN), JUDGED, "RR") == pytest.approx(max(figures))


@pytest.mark.parametrize(("checkpoint", "cure"), [(None, r"TrainingArgs\(checkpoint="), ("state", "new model")])
def test_an_interruption_says_how_to_continue(checkpoint, cure, plain_encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make("MaxP", plain_encoder, training=replace(FAST, checkpoint=checkpoint))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt, match=cure):
        model.fit(RUN, JUDGED)


# What a model is meanwhile.

LONG = {"longformer": {"attention_window": 8}, "nomic_bert": {}, "llama": {"attention_dropout": 0.3}}


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "distilbert", "modernbert", *LONG])
def test_without_dropout_training_computes_what_inference_does(family, tmp_path):
    backbone = tiny.checkpoint(tmp_path / "backbone", family, **LONG.get(family, {}))
    recipe = replace(RECIPE, learning_rates={"": 0.0}, dropout=0.0)
    template = "plain" if family == "llama" else None
    scorer = (ld.LongP if family in LONG else ld.FirstP)(backbone, template=template, training=recipe).model
    rates = {name: part.p for name, part in scorer.named_modules() if isinstance(part, torch.nn.Dropout)}
    seen = []
    queries, texts = RUN["query"].tolist(), RUN["text"].tolist()

    def look():
        scorer.train()
        assert scorer.encoder.backbone.token_dropout is True
        with torch.no_grad():
            seen.append(scorer(queries, texts))

    scorer.encoder.backbone.token_dropout = True  # a flag, as in ESM
    train(scorer, toy_set(1), recipe, on_step=look)
    assert scorer.encoder.backbone.token_dropout is True
    scorer.eval()
    with torch.no_grad():
        torch.testing.assert_close(seen[0], scorer(queries, texts))
    assert max(rates.values()) > 0
    assert rates == {name: part.p for name, part in scorer.named_modules() if isinstance(part, torch.nn.Dropout)}


@pytest.mark.parametrize("name", ["MaxP", "CEDR-knrm"])
def test_gradient_checkpointing_recomputes_and_makes_no_difference(name, cross_encoder):
    plain = fitted(cross_encoder, name)
    model = make(name, cross_encoder, training=replace(RECIPE, gradient_checkpointing=True))
    model.model.head.dropout.p = 0.0
    passes = []
    model.model.encoder.backbone.encoder.layer[0].attention.register_forward_hook(lambda *_: passes.append(1))
    model.fit(RUN, JUDGED)
    assert len(passes) == 2 * 2 * 5
    assert plain.history["loss"].tolist() == pytest.approx(model.history["loss"].tolist(), rel=1e-5)
    torch.testing.assert_close(weights(plain), weights(model), rtol=1e-3, atol=1e-4)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.model.modules())
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        train(Toy(), toy_set(3), TrainingArgs(gradient_checkpointing=True))


@pytest.mark.parametrize("name", ["MaxP", "PARADE-pretrained", "LateIR", "MaxSim", "LongP"])
def test_lora_trains_and_saves_like_any_model(name, cross_encoder, tmp_path):
    backbone = tiny_long.decoder(tmp_path / "llama", "llama", labels=1) if name == "LongP" else cross_encoder
    read = {"template": "plain"} if name == "LongP" else {}
    model = make(name, backbone, training=replace(RECIPE, epochs=1, lora=Lora(rank=2)), **read)
    before = weights(model)
    trained = changed(model.fit(RUN, JUDGED), before)
    found = {key for key in trained if "encoder.backbone" in key}
    assert name != "MaxSim" or any("representation" in key for key in trained)  # its projection
    of_bert, of_llama = {"query", "key", "value", "dense"}, {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    assert {key.split(".")[-2] for key in found} >= (of_llama if name == "LongP" else of_bert)
    assert not {key for key in found if "embed" in key or "norm" in key.lower()}
    assert all(torch.linalg.matrix_rank(weights(model)[key] - before[key], rtol=1e-4) <= 2 for key in found)
    assert all(parameter.requires_grad for parameter in model.model.parameters())
    model.save(tmp_path / "saved")
    restored = ld.CrossEncoder.load(tmp_path / "saved")
    np.testing.assert_allclose(restored(RUN)["score"], model(RUN)["score"], atol=1e-5)
    model.fit(RUN, JUDGED)  # and again


def test_lora_only_changes_its_target_layers_and_keeps_the_best_weights(cross_encoder):
    lora = Lora(rank=2, targets=("query", "value"), dropout=0.1)
    model = make("MaxP", cross_encoder, training=replace(RECIPE, epochs=5, lora=lora))
    before = weights(model)
    model.fit(RUN, JUDGED, RUN, JUDGED)
    assert {key.split(".")[-2] for key in changed(model, before) if "backbone" in key} == {"query", "value"}
    assert evaluate(model(RUN), JUDGED, "RR") == pytest.approx(model.history["validation"].max())
    model = Toy()
    with pytest.raises(ValueError, match="lora="):
        train(model, toy_set(2), TrainingArgs(lora=Lora(rank=2)))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("targets", [("nowhere",), ("query", "LayerNorm")])
def test_unsuitable_lora_targets_are_refused_without_changing_the_model(targets, cross_encoder):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, lora=Lora(targets=targets)))
    model.model.head.requires_grad_(False)
    before, trainable = weights(model), [p.requires_grad for p in model.model.parameters()]
    with pytest.raises(ValueError, match=targets[-1]):
        model.fit(RUN, JUDGED)
    assert not changed(model, before)
    assert [p.requires_grad for p in model.model.parameters()] == trainable
    model(RUN)


# Accelerate.


def test_trackers_log_losses_and_the_recipe(cross_encoder):
    tracking = pytest.importorskip("accelerate.tracking")

    class Memory(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None
        store_init_configuration, log = Mock(), Mock()

    model = make("MaxP", cross_encoder, training=replace(RECIPE, trackers=(Memory(),)), device="cpu")
    model.fit(RUN, JUDGED, RUN, JUDGED)
    assert [call.kwargs["step"] for call in Memory.log.mock_calls] == [3, 6]
    assert [call.args[0]["loss"] for call in Memory.log.mock_calls] == model.history["loss"].tolist()
    assert Memory.store_init_configuration.mock_calls[0].args[0]["margin"] == "1.0"


def launch(*arguments: str) -> list[int]:
    """Fits in two processes that train together, as torchrun starts them; returns their exit codes."""
    accelerate = pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

    def fit(rank: int) -> None:
        os.environ.update(together, RANK=str(rank), LOCAL_RANK=str(rank))
        accelerate.state.AcceleratorState._reset_state(
            reset_partial_state=True
        )  # that of pytest's process, which trains alone
        fit_in_processes.main(*arguments)

    return [processes.wait(child) for child in [processes.start(partial(fit, rank)) for rank in range(2)]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[str, Path]:
    """A decoder, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    backbone = tiny_long.decoder(folder / "decoder")
    with pytest.warns(ContinuedTrainingWarning):
        fit_in_processes.main(backbone, str(folder))
    return backbone, folder


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_compute_what_one_does(alone, tmp_path):
    backbone, of_one = alone
    # Killed in the second epoch, they go on after the first one's state.
    assert launch(backbone, str(tmp_path), "5") == [1, 1]
    assert not (tmp_path / "model-0").exists()
    assert launch(backbone, str(tmp_path)) == [0, 0]
    every, first, second = (
        load_file(folder / f"gradients-{rank}.safetensors")
        for folder, rank in ((of_one, 0), (tmp_path, 0), (tmp_path, 1))
    )
    assert (len(every), len(first), len(second)) == (6, 3, 3)
    for step, gradient in first.items():
        assert torch.equal(gradient, second[step])
        torch.testing.assert_close(gradient, every[str(int(step) + 3)], rtol=1e-2, atol=1e-3)
    for name in ("model", "again"):
        saved = [(tmp_path / f"{name}-{rank}" / "model.safetensors").read_bytes() for rank in (0, 1)]
        assert saved[0] == saved[1]
        ours, expected = (load_file(folder / f"{name}-0" / "model.safetensors") for folder in (tmp_path, of_one))
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
    histories = [
        pd.DataFrame(json.loads((folder / "training.json").read_text())["history"])
        for folder in (of_one / "model-0", tmp_path / "model-0", tmp_path / "model-1")
    ]
    columns = ["epoch", "step", "loss", "validation"]
    pd.testing.assert_frame_equal(histories[1][columns], histories[2][columns])
    pd.testing.assert_frame_equal(histories[1][columns], histories[0][columns], rtol=1e-4)
    scores = [ld.MaxP.load(folder / "model-0").transform(RUN)["score"] for folder in (of_one, tmp_path)]
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4)


# Every kind of model and every kind of loss learns.

LEARNERS = ("MaxP", "PARADE-attn", "PARADE-query", "LateIR", "MaxSim", "CEDR-knrm", "NeuralModel1")
"""Heads of scores, of vectors, of a transformer with the states of the query, and over an aggregator of their own;
heads of matches of all layers and of the last one; and the encoder of MaxSim."""
LOSSES = {
    "listwise": {"loss": "lambda_loss", "sampling": "listwise", "negatives": 3},
    "distillation": {"loss": "distillation", "sampling": "pointwise", "queries_per_forward": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), [*((name, None) for name in LEARNERS), *(("MaxP", loss) for loss in LOSSES)])
def test_every_model_learns_with_every_loss(name, loss, tmp_path):
    def checkpoint(part: str, **sizes) -> str:
        # The large initialisation of the other tests learns badly.
        return tiny.checkpoint(tmp_path / part, initializer_range=0.1, num_hidden_layers=1, **sizes)

    run = RUN.assign(teacher_score=[4.0 if docno == "d0" else -4.0 for docno in RUN["docno"]])
    given = CROSS_ENCODERS[name][1]
    sizes = {"window_size": 13 if name == "FirstP" else 6 if "stride" in given else 5, "stride": 4}
    changes = {key: value for key, value in sizes.items() if key in given}
    for part in {"aggregator", "interaction"} & set(given):
        changes[part] = checkpoint(part, hidden_size=24, num_attention_heads=2)
    changes["backbone"] = checkpoint("backbone")
    recipe = TrainingArgs(
        epochs=60,
        queries_per_step=5,
        validate_steps=2,
        patience=20,
        learning_rates={"": 4e-3},
        metric="RR",
        **LOSSES.get(loss, {}),
    )
    model = make(name, changes["backbone"]).apply_attributes(**changes, max_query_len=2, training=recipe)
    assert evaluate(model(run), JUDGED, "RR") <= 0.9
    model.fit(run, JUDGED, run, JUDGED)
    assert evaluate(model(run), JUDGED, "RR") == 1.0
    if loss is None:
        losses = model.history["loss"].tolist()
        assert np.mean(losses[-10:]) < min(0.4, 0.6 * max(losses[:10]))
