"""Training that is killed, and continues."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import Lora, TrainingArgs, state, train
from pyterrier_longdoc.training.state import STATE_FILE

from ..support import processes
from ..support.systems import make
from ..training.test_aborted import interrupted
from ..training.test_training import Toy, toy_groups, toy_task

RUN, JUDGED = toy_task(0, queries=5)
RECIPE = TrainingArgs(
    epochs=5, queries_per_step=2, learning_rates={"": 1e-2}, metric="RR", save_steps=2, schedule="linear"
)  # 3 steps an epoch


def fit(backbone: str, args: TrainingArgs, out: Path, *, die_at: int | None = None) -> None:
    """Trains, or kills itself in the step of that number, and saves the model."""
    model = make("PARADE-attn", backbone, training=args)
    forward, calls = model.load_scorer().forward, 0

    def counted(*inputs):
        nonlocal calls
        calls += model.load_scorer().training
        if die_at is not None and calls == 2 * die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*inputs)

    model.load_scorer().forward = counted
    model.fit(RUN, JUDGED, RUN, JUDGED)
    del model.load_scorer().forward
    model.save(out)


def in_process(*arguments, **options) -> int:
    return processes.wait(processes.start(lambda: fit(*arguments, **options)))


posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@posix
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": Lora(rank=2)}, {"epoch_decay": 0.5, "restart_each_epoch": True}])
def test_killed_run_ends_with_the_same_weights(changes, cross_encoder, tmp_path):
    args = replace(RECIPE, **changes)
    assert in_process(cross_encoder, args, tmp_path / "whole") == 0
    args = replace(args, checkpoint=tmp_path / "state")
    # Before the first state, then again and again: each life is a few steps.
    for die_at in (1, 4, 3, 3):
        assert in_process(cross_encoder, args, tmp_path / "killed", die_at=die_at) == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()
    assert in_process(cross_encoder, args, tmp_path / "killed") == 0
    for name in ("model.safetensors",):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    killed, whole = (ld.PARADE.load(tmp_path / name).history for name in ("killed", "whole"))
    pd.testing.assert_frame_equal(
        killed.drop(columns="documents_per_second"), whole.drop(columns="documents_per_second")
    )


@posix
def test_killed_while_the_state_is_written(tmp_path):
    def die_half_way(tensors, path, **options):
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArgs(epochs=6, queries_per_step=2, learning_rates={"": 1e-2}, checkpoint=tmp_path, save_steps=1)

    def run() -> None:
        steps = iter(range(100))

        def on_step() -> None:
            if next(steps) == 4:
                state.save_file = die_half_way

        train(Toy(), toy_groups(4), args, on_step=on_step)

    assert processes.wait(processes.start(run)) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.part"))) == 1
    resumed, whole = Toy(), Toy()
    whole.load_state_dict(resumed.state_dict())
    history = train(resumed, toy_groups(4), args)
    assert len(resumed.calls) == 4 * 6 - 4 * 2  # the fifth step's state was never complete
    train(whole, toy_groups(4), replace(args, checkpoint=None))
    assert torch.equal(resumed.head.weight, whole.head.weight)
    assert [entry["epoch"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def stopped(folder: Path, **changes) -> TrainingArgs:
    """A recipe whose run was interrupted in its third step and has a state of the second."""
    args = TrainingArgs(queries_per_step=1, epochs=2, checkpoint=folder, save_steps=1, **changes)
    model = Toy()

    def interrupt() -> None:
        if len(model.calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, toy_groups(3), args, on_step=interrupt)
    return args


def test_state_is_safetensors(tmp_path):
    stopped(tmp_path)
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    assert {key.split("/")[0] for key in tensors} == {"model", "optimizer"}
    assert "optimizer/head.weight/exp_avg" in tensors


def test_full_disk(tmp_path, monkeypatch):
    args = stopped(tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(OSError, match=r"cannot be written to .*No space left.*the last state is still there"):
        train(Toy(), toy_groups(3), args)
    assert (tmp_path / STATE_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    monkeypatch.undo()
    model = Toy()
    train(model, toy_groups(3), args)
    assert len(model.calls) == 4


def test_disk_that_is_full_when_files_are_flushed(tmp_path, monkeypatch):
    args = stopped(tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot be written to"):
        train(Toy(), toy_groups(3), args)
    assert (tmp_path / STATE_FILE).read_bytes() == before


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b"", lambda b: b"{}" + b[2:], lambda b: b[8:]])
def test_unreadable_state(damage, tmp_path):
    args = stopped(tmp_path)
    path = tmp_path / STATE_FILE
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    model = Toy()
    with pytest.raises(ValueError, match=r"state of the training in .* cannot be read: .*It was left as it is"):
        train(model, toy_groups(3), args)
    assert path.read_bytes() == damaged
    assert not model.calls
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 3}, r"not the same are its recipe \(epochs\)"),
        ({"seed": 1, "margin": 2.0}, r"not the same are its recipe \(margin, seed\)"),
    ],
)
def test_state_of_another_recipe(changes, message, tmp_path):
    args = stopped(tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(ValueError, match=message):
        train(Toy(), toy_groups(3), replace(args, **changes))
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_state_of_other_data_or_weights(tmp_path):
    args = stopped(tmp_path)
    with pytest.raises(ValueError, match="not the same are its training data"):
        train(Toy(), toy_groups(2), args)
    frozen = Toy()
    frozen.encoder.requires_grad_(False)
    with pytest.raises(ValueError, match="not the same are its trainable weights"):
        train(frozen, toy_groups(3), args)
    other = Toy()
    torch.nn.init.ones_(other.encoder["first"].bias)
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        train(other, toy_groups(3), args)
    # How often states are written is not part of the recipe.
    train(Toy(), toy_groups(3), replace(args, save_steps=2))


def test_finished_run_is_not_trained_again(tmp_path):
    args = TrainingArgs(epochs=2, checkpoint=tmp_path, learning_rates={"": 0.1})
    figures = iter([0.5, 0.1])
    first = Toy()
    history = train(first, toy_groups(3), args, validate=lambda: next(figures))
    again, steps = Toy(), []
    earlier = [{"epoch": 1, "step": 1, "loss": 0.0}]
    found = train(again, toy_groups(3), args, validate=lambda: 0.0, on_step=lambda: steps.append(1), history=earlier)
    assert not again.calls
    assert steps == [1]  # the model counts as trained
    assert torch.equal(again.head.weight, first.head.weight)
    assert found == [{"epoch": 1, "step": 1, "loss": 0.0}, *history]


@pytest.mark.parametrize(
    ("name", "changes", "different"),
    [
        ("PARADE-avg", {}, r"class, arguments \(.*aggregation"),
        ("MaxP", {"window_size": 5, "stride": 3}, r"arguments \(window_size, stride\)"),
        ("MaxP", {"max_doc_len": 6}, r"arguments \(max_doc_len\)"),
    ],
)
def test_state_of_another_model(name, changes, different, cross_encoder, tmp_path):
    args = replace(RECIPE, epochs=1, checkpoint=tmp_path)
    make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    before = (tmp_path / STATE_FILE).read_bytes()
    other = make(name, cross_encoder, training=args)
    for argument, value in changes.items():
        setattr(other, argument, value)
    with pytest.raises(ValueError, match=f"not the same are its {different}"):
        other.fit(RUN, JUDGED)
    assert (tmp_path / STATE_FILE).read_bytes() == before
    with pytest.raises(ValueError, match="not the same are its validation data"):
        make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED, RUN, JUDGED)
    # What says nothing about weights and scores may change, and the backbone may lie elsewhere.
    moved = shutil.copytree(cross_encoder, tmp_path / "moved")
    same = make("MaxP", moved, training=args, batch_size=3, verbose=False)
    assert same.fit(RUN, JUDGED).history["epoch"].tolist() == [1]


def test_state_of_another_backbone(cross_encoder, tmp_path):
    args = replace(RECIPE, epochs=1, checkpoint=tmp_path / "state")
    make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    other = make("MaxP", cross_encoder, training=args)
    with torch.no_grad():
        next(other.load_scorer().encoder.parameters())[5] += 1.0
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        other.fit(RUN, JUDGED)


def test_interrupted_and_continued_in_the_same_session(tmp_path):
    args = TrainingArgs(epochs=4, queries_per_step=3, checkpoint=tmp_path, save_steps=1)
    whole, model, steps = Toy(), Toy(), []

    def interrupt() -> None:
        steps.append(1)
        if len(steps) in (2, 4):
            raise KeyboardInterrupt

    expected = train(whole, toy_groups(3), replace(args, checkpoint=None), history=[{"epoch": 2, "step": 7}])
    history = [{"epoch": 2, "step": 7}]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(model, toy_groups(3), args, on_step=interrupt, history=history)
    for _ in range(2):  # the second time nothing is left to do
        train(model, toy_groups(3), args, history=history)
        assert [(e["epoch"], e["step"]) for e in history] == [(2, 7), (3, 8), (4, 9), (5, 10), (6, 11)]
        assert [(e["epoch"], e["step"]) for e in history] == [(e["epoch"], e["step"]) for e in expected]
        assert torch.equal(model.head.weight, whole.head.weight)
    # A model that has learned something else since then is another one.
    train(model, toy_groups(3), replace(args, checkpoint=None))
    with pytest.raises(ValueError, match="not the same are its starting weights"):
        train(model, toy_groups(3), args)


def test_adapters_that_were_interrupted_need_the_model_anew(cross_encoder, tmp_path, monkeypatch):
    args = replace(RECIPE, epochs=2, save_steps=1, lora=Lora(rank=2))
    whole = make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    args = replace(args, checkpoint=tmp_path)
    model = make("MaxP", cross_encoder, training=args)
    interrupted(model, 3, monkeypatch)
    # Its adapters are part of its weights now.
    with pytest.raises(ValueError, match="starting weights; make the model as it was made then to go on"):
        model.fit(RUN, JUDGED)
    resumed = make("MaxP", cross_encoder, training=args).fit(RUN, JUDGED)
    for one, other in zip(resumed.load_scorer().parameters(), whole.load_scorer().parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_is_never_one_that_has_diverged(tmp_path):
    class Diverging(Toy):
        def forward(self, queries, texts):
            scores = super().forward(queries, texts)
            if len(self.calls) == 2:
                scores.register_hook(lambda gradient: gradient * float("nan"))
            return scores

    args = TrainingArgs(queries_per_step=1, checkpoint=tmp_path, save_steps=1)
    with pytest.raises(FloatingPointError, match="the training diverged: after step 2"):
        train(Diverging(), toy_groups(5), args)
    resumed = Toy()
    train(resumed, toy_groups(5), args)
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
        train(model, toy_groups(3), args, validate=validate_until_stopped)
    resumed = Toy()
    rest = iter(figures[3:])
    history = train(resumed, toy_groups(3), args, validate=lambda: next(rest))
    assert [entry["validation"] for entry in history] == [0.1, 0.9, 0.5, 0.5, 0.5]
    assert resumed.head.weight.item() == weights[1]
