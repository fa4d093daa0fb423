"""The training loop: sample examples, score them, compute the loss, step; then validate, log and save."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import pyterrier as pt
import torch
from torch import nn

from ..common.coverage import Coverage
from ..common.frames import Document, Question
from ..common.progress import work_bar
from .examples import Example, Pick, TrainingSet, draw_epoch, make_examples
from .losses import LOSSES
from .model_changes import changed_for_training
from .processes import Processes
from .recipe import TrainingArgs, seed_of
from .resume import StateFile
from .schedule import BETAS, make_optimizer, rate_and_beta

Objective = Callable[[Any, Sequence[Example], TrainingArgs], torch.Tensor]
"""`(model, examples, recipe) -> loss`: the summed loss of examples, a scalar with a graph."""


def train(
    model: nn.Module,
    data: TrainingSet,
    recipe: TrainingArgs,
    *,
    validate: Callable[[], float] | None = None,
    on_step: Callable[[], object] = lambda: None,
    history: list[dict[str, Any]] | None = None,
    objective: Objective | None = None,
    settings: Mapping[str, Any] | None = None,
    coverage: Coverage | None = None,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Train a model in place; after an interruption it keeps its best validated weights, or those of the last step.

    Args:
        model: `model(queries, texts) -> (B,)` scores with a graph.
        data: the training data from `prepare`.
        recipe: the training recipe.
        validate: called after each epoch or every `validate_steps`; returns the validation measure. The weights with
            the highest value are kept.
        on_step: called after each optimiser step.
        history: a list to which an entry is added after each epoch and validation; None creates a list.
        objective: the loss of examples, for methods that need more than scores; None for that of the recipe.
        settings: the settings of the model, needed with a checkpoint folder to refuse to continue with other settings.
        coverage: where the model counts what it reads; its longest input is part of the state.
        verbose: show a progress bar.

    Returns:
        The list `history` of entries with `epoch` and `step` from 1, `loss` (mean per example since the last entry),
        `learning_rate` (and `learning_rate PREFIX` for each prefix of the recipe but `""`), `documents_per_second` and,
        after a validation, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
        ValueError: if the recipe does not fit the data or the model, or the checkpoint folder has another training.
    """
    _check_validation(recipe, validate)
    if LOSSES[recipe.loss].teacher and any(group.targets is None for group in data.groups):
        problem = f"loss={recipe.loss!r} needs the teacher's scores, teacher_field={recipe.teacher_field!r}"
        raise ValueError(f"{problem}: put TeacherScores(teacher) before the student")
    with ExitStack() as stack:
        # torch's global random state is restored afterwards.
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        torch.manual_seed(seed_of(recipe))
        stack.enter_context(changed_for_training(model, recipe))
        history = [] if history is None else history
        run = Run(model, data, recipe, objective or ranking_loss, history, coverage or Coverage())
        stack.callback(run.end)
        state, is_first = run.state, run.processes.rank == 0
        if recipe.checkpoint is not None and run.resume(settings or {}):
            on_step()
            if is_first:
                done = "nothing to do" if run.is_over else "resuming"
                pt.tqdm.write(f"{done} after step {state.step} of {run.total_steps}")
        model.train()
        shown = verbose and is_first and not run.is_over
        bar = stack.enter_context(work_bar("fit", "step", run.total_steps, shown=shown, done=state.step))
        try:
            while not run.is_over:
                epoch, steps_done = divmod(state.step, run.steps_per_epoch)
                picks = draw_epoch(data.groups, recipe, epoch)
                for start in range(steps_done * recipe.queries_per_step, len(picks), recipe.queries_per_step):
                    run.step(picks[start : start + recipe.queries_per_step])
                    on_step()
                    loss, *rates, speed = run.figures().values()
                    lr = ", ".join(f"{rate:.1e}" for rate in rates)
                    bar.set_postfix(loss=f"{loss:.3f}", lr=lr, documents=f"{speed:.1f}/s", refresh=False)
                    bar.update()
                    run.report(validate)
                    if run.is_over:
                        break
        except KeyboardInterrupt:
            how = "fit continues from them with a new schedule; to resume instead, use TrainingArgs(checkpoint=FOLDER)"
            if recipe.checkpoint is not None:
                how = f"to resume from the last state in {str(recipe.checkpoint)!r}, repeat the call with a new model"
            kept = "the best validated weights" if run.best else "its weights"
            problem = f"training interrupted after step {state.step} of {run.total_steps}: {kept} are kept"
            raise KeyboardInterrupt(f"{problem}; {how}") from None
    return run.history


