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

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import ContinuedTrainingWarning, Lora, TrainingArgs, recipes, resume, train
from pyterrier_longdoc.training.resume import STATE_FILE

from ..support import processes
from ..support.lines import lines_in
from ..support.systems import make, told_of
from ..support.toy import Broken, Toy, optimizer_steps, toy_set, toy_task

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
def test_a_killed_run_ends_with_the_same_weights(changes, cross_encoder, tmp_path):
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
def test_a_training_killed_while_writing_its_state_can_be_resumed(tmp_path):
    def die_half_way(tensors, path, **options):
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArgs(epochs=6, queries_per_step=2, learning_rates={"": 1e-2}, checkpoint=tmp_path, save_steps=1)

    def run() -> None:
        steps = iter(range(100))

        def on_step() -> None:
            if next(steps) == 4:
                resume.save_file = die_half_way

        train(Toy(), toy_set(4), args, on_step=on_step)

    assert processes.wait(processes.start(run)) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.part"))) == 1
    resumed, whole = Toy(), Toy()
    whole.load_state_dict(resumed.state_dict())
    history = train(resumed, toy_set(4), args)
    assert len(resumed.calls) == 4 * 6 - 4 * 2  # the fifth step's state was never complete
    train(whole, toy_set(4), replace(args, checkpoint=None))
    assert torch.equal(resumed.head.weight, whole.head.weight)
    assert [entry["epoch"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


@pytest.fixture
def stopped(tmp_path) -> tuple[TrainingArgs, Path]:
    """A recipe whose run was interrupted in its third step, and the file with the state of the second."""
    args = TrainingArgs(queries_per_step=1, epochs=2, checkpoint=tmp_path, save_steps=1)
    with optimizer_steps(stop_at=3):
        train(Toy(), toy_set(3), args)
    return args, tmp_path / STATE_FILE


def test_a_full_disk_leaves_the_earlier_state(stopped, monkeypatch):
    args, path = stopped
    before = path.read_bytes()
    errors = {
        "save_file": SafetensorError("I/O error: No space left on device (os error 28)"),
        "fsync": OSError(errno.ENOSPC, "No space left on device"),
    }
    for name, error in errors.items():
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "fsync" else resume, name, Mock(side_effect=error))
            with pytest.raises(type(error), match="No space left"):
                train(Toy(), toy_set(3), args)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]
    model = Toy()
    train(model, toy_set(3), args)
    assert len(model.calls) == 4


def test_a_damaged_state_is_refused_and_stays_as_it_is(stopped):
    args, path = stopped
    damaged = path.read_bytes()[:-3]
    path.write_bytes(damaged)
    model = Toy()
    with pytest.raises(ValueError, match=STATE_FILE):
        train(model, toy_set(3), args)
    assert path.read_bytes() == damaged
    assert not model.calls


def frozen() -> Toy:
    model = Toy()
    model.encoder.requires_grad_(False)
    return model


def started_elsewhere() -> Toy:
    model = Toy()
    torch.nn.init.ones_(model.encoder["first"].bias)
    return model


@pytest.mark.parametrize(
    ("make_model", "queries", "changes", "problem"),
    [
        (Toy, 3, {"seed": 1, "margin": 2.0}, "another training"),
        (Toy, 2, {}, "another training"),
        (frozen, 3, {}, "another training"),
        (started_elsewhere, 3, {}, "starting weights"),
        (Toy, 3, {"max_steps": 5}, "longer training"),
    ],
)
def test_the_state_of_another_training_is_refused(make_model, queries, changes, problem, stopped):
    args, path = stopped
    before = path.read_bytes()
    with pytest.raises(ValueError, match=problem):
        train(make_model(), toy_set(queries), replace(args, **changes))
    assert path.read_bytes() == before
    # How often states are written is not part of the recipe.
    train(Toy(), toy_set(3), replace(args, save_steps=2))


def shortened(text, rng):
    return text


def lengthened(text, rng):
    return text + "."


def test_training_with_another_function_is_not_continued(cross_encoder, tmp_path):
    def fit(augment) -> None:
        args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, save_steps=1, augment=augment)
        make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)

    with optimizer_steps(stop_at=3):
        fit(shortened)
    with pytest.raises(ValueError, match="another training"):
        fit(lengthened)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(shortened)
    with pytest.raises(ValueError, match="lambda"):
        fit(lambda text, rng: text)


# Rounds: a training that is continued on purpose.


