"""The training loop: draw examples, score them, compute the loss, step; then validate, note and save."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyterrier as pt
import torch
from torch import nn

from ..common.progress import work_bar
from .examples import Example, Pick, TrainingSet, draw_epoch, examples_per_epoch, make_examples
from .losses import LOSSES
from .model_changes import adapted, dropping, recomputing
from .processes import Processes
from .recipe import TrainingArgs, seed_of
from .resume import StateFile, named_states
from .schedule import BETAS, make_optimizer, number_of_steps, rate_and_beta

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
    """Train a model in place; interrupted, it keeps the weights of the best validation, if any, else of the last step.

    Args:
        model: `model(queries, texts) -> (B,)` scores with a graph.
        data: what to train on, made by `prepare`.
        recipe: how.
        validate: called after each epoch, or every `validate_steps`, for a figure of merit; the weights with the best
            one are kept.
        on_step: called after each optimiser step.
        history: gets an entry at the end of each epoch and at each validation; None makes a new list.
        objective: the loss of some examples, for methods that need more than scores; None for the recipe's.
        settings: returns those of the model, JSON-able: with others a training is not continued.
        verbose: show a line for each epoch, and tell where a training goes on.

    Returns:
        `history`: `epoch` and `step` from 1, `loss` (mean per example since the last entry), `learning_rate` (the
        highest), `documents_per_second` and, where it was asked for, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
        ValueError: if the recipe does not fit the data or the model, or the checkpoint folder holds another training.
    """
    if recipe.patience is not None and validate is None:
        raise ValueError(f"patience={recipe.patience} needs validation data: give fit topics_or_res_va and qrels_va")
    if LOSSES[recipe.loss].teacher and any(group.targets is None for group in data.groups):
        what = f"loss={recipe.loss!r} needs the teacher's scores, teacher_field={recipe.teacher_field!r}"
        raise ValueError(f"{what}: put TeacherScores(teacher) before the student")
    with ExitStack() as within:
        # torch's global random state will be as it was.
        within.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        torch.manual_seed(seed_of(recipe))
        if recipe.dropout is not None:
            within.enter_context(dropping(model, recipe.dropout))
        if recipe.lora is not None:
            within.enter_context(adapted(model, recipe.lora))
        if recipe.gradient_checkpointing:
            within.enter_context(recomputing(model))
        run = Run(model, data, recipe, objective or ranking_loss, [] if history is None else history)
        within.callback(run.end)
        if recipe.checkpoint is not None and run.resume(settings()):
            on_step()
            if verbose and run.rank == 0:
                step, total = run.state.step, run.total_steps
                pt.tqdm.write(f"{'nothing to do' if run.is_over else 'resuming'} after step {step} of {total}")
        model.train()
        while not run.is_over:
            run.epoch(validate, on_step, verbose)
    return run.history


def ranking_loss(model: nn.Module, examples: Sequence[Example], recipe: TrainingArgs) -> torch.Tensor:
    """Return the recipe's loss of the scores of each example's candidates, summed."""
    queries = [example.query for example in examples for _ in example.texts]
    texts = [text for example in examples for text in example.texts]
    scores = model(queries, texts).float().split([len(example.texts) for example in examples])
    losses = []
    for example, own in zip(examples, scores, strict=True):
        labels = own.new_tensor(example.labels)
        targets = None if example.targets is None else own.new_tensor(example.targets)[None]
        losses.append(LOSSES[recipe.loss].compute(own[None], labels[None], targets, recipe))
    return torch.stack(losses).sum()


@dataclass
class State:
    """Where a training is; all of it is in the saved state."""

    step: int = 0  # optimiser steps done
    epoch: int = 0  # the present one, from 0
    position: int = 0  # examples of the present epoch that are done
    loss: float = 0.0  # sum of losses since the last entry of the history
    examples: int = 0  # their number
    documents: float = 0.0  # that were scored for them
    seconds: float = 0.0  # that this took, without validation
    best: float | None = None  # figure of merit so far
    worse: int = 0  # validations since then


class Run:
    """A training under way: weights, optimiser, where it is, and how it is saved and continued.

    Entries of `history` that are already there belong to earlier trainings.
    """

    def __init__(
        self, model: nn.Module, data: TrainingSet, recipe: TrainingArgs, objective: Objective, history: list[Any]
    ) -> None:
        self.model, self.data, self.recipe, self.objective, self.history = model, data, recipe, objective, history
        self.earlier_entries = len(history)
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.processes = Processes(model, recipe) if several or recipe.trackers else None
        # The first process writes and reports.
        self.rank: int = 0 if self.processes is None else self.processes.rank
        self.number: int = 1 if self.processes is None else self.processes.number
        self.optimizer = make_optimizer(model, recipe)
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.dtype == "float16")
        self.steps_per_epoch = -(-examples_per_epoch(data.groups, recipe) // recipe.queries_per_step)
        self.total_steps = number_of_steps(recipe, self.steps_per_epoch)
        self.state = State()
        self.best: dict[str, torch.Tensor] = {}  # the weights that validated best
        self.file: StateFile | None = None

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or patience has ended it."""
        patience = self.recipe.patience
        return self.state.step >= self.total_steps or (patience is not None and self.state.worse >= patience)

    def epoch(self, validate: Callable[[], float] | None, on_step: Callable[[], object], verbose: bool) -> None:
        """Do what is left of the present epoch."""
        state, recipe = self.state, self.recipe
        picks = draw_epoch(self.data.groups, recipe, state.epoch)
        end = min(len(picks), state.position + (self.total_steps - state.step) * recipe.queries_per_step)
        # An epoch that was done before a training was made longer has no line.
        shown = verbose and self.rank == 0 and state.position < end
        bar_of_epoch = partial(work_bar, f"epoch {state.epoch + 1}", "query", end, shown=True, done=state.position)
        with bar_of_epoch() if shown else nullcontext() as bar:
            while state.position < len(picks) and not self.is_over:
                chosen = picks[state.position : state.position + recipe.queries_per_step]
                self.step(chosen)
                on_step()
                if bar is not None:
                    loss, rate, speed = self.figures().values()
                    bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.1e}", documents=f"{speed:.1f}/s", refresh=False)
                    bar.update(len(chosen))
                self.report(validate, epoch_ends=state.position == len(picks))
        state.epoch, state.position = state.epoch + 1, 0
        if recipe.restart_each_epoch:
            self.optimizer.state.clear()

    def step(self, chosen: Sequence[Pick]) -> None:
        """Learn from a step's queries, of which each process takes a part; from none if the loss is not finite."""
        start, state, recipe = time.perf_counter(), self.state, self.recipe
        examples = make_examples(chosen[self.rank :: self.number], self.data, recipe, state.epoch)
        factor, beta = rate_and_beta(recipe, state.step, self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = group["peak"] * factor, (beta, BETAS[1])
        # Dropout depends on the step alone: it is the same whether or not the run was killed before.
        torch.manual_seed((seed_of(recipe) * 1_000_003 + state.step * 4099 + self.rank) % 2**63)
        loss, documents = self._backward(examples, len(chosen)), float(sum([len(e.texts) for e in examples]))
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
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        state.step += 1
        state.position += len(chosen)
        state.loss += loss
        state.examples += len(chosen)
        state.documents += documents
        state.seconds += time.perf_counter() - start

    def _backward(self, examples: Sequence[Example], examples_of_all: int) -> float:
        """Add the gradients of some examples; return the sum of their losses."""
        dtype, together = getattr(torch, self.recipe.dtype), self.recipe.queries_per_forward
        divisor = examples_of_all if self.recipe.reduction == "mean" else 1
        total = 0.0
        # Texts of like length next to each other, so that little is padded.
        ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
        for start in range(0, len(ordered), together):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.objective(self.model, ordered[start : start + together], self.recipe)
            total += loss.item()
            self.scaler.scale(loss / divisor).backward()
        return total

    def figures(self) -> dict[str, float]:
        """Return loss, learning rate and speed of the steps since the last entry of the history."""
        state = self.state
        return {
            "loss": state.loss / max(state.examples, 1),
            "learning_rate": max([group["lr"] for group in self.optimizer.param_groups]),
            "documents_per_second": state.documents / state.seconds if state.seconds else 0.0,
        }

    def report(self, validate: Callable[[], float] | None, *, epoch_ends: bool) -> None:
        """Validate, write an entry of the history and save, if it is time for that."""
        state, recipe = self.state, self.recipe
        every = recipe.validate_steps
        due = state.step == self.total_steps or (epoch_ends if every is None else state.step % every == 0)
        if not (due or epoch_ends or state.step % recipe.save_steps == 0):
            return
        # In all processes; a state that has diverged must not replace a good one.
        if not all(bool(torch.isfinite(tensor).all()) for tensor in trained_tensors(self.model).values()):
            what = f"the training diverged: after step {state.step} there are weights that are not finite"
            raise FloatingPointError(f"{what}; make a new model and lower learning_rates, or set max_grad_norm")
        if due or epoch_ends:
            earlier = self.history[self.earlier_entries - 1] if self.earlier_entries else {"epoch": 0, "step": 0}
            entry = {"epoch": earlier["epoch"] + state.epoch + 1, "step": earlier["step"] + state.step}
            entry |= self.figures()
            if due and validate is not None:
                entry["validation"] = self._validate(validate)
            self.history.append(entry)
            if self.processes is not None:
                self.processes.log(entry)
            state.loss, state.examples, state.documents, state.seconds = 0.0, 0, 0.0, 0.0
        if self.file is not None and self.rank == 0:
            self._save(self.file)

    def _validate(self, validate: Callable[[], float]) -> float:
        self.model.eval()
        value = validate()
        if self.processes is not None:  # the first one's counts
            (value,) = self.processes.sum(value if self.rank == 0 else 0.0)
        self.model.train()
        state = self.state
        if state.best is None or value > state.best:
            state.best, state.worse = value, 0
            self.best = {name: tensor.clone() for name, tensor in trained_tensors(self.model).items()}
        else:
            state.worse += 1
        return value

    def end(self) -> None:
        """Leave the model with its best weights, out of training."""
        if self.best:
            copy_into(trained_tensors(self.model), self.best)
        # An aborted query must not leave its gradients to the next training.
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        if self.processes is not None:
            self.processes.end()

    def _save(self, file: StateFile) -> None:
        tensors = {"model": trained_tensors(self.model), "best": self.best}
        tensors |= {"optimizer": named_states(self.model, self.optimizer)}
        history = self.history[self.earlier_entries :]
        file.write(tensors, {"state": asdict(self.state), "history": history, "scaler": self.scaler.state_dict()})

    def resume(self, settings: Mapping[str, Any]) -> bool:
        """Continue from the state in the checkpoint folder, which must be of this training, if there is one."""
        file = StateFile(self.model, self.data, self.recipe, settings, self.total_steps)
        found = file.read()
        if found is not None:
            tensors, values = found
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
        self.file = file
        return found is not None


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what training changes: the trainable parameters, and the buffers that belong to a saved model."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    saved = model.state_dict().keys()
    return {**parameters, **{name: buffer for name, buffer in model.named_buffers() if name in saved}}


def copy_into(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Write values into the tensors of these names."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
