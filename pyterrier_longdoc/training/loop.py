"""The training loop: draw examples, score them, compute the loss, step; then validate, note and save."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import pyterrier as pt
import torch
from safetensors import SafetensorError
from torch import nn

from ..common.frames import Text
from ..common.progress import work_bar
from ..common.signals import take_back_signals
from .examples import Example, Pick, TrainingSet, draw_epoch, examples_per_epoch, make_examples
from .losses import LOSSES
from .model_changes import adapted, dropping, recomputing
from .processes import Processes
from .recipe import TrainingArgs, seed_of
from .resume import StateFile, optimizer_states
from .schedule import BETAS, make_optimizer, rate_and_beta

Objective = Callable[[Any, Sequence[Example], TrainingArgs], torch.Tensor]
"""`(model, examples, recipe) -> loss`: of some examples, summed, a scalar with a graph."""


def train(
    model: nn.Module,
    data: TrainingSet,
    recipe: TrainingArgs,
    *,
    validate: Callable[[], float] | None = None,
    on_step: Callable[[], object] = lambda: None,
    history: list[dict[str, Any]] | None = None,
    objective: Objective | None = None,
    settings: Callable[[], Mapping[str, Any]] = dict,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Train a model in place; an interrupted one keeps the weights of the best validation, or else of the last step.

    Args:
        model: `model(queries, texts) -> (B,)` scores with a graph.
        data: what to train on, made by `prepare`.
        recipe: how.
        validate: called after each epoch, or every `validate_steps`, for a figure of merit; the weights with the best
            one are kept.
        on_step: called after each optimiser step.
        history: gets an entry at the end of each epoch and at each validation; None makes a new list.
        objective: the loss of examples, for methods that need more than scores; None for the recipe's.
        settings: returns the model's settings, JSON-able: a training is not continued with other settings.
        verbose: show a line for each epoch.

    Returns:
        `history`: `epoch` and `step` from 1, `loss` (mean per example since the last entry), `learning_rate` (the
        highest), `documents_per_second` and, after a validation, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
        ValueError: if the recipe does not fit the data or the model, or the checkpoint folder holds another training.
    """
    if recipe.patience is not None and validate is None:
        raise ValueError(f"patience={recipe.patience} needs validation data: give fit topics_or_res_va and qrels_va")
    if LOSSES[recipe.loss].teacher and any(group.targets is None for group in data.groups):
        problem = f"loss={recipe.loss!r} needs the teacher's scores, teacher_field={recipe.teacher_field!r}"
        raise ValueError(f"{problem}: put TeacherScores(teacher) before the student")
    with ExitStack() as stack:
        # torch's global random state is restored afterwards.
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        torch.manual_seed(seed_of(recipe))
        if recipe.dropout is not None:
            stack.enter_context(dropping(model, recipe.dropout))
        if recipe.lora is not None:
            stack.enter_context(adapted(model, recipe.lora))
        if recipe.gradient_checkpointing:
            stack.enter_context(recomputing(model))
        run = Run(model, data, recipe, objective or ranking_loss, [] if history is None else history)
        stack.callback(run.end)
        if recipe.checkpoint is not None and run.resume(settings()):
            on_step()
            if run.rank == 0:
                step, total, is_done = run.state.step, run.total_steps, run.is_over and run.state.is_reported
                pt.tqdm.write(f"{'nothing to do' if is_done else 'resuming'} after step {step} of {total}")
        take_back_signals()
        model.train()
        try:
            run.report(validate)  # of a step that an interruption came after
            while not run.is_over:
                run.epoch(validate, on_step, verbose)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(run.interrupted()) from None
    return run.history


def ranking_loss(model: nn.Module, examples: Sequence[Example], recipe: TrainingArgs) -> torch.Tensor:
    """Return the recipe's loss of the scores of each example's candidates, summed."""
    queries, texts, sizes, losses = list[str](), list[Text](), list[int](), list[torch.Tensor]()
    for example in examples:
        queries += [example.query] * len(example.texts)
        texts += example.texts
        sizes.append(len(example.texts))
    for example, scores in zip(examples, model(queries, texts).float().split(sizes), strict=True):
        labels = scores.new_tensor(example.labels)
        targets = None if example.targets is None else scores.new_tensor(example.targets)[None]
        losses.append(LOSSES[recipe.loss].compute(scores[None], labels[None], targets, recipe))
    return torch.stack(losses).sum()


@dataclass
class State:
    """How far a training is; the checkpoint folder has all of it."""

    step: int = 0  # optimiser steps done
    epoch: int = 0  # the present one, from 0
    position: int = 0  # examples done in the present epoch
    is_reported: bool = True  # whether the last step's validation and entry of the history are done
    rate: float = 0.0  # the last step's learning rate, the highest
    loss: float = 0.0  # sum of losses since the last entry of the history
    examples: int = 0  # examples of these losses
    documents: float = 0.0  # documents of these examples
    seconds: float = 0.0  # time for these examples, without validation
    best: float | None = None  # the best figure of merit so far
    worse: int = 0  # validations since then