def test_a_second_fit_warns_that_it_continues_unless_it_has_a_checkpoint(cross_encoder, tmp_path):
    maxp = make("MaxP", cross_encoder, training=replace(RECIPE, epochs=1))
    assert told_of(ContinuedTrainingWarning, lambda: maxp.fit(RUN, JUDGED)) == []
    [message] = told_of(ContinuedTrainingWarning, lambda: maxp.fit(RUN, JUDGED))
    assert message.startswith("this MaxP is already trained")
    started = maxp.apply_attributes().start_from(maxp)
    assert [len(told_of(ContinuedTrainingWarning, lambda: started.fit(RUN, JUDGED))) for _ in range(2)] == [0, 1]
    maxp.training = replace(maxp.training, checkpoint=tmp_path)
    assert told_of(ContinuedTrainingWarning, lambda: maxp.fit(RUN, JUDGED)) == []


def test_interrupted_rounds_continue_with_the_same_weights(cross_encoder, tmp_path):
    rounds = recipes("leaderboard", queries_per_step=2, learning_rates={"": 1e-2}, save_steps=1)
    runs = [RUN.groupby("qid").head(size) for size in (2, 3, 4)]

    def fit(folder: Path) -> ld.MaxP:
        model = make("MaxP", cross_encoder)
        for i, (run, args) in enumerate(zip(runs, rounds, strict=True)):
            model.training = replace(args, checkpoint=folder / str(i))
            model.fit(run, JUDGED)
        return model

    whole = fit(tmp_path / "whole")
    for stop_at in (5, 3):  # in the second round, and one step later
        with optimizer_steps(stop_at=stop_at):
            fit(tmp_path / "interrupted")
    with optimizer_steps() as steps:
        told = told_of(ContinuedTrainingWarning, lambda: fit(tmp_path / "interrupted"))
    assert (len(steps), told) == (3 * 3 - 4 - 2, [])
    with optimizer_steps() as steps:
        again = fit(tmp_path / "interrupted")
    assert not steps
    assert again.history["epoch"].tolist() == [1, 2, 3]
    states = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_finished_run_is_not_trained_again(tmp_path):
    args = TrainingArgs(epochs=2, checkpoint=tmp_path, learning_rates={"": 0.1})
    figures = iter([0.5, 0.1])
    first = Toy()
    history = train(first, toy_set(3), args, validate=lambda: next(figures))
    again, steps = Toy(), []
    earlier = [{"epoch": 1, "step": 1, "loss": 0.0}]
    found = train(again, toy_set(3), args, validate=lambda: 0.0, on_step=lambda: steps.append(1), history=earlier)
    assert not again.calls
    assert steps == [1]  # the model counts as trained
    assert torch.equal(again.head.weight, first.head.weight)
    assert found == [{"epoch": 1, "step": 1, "loss": 0.0}, *history]


def test_the_longest_input_includes_what_was_read_before_an_interruption(cross_encoder, tmp_path):
    longest = []
    for steps in (2, 3, 3):
        recipe = replace(RECIPE, schedule="constant", warmup=0.0, max_steps=steps, checkpoint=tmp_path)
        longest.append(make("MaxP", cross_encoder, training=recipe).fit(RUN, JUDGED).trained_on.longest_input)
    whole = replace(RECIPE, schedule="constant", warmup=0.0, max_steps=3)
    expected = make("MaxP", cross_encoder, training=whole).fit(RUN, JUDGED).trained_on.longest_input
    assert longest == [longest[0], expected, expected]
    assert longest[0] > 0


