"""A training under way: weights, optimiser, where it is, and how it continues after a kill."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .args import TrainingArgs
from .groups import Group
from .identity import Start, check_same, leave, start_of, training_identity
from .objective import Objective
from .processes import Processes
from .sampling import Example
from .schedule import make_optimizer, rate_factor, set_rates
from .state import load_state, optimizer_tensors, restore_optimizer, restore_tensors, save_state, trained_tensors


@dataclass
class Progress:
    """Where a training is; all of it is in the saved state.

    Attributes:
        step: optimiser steps done.
        epoch: the present epoch, from 0.
        position: examples of the present epoch that are done.
        loss: sum of losses since the last entry of the history.
        examples: their number.
        best: the best figure of merit so far.
        worse: validations since then.
        finished: whether nothing is left to do.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    loss: float = 0.0
    examples: int = 0
    best: float | None = None
    worse: int = 0
    finished: bool = False


@dataclass(eq=False)
class Run:
    """A training under way.

    Args:
        scorer: the model.
        args: the recipe.
        objective: the loss of some examples.
        steps_per_epoch: optimiser steps of an epoch.
        history: where entries go; those that are already there belong to earlier trainings.

    Attributes:
        best: the weights that validated best, by name.
        rate: the highest learning rate of the last step.
    """

    scorer: nn.Module
    args: TrainingArgs
    objective: Objective
    steps_per_epoch: int
    history: list[dict[str, Any]]
    progress: Progress = field(default_factory=Progress)
    best: dict[str, torch.Tensor] | None = None
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.processes = Processes.start(self.scorer, self.args)
        self.optimizer = make_optimizer(self.scorer, self.args)
        self.device = next(self.scorer.parameters()).device.type
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.args.dtype == "float16")
        self._start: Start | None = None
        self._identity: dict[str, Any] = {}
        self._earlier_entries = len(self.history)
        self._seconds = self._documents = 0.0

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole training, if it is not stopped early."""
        steps = self.args.epochs * self.steps_per_epoch
        return steps if self.args.max_steps is None else min(steps, self.args.max_steps)

    @property
    def loss(self) -> float:
        """Mean per example since the last entry of the history."""
        return self.progress.loss / max(self.progress.examples, 1)

    @property
    def documents_per_second(self) -> float:
        """Since the last entry of the history, without validation."""
        return self._documents / self._seconds if self._seconds else 0.0

    # A step.

    def step(self, examples: Sequence[Example], examples_of_all: int) -> None:
        """Learns from some examples.

        Args:
            examples: this process's part of the step.
            examples_of_all: of all processes.

        Raises:
            FloatingPointError: if the loss is not finite; nothing is learned then.
        """
        start = time.perf_counter()
        at = self.progress.step
        self.rate = set_rates(self.optimizer, rate_factor(self.args, at, self.steps_per_epoch, self.total_steps))
        # Dropout depends on the step alone: it is the same whether or not the run was killed before.
        torch.manual_seed((self.args.seed * 1_000_003 + at * 4099 + self.processes.rank) % 2**63)
        divisor = examples_of_all if self.args.reduction == "mean" else 1
        own_loss = self._backward(examples, divisor)
        loss, documents = self.processes.sum(own_loss, sum(len(example.texts) for example in examples))
        if not math.isfinite(loss):
            queries = ", ".join(repr(example.qid) for example in examples)
            raise FloatingPointError(f"the loss is {loss} in the step of the queries {queries}; lower learning_rates")
        self.processes.sum_gradients(self.scorer)
        if self.args.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.scorer.parameters(), self.args.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.position += examples_of_all
        self.progress.loss += loss
        self.progress.examples += examples_of_all
        self._documents += documents
        self._seconds += time.perf_counter() - start

    def _backward(self, examples: Sequence[Example], divisor: int) -> float:
        """Adds the gradients of some examples; returns the sum of their losses, as far as that is finite."""
        dtype = getattr(torch, self.args.dtype)
        total = 0.0
        # Texts of like length next to each other, so that little is padded.
        ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
        for start in range(0, len(ordered), self.args.queries_per_forward):
            with torch.autocast(self.device, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.objective(self.scorer, ordered[start : start + self.args.queries_per_forward])
            total += loss.item()
            if not math.isfinite(total):
                break
            self.scaler.scale(loss / divisor).backward()
        return total

    # After a step.

    def report(self, validate: Callable[[], float] | None, *, epoch_ends: bool) -> None:
        """Validates and writes an entry of the history, if it is time for that; tells whether training ends."""
        progress, args = self.progress, self.args
        last = progress.step == self.total_steps
        due = last or (epoch_ends if args.validate_steps is None else progress.step % args.validate_steps == 0)
        saves = due or epoch_ends or progress.step % args.save_steps == 0
        if saves:
            self._check_weights()  # in all processes; a state that has diverged must not replace a good one
        if due or epoch_ends:
            earlier = self.history[self._earlier_entries - 1] if self._earlier_entries else {"epoch": 0, "step": 0}
            entry = {
                "epoch": earlier["epoch"] + progress.epoch + 1,
                "step": earlier["step"] + progress.step,
                "loss": self.loss,
                "learning_rate": self.rate,
                "documents_per_second": self.documents_per_second,
            }
            if due and validate is not None:
                entry["validation"] = self._validate(validate)
            self.history.append(entry)
            self.processes.log(entry)
            progress.loss, progress.examples = 0.0, 0
            self._seconds = self._documents = 0.0
        progress.finished = last or (args.patience is not None and progress.worse >= args.patience)
        if saves:
            self.save()

    def _check_weights(self) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in trained_tensors(self.scorer).values()):
            raise FloatingPointError(
                f"the training diverged: after step {self.progress.step} there are weights that are not finite; make a "
                f"new model and lower learning_rates, or set max_grad_norm"
            )

    def _validate(self, validate: Callable[[], float]) -> float:
        self.scorer.eval()
        value = self.processes.of_main(validate())
        self.scorer.train()
        progress = self.progress
        if progress.best is None or value > progress.best:
            progress.best, progress.worse = value, 0
            self.best = {name: tensor.clone() for name, tensor in trained_tensors(self.scorer).items()}
        else:
            progress.worse += 1
        return value

    def next_epoch(self) -> None:
        """Goes to the start of the next epoch."""
        self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
        if self.args.restart_each_epoch:
            self.optimizer.state.clear()

    def close(self) -> None:
        """Leaves the model with its best weights, out of training."""
        # An aborted query must not leave its gradients to the next training.
        self.scorer.zero_grad(set_to_none=True)
        self.scorer.eval()
        if self.best is not None:
            restore_tensors(self.scorer, self.best)
        self.processes.end()
        if self._start is not None:
            leave(self.scorer, self._start)

    # On disk.

    def save(self) -> None:
        """Writes the state to the checkpoint folder, if there is one."""
        if self.args.checkpoint is not None and self.processes.main:
            sections = {
                "model": trained_tensors(self.scorer),
                "best": self.best or {},
                "optimizer": optimizer_tensors(self.optimizer, self.scorer),
            }
            about = {
                "progress": dataclasses.asdict(self.progress),
                "history": self.history[self._earlier_entries :],
                "scaler": self.scaler.state_dict(),
                "identity": self._identity,
            }
            save_state(Path(self.args.checkpoint), sections, about)

    def restore(self, groups: Sequence[Group], settings: Callable[[], Mapping[str, Any]]) -> bool:
        """Continues from the state in the checkpoint folder, if there is one.

        Args:
            groups: the training data, which must be the same as in the run that wrote it.
            settings: gives those of the model, the same; only asked where there is a checkpoint folder.

        Returns:
            Whether there is one.

        Raises:
            ValueError: if it cannot be read, or belongs to another training.
        """
        if self.args.checkpoint is None:
            return False
        folder = Path(self.args.checkpoint)
        start = start_of(self.scorer, folder, len(self.history))
        self._identity = training_identity(self.scorer, groups, self.args, settings(), start)
        found = load_state(folder)
        if found is not None:
            check_same(found[1]["identity"], self._identity, folder)
            self._continue(start, *found)
        self._start = start
        return found is not None

    def _continue(self, start: Start, sections: dict[str, dict[str, torch.Tensor]], about: dict[str, Any]) -> None:
        """Takes over a state."""
        restore_tensors(self.scorer, sections["model"])
        restore_optimizer(self.optimizer, self.scorer, sections.get("optimizer", {}))
        if about["scaler"]:
            self.scaler.load_state_dict(about["scaler"])
        # What an interrupted run of this process has written is in the state, or done again.
        self._earlier_entries = start.entries
        self.history[start.entries :] = about["history"]
        self.progress = Progress(**about["progress"])
        if "best" in sections:
            device = next(self.scorer.parameters()).device
            self.best = {name: tensor.to(device) for name, tensor in sections["best"].items()}