class Run:
    """A training under way: weights, optimiser and state, and how they are saved and continued.

    Entries that `history` has at the start belong to earlier trainings.
    """

    def __init__(
        self, model: nn.Module, data: TrainingSet, recipe: TrainingArgs, objective: Objective, history: list[Any]
    ) -> None:
        self.model, self.data, self.recipe, self.objective, self.history = model, data, recipe, objective, history
        self.old_entries = len(history)
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.processes = Processes(model, recipe) if several or recipe.trackers else None
        # The first process writes and reports.
        self.rank: int = 0 if self.processes is None else self.processes.rank
        self.number: int = 1 if self.processes is None else self.processes.number
        self.optimizer = make_optimizer(model, recipe)
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.dtype == "float16")
        self.examples_per_epoch = examples_per_epoch(data.groups, recipe)
        self.steps_per_epoch = -(-self.examples_per_epoch // recipe.queries_per_step)
        self.total_steps = min(recipe.epochs * self.steps_per_epoch, recipe.max_steps or sys.maxsize)
        self.state = State()
        self.best: dict[str, torch.Tensor] = {}  # the weights that validated best
        self.is_between_steps = True  # whether weights and state belong together
        self.saved_step: int | None = None
        self.file: StateFile | None = None

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or `patience` has ended the training."""
        patience = self.recipe.patience
        return self.state.step >= self.total_steps or (patience is not None and self.state.worse >= patience)

    def epoch(self, validate: Callable[[], float] | None, on_step: Callable[[], object], verbose: bool) -> None:
        """Do what is left of the present epoch."""
        state, recipe = self.state, self.recipe
        picks = draw_epoch(self.data.groups, recipe, state.epoch)
        end = min(len(picks), state.position + (self.total_steps - state.step) * recipe.queries_per_step)
        # An epoch that is complete in the checkpoint folder has no line.
        has_bar = verbose and self.rank == 0 and state.position < end
        bar_of_epoch = partial(work_bar, f"epoch {state.epoch + 1}", "query", end, shown=True, done=state.position)
        with bar_of_epoch() if has_bar else nullcontext() as bar:
            while state.position < len(picks) and not self.is_over:
                batch = picks[state.position : state.position + recipe.queries_per_step]
                self.step(batch)
                on_step()
                if bar is not None:
                    loss, rate, speed = self.figures().values()
                    bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.1e}", documents=f"{speed:.1f}/s", refresh=False)
                    bar.update(len(batch))
                self.report(validate)
        if state.position == len(picks):
            self.is_between_steps = False
            state.epoch, state.position = state.epoch + 1, 0
            if recipe.restart_each_epoch:
                self.optimizer.state.clear()
            self.is_between_steps = True

    def step(self, batch: Sequence[Pick]) -> None:
        """Make an optimiser step, each process with a part of its queries; none if the loss is not finite."""
        start, state, recipe = time.perf_counter(), self.state, self.recipe
        examples = make_examples(batch[self.rank :: self.number], self.data, recipe, state.epoch)
        factor, beta = rate_and_beta(recipe, state.step, self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = group["peak"] * factor, (beta, BETAS[1])
        # Dropout depends on the step alone, so that a continued training has the same.
        torch.manual_seed((seed_of(recipe) * 1_000_003 + state.step * 4099 + self.rank) % 2**63)
        loss, documents = self._backward(examples, len(batch)), float(sum([len(e.texts) for e in examples]))
        if self.processes is not None:
            loss, documents = self.processes.sum(loss, documents)
        if not math.isfinite(loss):
            queries = ", ".join([repr(example.qid) for example in examples])
            raise FloatingPointError(
                f"the loss is {loss} in step {state.step + 1}, of the queries {queries}, and the weights are those "
                f"before it: lower learning_rates, set max_grad_norm, or take dtype='bfloat16' in place of 'float16'"
            )
        if self.processes is not None:
            self.processes.sum_gradients(self.model)
        if recipe.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
        self.is_between_steps = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        state.step += 1
        state.position += len(batch)
        state.loss += loss
        state.examples += len(batch)
        state.documents += documents
        state.seconds += time.perf_counter() - start
        state.rate = max(map(itemgetter("lr"), self.optimizer.param_groups))
        state.is_reported = False
        self.is_between_steps = True

    def _backward(self, examples: Sequence[Example], examples_of_all: int) -> float:
        """Add the gradients of examples; return the sum of their losses."""
        dtype, size = getattr(torch, self.recipe.dtype), self.recipe.queries_per_forward
        divisor = examples_of_all if self.recipe.reduction == "mean" else 1
        total = 0.0
        # Texts of like length share a pass, so that little is padded.
        ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
        for start in range(0, len(ordered), size):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.objective(self.model, ordered[start : start + size], self.recipe)
            total += loss.item()
            self.scaler.scale(loss / divisor).backward()
        return total

    def figures(self) -> dict[str, float]:
        """Return loss, learning rate and speed of the steps since the last entry of the history."""
        state = self.state
        return {
            "loss": state.loss / max(state.examples, 1),
            "learning_rate": state.rate,
            "documents_per_second": state.documents / state.seconds if state.seconds else 0.0,
        }

    def report(self, validate: Callable[[], float] | None) -> None:
        """Validate, write an entry of the history and save, where each is due after a step that is not reported."""
        state, recipe = self.state, self.recipe
        if state.is_reported:
            return
        epoch_ends, every = state.position == self.examples_per_epoch, recipe.validate_steps
        due = state.step == self.total_steps or (epoch_ends if every is None else state.step % every == 0)
        if not (due or epoch_ends or state.step % recipe.save_steps == 0):
            return
        # In all processes: diverged weights must not replace the saved ones.
        for name in self._diverged():
            problem = f"the training diverged: after step {state.step} the weights {name!r} are not finite"
            raise FloatingPointError(f"{problem}; make a new model and lower learning_rates, or set max_grad_norm")
        if due or epoch_ends:
            origin = self.history[self.old_entries - 1] if self.old_entries else {"epoch": 0, "step": 0}
            entry = {"epoch": origin["epoch"] + state.epoch + 1, "step": origin["step"] + state.step}
            entry |= self.figures()
            if due and validate is not None:
                entry["validation"] = self._validate(validate)
            self.is_between_steps = False
            self.history.append(entry)
            if self.processes is not None:
                self.processes.log(entry)
            state.loss, state.examples, state.documents, state.seconds = 0.0, 0, 0.0, 0.0
        state.is_reported = self.is_between_steps = True
        if self.file is not None:
            self._save(self.file)

    def _diverged(self) -> list[str]:
        """Return the names of the weights that are not finite."""
        return [name for name, tensor in trained_tensors(self.model).items() if not torch.isfinite(tensor).all()]

    def _validate(self, validate: Callable[[], float]) -> float:
        self.model.eval()
        value = validate()
        if self.processes is not None:  # the value of the first process counts
            (value,) = self.processes.sum(value if self.rank == 0 else 0.0)
        self.model.train()
        self.is_between_steps, state = False, self.state
        if state.best is None or value > state.best:
            state.best, state.worse = value, 0
            self.best = {name: tensor.clone() for name, tensor in trained_tensors(self.model).items()}
        else:
            state.worse += 1
        return value

    def interrupted(self) -> str:
        """Save what can be saved; return what an interruption leaves, and how to go on."""
        if self.file is not None and self.is_between_steps and not self._diverged():
            with suppress(OSError, SafetensorError):  # a full disk: the state before stays
                self._save(self.file)
        kept = "the best validated weights are" if self.best else "its weights are"
        how = "fit trains on from them with a new schedule; TrainingArgs(checkpoint=FOLDER) makes it go on where it was"
        if self.file is not None:
            goes_on = "begins again" if self.saved_step is None else f"goes on after step {self.saved_step}"
            how = f"make the model anew and repeat the call: it {goes_on}, in {str(self.recipe.checkpoint)!r}"
        return f"training interrupted after step {self.state.step} of {self.total_steps}: {kept} kept; {how}"

    def end(self) -> None:
        """Leave the model with its best weights, out of training."""
        if self.best:
            copy_into(trained_tensors(self.model), self.best)
        # The next training must not begin with the gradients of an interrupted step.
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        if self.processes is not None:
            self.processes.end()

    def _save(self, file: StateFile) -> None:
        if self.rank == 0:
            tensors = {"model": trained_tensors(self.model), "best": self.best}
            tensors |= {"optimizer": optimizer_states(self.model, self.optimizer)}
            history = self.history[self.old_entries :]
            file.write(tensors, {"state": asdict(self.state), "history": history, "scaler": self.scaler.state_dict()})
        self.saved_step = self.state.step

    def resume(self, settings: Mapping[str, Any]) -> bool:
        """Continue from the state in the checkpoint folder, which must be of this training, if there is one."""
        file = StateFile(self.model, self.data, self.recipe, settings, self.total_steps)
        contents = file.read()
        if contents is not None:
            tensors, values = contents
            self.state = State(**values["state"])
            copy_into(trained_tensors(self.model), tensors["model"])
            parameters = dict(self.model.named_parameters())
            for name, value in tensors["optimizer"].items():
                parameter, _, quantity = name.rpartition("/")
                self.optimizer.state[parameters[parameter]][quantity] = value.to(self.device)
            if values["scaler"]:
                self.scaler.load_state_dict(values["scaler"])
            self.history += values["history"]
            self.best = {name: tensor.to(self.device) for name, tensor in tensors["best"].items()}
            self.saved_step = self.state.step
        self.file = file
        return contents is not None


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that training changes: trainable parameters, and the buffers of a saved model."""
    saved, tensors = model.state_dict().keys(), {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.requires_grad or (name in saved and not isinstance(tensor, nn.Parameter)):
            tensors[name] = tensor.detach()
    return tensors


def copy_into(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy each value into the tensor of its name."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