def _check_validation(recipe: TrainingArgs, validate: Callable[[], float] | None) -> None:
    for name in ("patience", "validate_steps"):
        value = getattr(recipe, name)
        if value is not None and validate is None:
            raise ValueError(f"{name}={value} needs validation data: pass topics_or_res_va and qrels_va to fit")


def ranking_loss(model: nn.Module, examples: Sequence[Example], recipe: TrainingArgs) -> torch.Tensor:
    """Return the summed loss of the recipe for the candidates of each example."""
    queries, texts, sizes, losses = list[Question](), list[Document](), list[int](), list[torch.Tensor]()
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
    """The progress of a training, stored in the checkpoint folder."""

    step: int = 0  # optimiser steps done
    loss: float = 0.0  # sum of losses since the last entry of the history
    examples: int = 0  # number of these examples
    documents: float = 0.0  # number of their documents
    seconds: float = 0.0  # time for these examples, without validation
    best: float | None = None  # the best validation so far
    worse: int = 0  # number of validations since then
    longest_input: int = 0  # tokens of the longest input of the backbone


class Run:
    """A running training: weights, optimiser and state, which can be saved and resumed.

    Initial entries of `history` belong to earlier trainings.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainingSet,
        recipe: TrainingArgs,
        objective: Objective,
        history: list[Any],
        coverage: Coverage,
    ) -> None:
        self.model, self.data, self.recipe, self.objective, self.history = model, data, recipe, objective, history
        self.coverage, self.factor = coverage, 1.0  # of the learning rates
        self.old_entries = len(history)
        self.processes = Processes(model, recipe)
        self.optimizer = make_optimizer(model, recipe)
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.dtype == "float16")
        picks = sum(len(group.rows) if recipe.sampling == "pointwise" else 1 for group in data.groups)
        self.steps_per_epoch = -(-picks // recipe.queries_per_step)
        self.total_steps = min(recipe.epochs * self.steps_per_epoch, recipe.max_steps or sys.maxsize)
        self.state = State()
        self.best: dict[str, torch.Tensor] = {}  # the best validated weights
        self.file: StateFile | None = None

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or `patience` ended the training."""
        patience = self.recipe.patience
        return self.state.step >= self.total_steps or (patience is not None and self.state.worse >= patience)

    def step(self, batch: Sequence[Pick]) -> None:
        """Make an optimiser step, unless the loss is not finite; each process computes a part of its queries."""
        start, state, recipe, processes = time.perf_counter(), self.state, self.recipe, self.processes
        epoch, step_of_epoch = divmod(state.step, self.steps_per_epoch)
        if recipe.restart_each_epoch and step_of_epoch == 0:
            self.optimizer.state.clear()
        self.factor, beta = rate_and_beta(recipe, state.step, self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = group["peak"] * self.factor, (beta, BETAS[1])
        examples = make_examples(batch[processes.rank :: processes.number], self.data, recipe, epoch)
        # Dropout only depends on the step, so that a continued training has the same.
        torch.manual_seed((seed_of(recipe) * 1_000_003 + state.step * 4099 + processes.rank) % 2**63)
        loss, documents = processes.sum(self._backward(examples, len(batch)), sum(len(e.texts) for e in examples))
        if not math.isfinite(loss):
            queries = ", ".join([repr(example.qid) for example in examples])
            raise FloatingPointError(
                f"the loss is {loss} in step {state.step + 1}, of the queries {queries}; the weights are those before "
                f"it: lower learning_rates, set max_grad_norm, or use dtype='bfloat16' instead of 'float16'"
            )
        processes.sum_gradients(self.model)
        if recipe.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        state.step += 1
        state.loss += loss
        state.examples += len(batch)
        state.documents += documents
        state.seconds += time.perf_counter() - start

    def _backward(self, examples: Sequence[Example], examples_of_all: int) -> float:
        """Add the gradients of examples; return the sum of their losses."""
        dtype, size = getattr(torch, self.recipe.dtype), self.recipe.queries_per_forward
        divisor = examples_of_all if self.recipe.reduction == "mean" else 1
        total = 0.0
        # Texts of similar length are in the same batch, to reduce padding.
        ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
        for start in range(0, len(ordered), size):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.objective(self.model, ordered[start : start + size], self.recipe)
            total += loss.item()
            self.scaler.scale(loss / divisor).backward()
        return total

    def figures(self) -> dict[str, float]:
        """Return the loss, learning rates and speed of the steps since the last entry of the history."""
        state, rates = self.state, self.recipe.learning_rates
        return {
            "loss": state.loss / state.examples,
            **{f"learning_rate {prefix}".rstrip(): rate * self.factor for prefix, rate in rates.items()},
            "documents_per_second": state.documents / state.seconds,
        }

    def report(self, validate: Callable[[], float] | None) -> None:
        """Validate, add an entry to the history and save the state, if they are due after this step."""
        state, recipe = self.state, self.recipe
        epoch_ends, every = state.step % self.steps_per_epoch == 0, recipe.validate_steps
        due = state.step == self.total_steps or (epoch_ends if every is None else state.step % every == 0)
        if not (due or epoch_ends or state.step % recipe.save_steps == 0):
            return
        # Checked in all processes, because diverged weights must not replace the saved ones.
        for name, tensor in trained_tensors(self.model).items():
            if not torch.isfinite(tensor).all():
                problem = f"the training diverged: after step {state.step} the weights {name!r} are not finite"
                raise FloatingPointError(
                    f"{problem}: create a new model, and lower learning_rates or set max_grad_norm"
                )
        if due or epoch_ends:
            origin = self.history[self.old_entries - 1] if self.old_entries else {"epoch": 0, "step": 0}
            epoch = -(-state.step // self.steps_per_epoch)
            entry = {"epoch": origin["epoch"] + epoch, "step": origin["step"] + state.step, **self.figures()}
            if due and validate is not None:
                entry["validation"] = self._validate(validate)
            self.history.append(entry)
            self.processes.log(entry)
            state.loss, state.examples, state.documents, state.seconds = 0.0, 0, 0.0, 0.0
        if self.file is not None and self.processes.rank == 0:
            tensors = {"model": trained_tensors(self.model), "best": self.best}
            states = self.optimizer.state_dict()["state"].items()
            tensors["optimizer"] = {f"{i}/{name}": value for i, values in states for name, value in values.items()}
            history, state.longest_input = self.history[self.old_entries :], self.coverage.longest_input
            self.file.write(tensors, {"state": asdict(state), "history": history, "scaler": self.scaler.state_dict()})

    def _validate(self, validate: Callable[[], float]) -> float:
        """Return the value of a validation, and keep the weights if it is the best so far."""
        self.model.eval()
        value = validate()
        (value,) = self.processes.sum(value if self.processes.rank == 0 else 0.0)  # the value of the first process
        self.model.train()
        if self.state.best is None or value > self.state.best:
            self.state.best, self.state.worse = value, 0
            self.best = {name: tensor.clone() for name, tensor in trained_tensors(self.model).items()}
        else:
            self.state.worse += 1
        return value

    def end(self) -> None:
        """Restore the best weights and leave training mode."""
        self.model.load_state_dict(self.best, strict=False)
        # The next training must not start with gradients of an interrupted step.
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        self.processes.end()

    def resume(self, settings: Mapping[str, Any]) -> bool:
        """Continue from the state in the checkpoint folder, if there is one; it must belong to this training."""
        self.file = StateFile(self.model, self.data, self.recipe, settings, self.total_steps)
        contents = self.file.read()
        if contents is None:
            return False
        tensors, values = contents
        vars(self.state).update(values["state"])
        self.coverage.longest_input = self.state.longest_input
        self.model.load_state_dict(tensors["model"], strict=False)
        states: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, value in tensors["optimizer"].items():
            i, _, name = key.partition("/")
            states[int(i)][name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
        if values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])
        self.history += values["history"]
        self.best = {name: tensor.to(self.device) for name, tensor in tensors["best"].items()}
        return True


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that training changes: trainable parameters and saved buffers."""
    saved, tensors = model.state_dict().keys(), {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.requires_grad or (name in saved and not isinstance(tensor, nn.Parameter)):
            tensors[name] = tensor.detach()
    return tensors
