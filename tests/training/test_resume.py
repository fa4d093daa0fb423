"""Training that is killed, and continues."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.data import position_augmentation
from pyterrier_longdoc.training import LOSSES, Lora, Loss, ScheduleWarning, TrainingArgs, resume, train
from pyterrier_longdoc.training.resume import STATE_FILE

from ..support import processes
from ..support.lines import lines_in
from ..support.systems import make
from ..support.toy import TOY_TEXTS, Broken, Toy, optimizer_steps, toy_groups, toy_task

RUN, JUDGED = toy_task(0, queries=5)
RECIPE = TrainingArgs(
    epochs=5, queries_per_step=2, learning_rates={"": 1e-2}, metric="RR", save_steps=2, schedule="linear"
)  # 3 steps an epoch


def fit(backbone: str, args: TrainingArgs, out: Path, *, die_at: int = 0) -> None:
    """Trains, or kills itself in the step of that number, and saves the model."""
    with optimizer_steps(stop_at=die_at, stop=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        make("PARADE-attn", backbone, training=args).fit(RUN, JUDGED, RUN, JUDGED).save(out)


def in_process(*arguments, **options) -> int:
    return processes.wait(processes.start(lambda: fit(*arguments, **options)))


def killing(test):
    return pytest.mark.slow(pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")(test))


@killing
@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": Lora(rank=2)}, {"epoch_decay": 0.5, "restart_each_epoch": True}, {"schedule": "one_cycle"}],
)
def test_killed_run_ends_with_the_same_weights(changes, cross_encoder, tmp_path):
    args = replace(RECIPE, **changes)
    assert in_process(cross_encoder, args, tmp_path / "whole") == 0
    args = replace(args, checkpoint=tmp_path / "state")
    # Before the first state, then again and again: each life is a few steps.
    for die_at in (1, 4, 3, 3):
        assert in_process(cross_encoder, args, tmp_path / "killed", die_at=die_at) == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()
    assert in_process(cross_encoder, args, tmp_path / "killed") == 0
    killed, whole = (tmp_path / name / "model.safetensors" for name in ("killed", "whole"))
    assert killed.read_bytes() == whole.read_bytes()
    killed, whole = (ld.PARADE.load(tmp_path / name).history for name in ("killed", "whole"))
    pd.testing.assert_frame_equal(
        killed.drop(columns="documents_per_second"), whole.drop(columns="documents_per_second")
    )


@killing
def test_killed_while_the_state_is_written(tmp_path):
    def die_half_way(tensors, path, **options):
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArgs(epochs=6, queries_per_step=2, learning_rates={"": 1e-2}, checkpoint=tmp_path, save_steps=1)

    def run() -> None:
        steps = iter(range(100))

        def on_step() -> None:
            if next(steps) == 4:
                resume.save_file = die_half_way

        train(Toy(), toy_groups(4), TOY_TEXTS, args, on_step=on_step)

    assert processes.wait(processes.start(run)) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.part"))) == 1
    resumed, whole = Toy(), Toy()
    whole.load_state_dict(resumed.state_dict())
    history = train(resumed, toy_groups(4), TOY_TEXTS, args)
    assert len(resumed.calls) == 4 * 6 - 4 * 2  # the fifth step's state was never complete
    train(whole, toy_groups(4), TOY_TEXTS, replace(args, checkpoint=None))
    assert torch.equal(resumed.head.weight, whole.head.weight)
    assert [entry["epoch"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


@pytest.fixture
def stopped(tmp_path) -> tuple[TrainingArgs, Path]:
    """A recipe whose run was interrupted in its third step, and the file with the state of the second."""
    args = TrainingArgs(queries_per_step=1, epochs=2, checkpoint=tmp_path, save_steps=1)
    with optimizer_steps(stop_at=3):
        train(Toy(), toy_groups(3), TOY_TEXTS, args)
    tensors = load_file(tmp_path / STATE_FILE)
    assert {key.split("/")[0] for key in tensors} == {"model", "optimizer"}
    assert "optimizer/head.weight/exp_avg" in tensors
    return args, tmp_path / STATE_FILE


def test_full_disk(stopped, monkeypatch):
    args, path = stopped
    before = path.read_bytes()
    errors = {
        "save_file": SafetensorError("I/O error: No space left on device (os error 28)"),
        "fsync": OSError(errno.ENOSPC, "No space left on device"),
    }
    for name, error in errors.items():
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "fsync" else resume, name, Mock(side_effect=error))
            with pytest.raises(OSError, match=r"cannot be written to .*No space left.*the last state is still there"):
                train(Toy(), toy_groups(3), TOY_TEXTS, args)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]
    model = Toy()
    train(model, toy_groups(3), TOY_TEXTS, args)
    assert len(model.calls) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b"", lambda b: b"{}" + b[2:], lambda b: b[8:]])
def test_unreadable_state(damage, stopped):
    args, path = stopped
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    model = Toy()
    with pytest.raises(ValueError, match=r"state of the training in .* cannot be read: .*It was left as it is"):
        train(model, toy_groups(3), TOY_TEXTS, args)
    assert path.read_bytes() == damaged
    assert not model.calls
    assert not model.training


def test_state_of_another_training(stopped):
    args, path = stopped
    before = path.read_bytes()
    frozen, other = Toy(), Toy()
    frozen.encoder.requires_grad_(False)
    torch.nn.init.ones_(other.encoder["first"].bias)
    for model, queries, changes, message in (
        (Toy(), 3, {"seed": 1, "margin": 2.0}, r"recipe \(margin, seed\)"),
        (Toy(), 2, {}, "training data"),
        (frozen, 3, {}, "trainable weights"),
        (other, 3, {}, "starting weights"),
    ):
        with pytest.raises(ValueError, match=f"not the same are its {message}"):
            train(model, toy_groups(queries), TOY_TEXTS, replace(args, **changes))
        assert path.read_bytes() == before
    shorter = (
        r"of 6 steps \(epochs=2, max_steps=None, patience=None\), of which 2 are done, and this one has 5 "
        r"\(epochs=2, max_steps=5, patience=None\): it can only be made longer"
    )
    with pytest.raises(ValueError, match=shorter):
        train(Toy(), toy_groups(3), TOY_TEXTS, replace(args, max_steps=5))
    assert path.read_bytes() == before
    # How often states are written is not part of the recipe.
    train(Toy(), toy_groups(3), TOY_TEXTS, replace(args, save_steps=2))


def shortened(text, rng):
    return text


def squared(scores, labels, teacher, recipe):
    return (scores[:, 1:] - scores[:, :1] + 1).square().sum()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"augment": shortened}, "shortened"),
        ({"augment": position_augmentation("rotate")}, None),
        ({"loss": "squared"}, "squared"),
        ({}, None),
    ],
)
def test_going_on_with_a_users_function_is_said(changes, named, cross_encoder, tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES, "squared", Loss(squared, pairs=True))
    args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, save_steps=1, **changes)
    with optimizer_steps(stop_at=3), warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is taken up yet
        make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    told = [str(each.message) for each in caught if str(tmp_path) in str(each.message)]
    assert [f"code of {named}" in each for each in told] == ([] if named is None else [True])


def test_finished_run_is_not_trained_again(tmp_path):
    args = TrainingArgs(epochs=2, checkpoint=tmp_path, learning_rates={"": 0.1})
    figures = iter([0.5, 0.1])
    first = Toy()
    history = train(first, toy_groups(3), TOY_TEXTS, args, validate=lambda: next(figures))
    again, steps = Toy(), []
    earlier = [{"epoch": 1, "step": 1, "loss": 0.0}]
    found = train(
        again, toy_groups(3), TOY_TEXTS, args, validate=lambda: 0.0, on_step=lambda: steps.append(1), history=earlier
    )
    assert not again.calls
    assert steps == [1]  # the model counts as trained
    assert torch.equal(again.head.weight, first.head.weight)
    assert found == [{"epoch": 1, "step": 1, "loss": 0.0}, *history]


@pytest.mark.bytes
@pytest.mark.parametrize(
    "changes", [{}, {"lora": Lora(rank=2)}, {"epoch_decay": 0.5, "restart_each_epoch": True}, {"save_steps": 1}]
)
@pytest.mark.parametrize(("first", "then"), [({"max_steps": 4}, {"max_steps": 8}), ({"epochs": 1}, {"epochs": 3})])
def test_extended_training_ends_with_the_same_weights(changes, first, then, cross_encoder, tmp_path):
    """Under a schedule that does not depend on the length, with dropout, in the middle and at the end of an epoch."""
    args = replace(RECIPE, schedule="constant", warmup=0.0, **changes)
    whole = make("MaxP", cross_encoder, training=replace(args, **then)).fit(RUN, JUDGED)
    args = replace(args, checkpoint=tmp_path)
    short = make("MaxP", cross_encoder, training=replace(args, **first)).fit(RUN, JUDGED)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        extended = make("MaxP", cross_encoder, training=replace(args, **then)).fit(RUN, JUDGED)
    states = [model.load_scorer().state_dict() for model in (whole, extended, short)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert extended.history["step"].tolist() == sorted({*short.history["step"], *whole.history["step"]})


def test_extended_in_the_same_session(tmp_path):
    args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, warmup=0.0)
    whole, model = Toy(), Toy()
    train(whole, toy_groups(3), TOY_TEXTS, replace(args, checkpoint=None, epochs=4))
    figures = iter([0.9, 0.1, 0.1, 0.95])
    # The model has the best weights meanwhile, those of the first epoch; it goes on from the last ones.
    for epochs in (2, 4):
        train(model, toy_groups(3), TOY_TEXTS, replace(args, epochs=epochs), validate=lambda: next(figures))
        assert len(model.calls) == 3 * epochs
    assert torch.equal(model.head.weight, whole.head.weight)


@pytest.mark.parametrize("changes", [{"schedule": "linear"}, {"schedule": "one_cycle"}, {"warmup": 0.5}])
def test_extension_follows_the_schedule_of_the_whole_and_says_so(changes, tmp_path):
    args = TrainingArgs(queries_per_step=1, max_steps=4, checkpoint=tmp_path, **changes)
    whole = replace(args, max_steps=8, checkpoint=None)
    with optimizer_steps() as expected:
        train(Toy(), toy_groups(8), TOY_TEXTS, whole)
    train(Toy(), toy_groups(8), TOY_TEXTS, args)
    with optimizer_steps() as steps, pytest.warns(ScheduleWarning, match="from 4 to 8 steps: its first 4 had"):
        train(Toy(), toy_groups(8), TOY_TEXTS, replace(args, max_steps=8))
    assert [rate for rate, *_ in steps] == [rate for rate, *_ in expected][4:]


def test_a_training_that_patience_ended_is_extended_by_more_patience(tmp_path, capsys):
    def fit(values: list[float], **changes) -> tuple[Toy, list[dict]]:
        figures, model = iter(values), Toy()
        return model, train(
            model, toy_groups(3), TOY_TEXTS, replace(args, **changes), validate=lambda: next(figures), verbose=True
        )

    args = TrainingArgs(queries_per_step=3, epochs=5, patience=1, checkpoint=tmp_path)
    _, short = fit([0.5, 0.1])
    assert [entry["epoch"] for entry in short] == [1, 2]
    again, found = fit([])
    assert not again.calls
    assert found == short
    assert "nothing to do: patience=1 ended it at step 2 of 5; for more raise it" in capsys.readouterr().out
    # More epochs alone would do nothing; with less patience it might have ended before.
    for changes, this in (
        ({"epochs": 9}, "epochs=9, max_steps=None, patience=1"),
        ({"patience": None, "epochs": 4}, "epochs=4, max_steps=None, patience=None"),
    ):
        with pytest.raises(ValueError, match=rf"patience=1\), of which 2 are done, .*\({this}\): it can only .*longer"):
            fit([], **changes)
    extended, longer = fit([0.2, 0.7, 0.1], patience=3)
    whole, expected = fit([0.5, 0.1, 0.2, 0.7, 0.1], patience=3, checkpoint=None)
    assert [entry["validation"] for entry in longer] == [entry["validation"] for entry in expected]
    assert torch.equal(extended.head.weight, whole.head.weight)
    with pytest.raises(ValueError, match=r"patience=3\), .*patience=2\): it can only be made longer"):
        fit([], patience=2)


def test_where_a_training_goes_on_is_said(stopped, capsys):
    args, _ = stopped
    for changes, line, epochs in (
        ({}, "resuming at step 3 of 6", [1, 2]),
        ({}, "nothing to do: all 6 steps are done", []),
        ({"epochs": 4}, "resuming at step 7 of 12", [3, 4]),
        ({"epochs": 4}, "nothing to do: all 12 steps are done", []),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScheduleWarning)
            train(Toy(), toy_groups(3), TOY_TEXTS, replace(args, **changes), verbose=True)
        shown = capsys.readouterr()
        assert shown.out.startswith(line)
        assert shown.out.count("\n") == 1
        assert lines_in(shown.err) == [f"epoch {epoch}" for epoch in epochs]
    # Raising what does not end it would do nothing.
    with pytest.raises(ValueError, match=r"this one has 12 \(epochs=4, max_steps=20, .*\): .* longer, by raising what"):
        train(Toy(), toy_groups(3), TOY_TEXTS, replace(args, epochs=4, max_steps=20))


def test_state_of_another_model(cross_encoder, plain_encoder, tmp_path):
    args = replace(RECIPE, epochs=1, checkpoint=tmp_path)
    make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    before = (tmp_path / STATE_FILE).read_bytes()
    for name, backbone, changes, different in (
        ("PARADE-avg", cross_encoder, {}, r"class, arguments \(.*aggregation"),
        ("MaxP", cross_encoder, {"window_size": 5, "stride": 3}, r"arguments \(window_size, stride\)"),
        ("MaxP", cross_encoder, {"max_doc_len": 6}, r"arguments \(max_doc_len\)"),
        ("MaxP", plain_encoder, {}, "starting weights, trainable weights"),
    ):
        with pytest.raises(ValueError, match=f"not the same are its {different}"):
            make(name, backbone, training=args, **changes).fit(RUN, JUDGED)
    with pytest.raises(ValueError, match="not the same are its validation data"):
        make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED, RUN, JUDGED)
    assert (tmp_path / STATE_FILE).read_bytes() == before
    # What says nothing about weights and scores may change, and the backbone may lie elsewhere.
    moved = shutil.copytree(cross_encoder, tmp_path / "moved")
    same = make("MaxP", moved, training=args, batch_size=3, verbose=False)
    assert same.fit(RUN, JUDGED).history["epoch"].tolist() == [1]


def test_interrupted_and_continued_in_the_same_session(tmp_path):
    args = TrainingArgs(epochs=4, queries_per_step=3, checkpoint=tmp_path, save_steps=1)
    whole, model = Toy(), Toy()
    expected = train(whole, toy_groups(3), TOY_TEXTS, replace(args, checkpoint=None), history=[{"epoch": 2, "step": 7}])
    history = [{"epoch": 2, "step": 7}]
    for _ in range(2):
        with optimizer_steps(stop_at=2):
            train(model, toy_groups(3), TOY_TEXTS, args, history=history)
    for _ in range(2):  # the second time nothing is left to do
        train(model, toy_groups(3), TOY_TEXTS, args, history=history)
        assert [(e["epoch"], e["step"]) for e in history] == [(2, 7), (3, 8), (4, 9), (5, 10), (6, 11)]
        assert [(e["epoch"], e["step"]) for e in history] == [(e["epoch"], e["step"]) for e in expected]
        assert torch.equal(model.head.weight, whole.head.weight)
    # A model that has learned something else since then is another one.
    train(model, toy_groups(3), TOY_TEXTS, replace(args, checkpoint=None))
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        train(model, toy_groups(3), TOY_TEXTS, args)


@pytest.mark.bytes
def test_adapters_that_were_interrupted_need_the_model_anew(cross_encoder, tmp_path):
    args = replace(RECIPE, epochs=2, save_steps=1, lora=Lora(rank=2))
    whole = make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    args = replace(args, checkpoint=tmp_path)
    model = make("MaxP", cross_encoder, training=args)
    with optimizer_steps(stop_at=3):  # the first step has a rate of 0
        model.fit(RUN, JUDGED)
    # Its adapters are part of its weights now.
    with pytest.raises(ValueError, match="starting weights; make the model as it was made then to go on"):
        model.fit(RUN, JUDGED)
    resumed = make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    for one, other in zip(resumed.load_scorer().parameters(), whole.load_scorer().parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_is_never_one_that_has_diverged(tmp_path):
    args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, save_steps=1)
    with pytest.raises(FloatingPointError, match="the training diverged: after step 2"):
        train(Broken(2, math.nan), toy_groups(5), TOY_TEXTS, args)
    resumed = Toy()
    train(resumed, toy_groups(5), TOY_TEXTS, args)
    assert len(resumed.calls) == 4  # from the state after the first step


def test_best_weights_and_patience_survive(tmp_path):
    args = TrainingArgs(
        epochs=9, queries_per_step=3, learning_rates={"": 0.1}, warmup=0.0, patience=3, checkpoint=tmp_path
    )
    weights, model = [], Toy()
    figures = [0.1, 0.9, 0.5, 0.5, 0.5, 0.95]

    def validate_until_stopped() -> float:
        weights.append(model.head.weight.item())
        if len(weights) == 4:
            raise KeyboardInterrupt
        return figures[len(weights) - 1]

    with pytest.raises(KeyboardInterrupt):
        train(model, toy_groups(3), TOY_TEXTS, args, validate=validate_until_stopped)
    resumed = Toy()
    rest = iter(figures[3:])
    history = train(resumed, toy_groups(3), TOY_TEXTS, args, validate=lambda: next(rest))
    assert [entry["validation"] for entry in history] == [0.1, 0.9, 0.5, 0.5, 0.5]
    assert resumed.head.weight.item() == weights[1]