@pytest.mark.parametrize(
    "changes", [{}, {"lora": Lora(rank=2)}, {"epoch_decay": 0.5, "restart_each_epoch": True}, {"save_steps": 1}]
)
@pytest.mark.parametrize(("first", "then"), [({"max_steps": 4}, {"max_steps": 8}), ({"epochs": 1}, {"epochs": 3})])
def test_an_extended_training_ends_with_the_same_weights(changes, first, then, cross_encoder, tmp_path):
    """With dropout, in the middle and at the end of an epoch, under a schedule that does not depend on the length."""
    args = replace(RECIPE, schedule="constant", warmup=0.0, **changes)
    whole = make("MaxP", cross_encoder, training=replace(args, **then)).fit(RUN, JUDGED)
    args = replace(args, checkpoint=tmp_path)
    short = make("MaxP", cross_encoder, training=replace(args, **first)).fit(RUN, JUDGED)
    extended = make("MaxP", cross_encoder, training=replace(args, **then)).fit(RUN, JUDGED)
    states = [model.model.state_dict() for model in (whole, extended, short)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert extended.history["step"].tolist() == sorted({*short.history["step"], *whole.history["step"]})


def test_a_training_that_patience_ended_is_extended_by_more_patience(tmp_path):
    def fit(values: list[float], **changes) -> tuple[Toy, list[dict]]:
        figures, model = iter(values), Toy()
        return model, train(model, toy_set(3), replace(args, **changes), validate=lambda: next(figures))

    args = TrainingArgs(queries_per_step=3, epochs=5, patience=1, checkpoint=tmp_path)
    _, short = fit([0.5, 0.1])
    assert [entry["epoch"] for entry in short] == [1, 2]
    again, found = fit([])
    assert not again.calls
    assert found == short
    extended, longer = fit([0.2, 0.7, 0.1], patience=3)
    whole, expected = fit([0.5, 0.1, 0.2, 0.7, 0.1], patience=3, checkpoint=None)
    assert [entry["validation"] for entry in longer] == [entry["validation"] for entry in expected]
    assert torch.equal(extended.head.weight, whole.head.weight)
    with pytest.raises(ValueError, match="patience=2"):
        fit([], patience=2)


@pytest.mark.parametrize("verbose", [True, False])
def test_a_resumed_training_says_at_which_step_it_begins(verbose, stopped, capsys):
    args, _ = stopped
    for changes, line, trains in (
        ({}, "resuming after step 2 of 6", True),
        ({}, "nothing to do after step 6 of 6", False),
        ({"epochs": 4, "warmup": 0.2}, "resuming after step 6 of 12", True),
    ):
        train(Toy(), toy_set(3), replace(args, **changes), verbose=verbose)
        shown = capsys.readouterr()
        assert shown.out.startswith(line)
        assert lines_in(shown.err) == (["fit"] if trains and verbose else [])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("PARADE-avg", {}),
        ("MaxP", {"window_size": 5, "stride": 3}),
        ("MaxP", {"max_doc_len": 6}),
        ("MaxP", {"backbone": "plain"}),
        ("MaxP", {"data": (RUN, JUDGED, RUN, JUDGED)}),
    ],
)
def test_the_state_of_another_model_is_refused(name, changes, cross_encoder, plain_encoder, tmp_path):
    args = replace(RECIPE, epochs=1, checkpoint=tmp_path)
    make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    before, changes = (tmp_path / STATE_FILE).read_bytes(), dict(changes)
    backbone = plain_encoder if changes.pop("backbone", None) else cross_encoder
    data = changes.pop("data", (RUN, JUDGED))
    with pytest.raises(ValueError, match="another training"):
        make(name, backbone, training=args, **changes).fit(*data)
    assert (tmp_path / STATE_FILE).read_bytes() == before
    # What says nothing about weights and scores may change, and the backbone may lie elsewhere.
    moved = shutil.copytree(cross_encoder, tmp_path / "moved")
    same = make("MaxP", moved, training=args, batch_size=3, verbose=False)
    assert same.fit(RUN, JUDGED).history["epoch"].tolist() == [1]


def test_an_interrupted_training_continues_in_a_new_model(tmp_path):
    args = TrainingArgs(epochs=4, queries_per_step=3, checkpoint=tmp_path, save_steps=1)
    whole, model, earlier = Toy(), Toy(), {"epoch": 2, "step": 7}
    expected = train(whole, toy_set(3), replace(args, checkpoint=None), history=[dict(earlier)])
    with optimizer_steps(stop_at=3):  # the first step has a rate of 0
        train(model, toy_set(3), args, history=[dict(earlier)])
    resumed = Toy()
    history = train(resumed, toy_set(3), args, history=[dict(earlier)])
    for found in (history, expected):
        assert [(e["epoch"], e["step"]) for e in found] == [(2, 7), (3, 8), (4, 9), (5, 10), (6, 11)]
    assert torch.equal(resumed.head.weight, whole.head.weight)


def test_diverged_weights_are_never_saved(tmp_path):
    args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, save_steps=1)
    with pytest.raises(FloatingPointError, match="after step 2"):
        train(Broken(2, math.nan), toy_set(5), args)
    resumed = Toy()
    train(resumed, toy_set(5), args)
    assert len(resumed.calls) == 4  # from the state after the first step


def test_two_processes_can_write_the_same_state(tmp_path):
    args = TrainingArgs(epochs=30, queries_per_step=1, checkpoint=tmp_path, save_steps=1)
    both = [processes.start(lambda: train(Toy(), toy_set(3), args)) for _ in range(2)]
    assert [processes.wait(one) for one in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
