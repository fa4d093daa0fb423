"""The training loop: draw examples, score them, compute the loss, step; then validate, note and save."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import ir_measures
import pandas as pd
import pyterrier as pt
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..common.files import import_extra
from ..common.measures import measure_named
from ..common.notices import warn
from ..common.progress import aside, one_line, work_bar
from ..experiment.plots import COLOURS, new_axes
from ..modelling.heads.base import Head
from .examples import Example, Group, Texts, draw_epoch, examples_per_epoch, make_examples
from .losses import LOSSES
from .queries import whole_labels
from .recipe import Lora, TrainingArgs, seed_of
from .resume import Checkpoint, ScheduleWarning

Objective = Callable[[Any, Sequence[Example], TrainingArgs], torch.Tensor]
"""`(scorer, examples, recipe) -> loss`: of some examples, summed, a scalar with a graph."""


def train(
    scorer: nn.Module,
    groups: Sequence[Group],
    texts: Texts,
    args: TrainingArgs,
    *,
    validate: Callable[[], float] | None = None,
    on_step: Callable[[], object] = lambda: None,
    history: list[dict[str, Any]] | None = None,
    objective: Objective | None = None,
    settings: Callable[[], Mapping[str, Any]] = dict,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Trains `scorer` in place.

    Interrupted, the scorer keeps the weights of the best validation if there was one, else those of the last step.
    With a checkpoint folder, a training that was killed goes on from its last saved state, and one that is finished
    when it is made longer.

    Args:
        scorer: `scorer(queries, texts) -> (B,)` scores with a graph.
        groups: training queries with their candidates and labels.
        texts: those of the run that the groups were made of; a step reads those of its own examples.
        args: the recipe.
        validate: called after each epoch, or every `validate_steps`, for a figure of merit; the weights with the best
            one are kept.
        on_step: called after each optimiser step.
        history: gets an entry at the end of each epoch and at each validation; None makes a new list.
        objective: the loss of some examples, for methods that need more than scores; None for the recipe's.
        settings: gives those of the model, JSON-able: with others a training is not continued.
        verbose: show a line for each epoch, and tell where a training goes on.

    Returns:
        `history`: `epoch` and `step` from 1, `loss` (mean per example since the last entry), `learning_rate` (the
        highest), `documents_per_second` and, where it was asked for, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
        ValueError: if the recipe does not fit the data or the model, or the checkpoint folder holds another training.
        OSError: if the state cannot be written.
        ImportError: without accelerate or peft, where the recipe needs them.
    """
    _check(groups, args, validate is not None)
    history = [] if history is None else history
    with ExitStack() as within:
        # torch's global random state will be as it was.
        within.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        torch.manual_seed(seed_of(args))
        if args.dropout is not None:
            within.enter_context(dropping(scorer, args.dropout))
        if args.lora is not None:
            within.enter_context(adapted(scorer, args.lora))
        if args.gradient_checkpointing:
            within.enter_context(recomputing(scorer))
        steps = -(-examples_per_epoch(groups, args) // args.queries_per_step)
        run = Run(scorer, args, objective or ranking_loss, steps, history)
        within.callback(run.end)
        if args.checkpoint is not None:
            checkpoint = Checkpoint(scorer, groups, texts, args, settings(), len(history))
            if run.restore(checkpoint):
                on_step()
                if verbose and run.rank == 0:
                    pt.tqdm.write(run.where())
        progress = run.progress
        scorer.train()
        while not progress.finished:
            picks = draw_epoch(groups, args, progress.epoch)
            end = min(len(picks), progress.position + (run.total_steps - progress.step) * args.queries_per_step)
            # An epoch that was done before a training was made longer has no line.
            name, shown = f"epoch {progress.epoch + 1}", verbose and run.rank == 0 and progress.position < end
            with (
                one_line(name, "epoch", shown=shown),
                work_bar(name, "query", shown=shown, total=end, done=progress.position) as bar,
            ):
                while progress.position < len(picks) and not progress.finished:
                    chosen = picks[progress.position : progress.position + args.queries_per_step]
                    # Each process takes a part of the step's queries.
                    own = make_examples(chosen[run.rank :: run.processes], texts, args, progress.epoch)
                    run.step(own, len(chosen))
                    on_step()
                    _show(bar, len(chosen), run.figures())
                    run.report(validate, epoch_ends=progress.position == len(picks))
            progress.epoch, progress.position = progress.epoch + 1, 0
            if args.restart_each_epoch:
                run.optimizer.state.clear()
    return history


def _show(bar: Any, queries: int, figures: Mapping[str, float]) -> None:
    """So many more queries are done; None is no bar."""
    if bar is not None:
        loss, rate, speed = figures.values()
        bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.1e}", documents=f"{speed:.1f}/s", refresh=False)
        bar.update(queries)


def _check(groups: Sequence[Group], args: TrainingArgs, validates: bool) -> None:
    if args.patience is not None and not validates:
        raise ValueError(f"patience={args.patience} needs validation data: give fit topics_or_res_va and qrels_va")
    if LOSSES[args.loss].teacher and any(group.targets is None for group in groups):
        raise ValueError(
            f"loss={args.loss!r} needs the teacher's scores, the targets of every group: the training candidates have "
            f"no column {args.teacher_field!r}; put TeacherScores(teacher) before the student, or set teacher_field"
        )


def ranking_loss(scorer: nn.Module, examples: Sequence[Example], args: TrainingArgs) -> torch.Tensor:
    """The recipe's loss of the scores of each example's candidates, summed."""
    queries = [example.query for example in examples for _ in example.texts]
    texts = [text for example in examples for text in example.texts]
    scores = scorer(queries, texts).float().split([len(example.texts) for example in examples])
    losses = []
    for example, own in zip(examples, scores, strict=True):
        labels = own.new_tensor(example.labels)
        targets = None if example.targets is None else own.new_tensor(example.targets)[None]
        losses.append(LOSSES[args.loss].compute(own[None], labels[None], targets, args))
    return torch.stack(losses).sum()


@dataclass
class Progress:
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
    finished: bool = False


class Run:
    """A training under way: weights, optimiser, where it is, and how it is saved and continued.

    Of several processes each computes the gradients of a part of a step's queries, and these are summed: any number of
    processes computes what one does, up to rounding and dropout. A program that calls `fit` becomes several by
    `accelerate launch` on GPUs, by `torchrun --nproc_per_node 4` also on CPUs.

    Entries of `history` that are already there belong to earlier trainings.
    """

    def __init__(
        self, scorer: nn.Module, args: TrainingArgs, objective: Objective, steps_per_epoch: int, history: list
    ) -> None:
        self.scorer, self.args, self.objective, self.history = scorer, args, objective, history
        self.accelerator: Any = None
        self.rank, self.processes = 0, 1  # the first process writes and reports
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several or args.trackers:
            self.accelerator = accelerator = start_accelerate(scorer, args, several)
            self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.optimizer = make_optimizer(scorer, args)
        self.device = next(scorer.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.dtype == "float16")
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = number_of_steps(args, steps_per_epoch)
        self.progress = Progress()
        self.best: dict[str, torch.Tensor] | None = None  # the weights that validated best
        self.checkpoint: Checkpoint | None = None
        self.earlier_entries = len(history)

    # A step.

    def step(self, examples: Sequence[Example], examples_of_all: int) -> None:
        """Learns from this process's part of a step's examples; from none if the loss is not finite."""
        start, progress, args = time.perf_counter(), self.progress, self.args
        factor = rate_factor(args, progress.step, self.steps_per_epoch, self.total_steps)
        beta1 = first_beta(args, progress.step, self.steps_per_epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = group["peak"] * factor, (beta1, BETAS[1])
        # Dropout depends on the step alone: it is the same whether or not the run was killed before.
        torch.manual_seed((seed_of(args) * 1_000_003 + progress.step * 4099 + self.rank) % 2**63)
        loss = self._backward(examples, examples_of_all)
        documents = float(sum([len(example.texts) for example in examples]))
        loss, documents = self._sum_over_processes(loss, documents)
        if not math.isfinite(loss):
            queries = ", ".join([repr(example.qid) for example in examples])
            raise FloatingPointError(
                f"the loss is {loss} in step {progress.step + 1}, that of the queries {queries}, and the weights are "
                f"those before it: {self._ways_out()}"
            )
        if self.processes > 1:
            self._sum_gradients()
        if args.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.scorer.parameters(), args.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.position += examples_of_all
        progress.loss += loss
        progress.examples += examples_of_all
        progress.documents += documents
        progress.seconds += time.perf_counter() - start

    def _backward(self, examples: Sequence[Example], examples_of_all: int) -> float:
        """Adds the gradients of some examples; returns the sum of their losses."""
        dtype, together = getattr(torch, self.args.dtype), self.args.queries_per_forward
        divisor = examples_of_all if self.args.reduction == "mean" else 1
        total = 0.0
        # Texts of like length next to each other, so that little is padded.
        ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
        for start in range(0, len(ordered), together):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = self.objective(self.scorer, ordered[start : start + together], self.args)
            total += loss.item()
            self.scaler.scale(loss / divisor).backward()
        return total

    def _ways_out(self) -> str:
        """What to do about a loss that is not finite."""
        if self.args.dtype == "float16":
            return "use dtype='bfloat16' or 'float32'"
        if not self.progress.step:  # nothing was learned that could have gone wrong
            return "a weight of the model is not finite, or a label or teacher's score is too large for the loss"
        return "lower learning_rates, or set max_grad_norm"

    def _sum_over_processes(self, *values: float) -> list[float]:
        if self.processes == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(total, "sum").tolist()

    def _sum_gradients(self) -> None:
        """Makes each gradient the sum over all processes."""
        parameters = [p for p in self.scorer.parameters() if p.requires_grad]
        # As in one process, a parameter that no query needed stays as it is, weight decay included.
        counts = self._sum_over_processes(*[float(p.grad is not None) for p in parameters])
        needed = [p for p, count in zip(parameters, counts, strict=True) if count]
        for parameter in needed:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients: list[Any] = [parameter.grad for parameter in needed]
        # One message, not hundreds.
        summed = self.accelerator.reduce(nn.utils.parameters_to_vector(gradients), "sum")
        nn.utils.vector_to_parameters(summed, gradients)

    # After a step.

    def figures(self) -> dict[str, float]:
        """Of the steps since the last entry of the history."""
        progress = self.progress
        return {
            "loss": progress.loss / max(progress.examples, 1),
            "learning_rate": max([group["lr"] for group in self.optimizer.param_groups]),
            "documents_per_second": progress.documents / progress.seconds if progress.seconds else 0.0,
        }

    def report(self, validate: Callable[[], float] | None, *, epoch_ends: bool) -> None:
        """Validates, writes an entry of the history and saves, if it is time for that; tells whether training ends."""
        progress, args = self.progress, self.args
        last = progress.step == self.total_steps
        due = last or (epoch_ends if args.validate_steps is None else progress.step % args.validate_steps == 0)
        if not (due or epoch_ends or progress.step % args.save_steps == 0):
            return
        # In all processes; a state that has diverged must not replace a good one.
        if not all(bool(torch.isfinite(tensor).all()) for tensor in trained_tensors(self.scorer).values()):
            raise FloatingPointError(
                f"the training diverged: after step {progress.step} there are weights that are not finite; make a "
                f"new model and lower learning_rates, or set max_grad_norm"
            )
        if due or epoch_ends:
            earlier = self.history[self.earlier_entries - 1] if self.earlier_entries else {"epoch": 0, "step": 0}
            entry = {
                "epoch": earlier["epoch"] + progress.epoch + 1,
                "step": earlier["step"] + progress.step,
                **self.figures(),
            }
            if due and validate is not None:
                entry["validation"] = self._validate(validate)
            self.history.append(entry)
            if self.accelerator is not None:
                self.accelerator.log({k: v for k, v in entry.items() if k != "step"}, step=entry["step"])
            progress.loss, progress.examples, progress.documents, progress.seconds = 0.0, 0, 0.0, 0.0
        progress.finished = self._is_over()
        if self.checkpoint is not None and self.rank == 0:
            self._save(self.checkpoint)

    def _is_over(self) -> bool:
        patience = self.args.patience
        return self.progress.step == self.total_steps or (patience is not None and self.progress.worse >= patience)

    def _validate(self, validate: Callable[[], float]) -> float:
        self.scorer.eval()
        with aside("validation"):
            value = validate()
        if self.processes > 1:  # the first one's counts
            (value,) = self._sum_over_processes(value if self.rank == 0 else 0.0)
        self.scorer.train()
        progress = self.progress
        if progress.best is None or value > progress.best:
            progress.best, progress.worse = value, 0
            self.best = {name: tensor.clone() for name, tensor in trained_tensors(self.scorer).items()}
        else:
            progress.worse += 1
        return value

    def end(self) -> None:
        """Leaves the model with its best weights, out of training."""
        if self.best is not None:
            restore_tensors(self.scorer, self.best)
        # An aborted query must not leave its gradients to the next training.
        self.scorer.zero_grad(set_to_none=True)
        self.scorer.eval()
        if self.accelerator is not None:
            # Its `end_training` would also end the connection of the processes, which the next training needs.
            for tracker in self.accelerator.trackers:
                tracker.finish()
        if self.checkpoint is not None:
            self.checkpoint.end(self.scorer)

    # On disk.

    def _save(self, checkpoint: Checkpoint) -> None:
        names = {id(parameter): name for name, parameter in self.scorer.named_parameters()}
        optimizer = {
            f"{names[id(parameter)]}/{quantity}": value
            for parameter, state in self.optimizer.state.items()
            for quantity, value in state.items()
        }
        checkpoint.save(
            {"model": trained_tensors(self.scorer), "best": self.best or {}, "optimizer": optimizer},
            {
                "progress": dataclasses.asdict(self.progress),
                "history": self.history[self.earlier_entries :],
                "scaler": self.scaler.state_dict(),
            },
        )

    def restore(self, checkpoint: Checkpoint) -> bool:
        """Continues from the state in the checkpoint folder, which must be of this training, if there is one."""
        found = checkpoint.load()
        if found is None:
            self.checkpoint = checkpoint
            return False
        sections, values = found
        self.progress = Progress(**values["progress"])
        self._extend(values["length"])
        self.checkpoint = checkpoint  # not before it is known to be of this training
        restore_tensors(self.scorer, sections["model"])
        parameters = dict(self.scorer.named_parameters())
        for key, value in sections.get("optimizer", {}).items():
            name, _, quantity = key.rpartition("/")
            self.optimizer.state[parameters[name]][quantity] = value.to(parameters[name].device)
        if values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])
        # What an interrupted run of this process has written is in the state, or done again.
        self.earlier_entries = checkpoint.entries
        self.history[checkpoint.entries :] = values["history"]
        self.progress.finished = self._is_over()
        if "best" in sections:
            self.best = {name: tensor.to(self.device) for name, tensor in sections["best"].items()}
        return True

    def _extend(self, length: Mapping[str, Any]) -> None:
        """Refuses what does not make a training of that length longer; says if its steps so far had other rates."""
        args, total, done = self.args, self.total_steps, self.progress.step
        earlier = dataclasses.replace(args, **length)
        before = number_of_steps(earlier, self.steps_per_epoch)
        less_patient = (args.patience or math.inf) < (earlier.patience or math.inf)
        if total < before or less_patient or (self._is_over() and earlier != args):
            old, new = (", ".join([f"{name}={getattr(each, name)}" for name in length]) for each in (earlier, args))
            raise ValueError(
                f"the checkpoint folder {str(args.checkpoint)!r} holds a training of {before} steps ({old}), of which "
                f"{done} are done, and this one has {total} ({new}): it can only be made longer, by raising what ends "
                f"it; or name another folder"
            )
        rates = [[rate_factor(args, step, self.steps_per_epoch, n) for step in range(done)] for n in (before, total)]
        if rates[0] != rates[1]:
            warn(
                f"the training is extended from {before} to {total} steps: its first {done} had the learning rates of "
                f"{before} steps (schedule={args.schedule!r}, warmup={args.warmup}), all others have those of {total}, "
                f"so that it ends elsewhere than a training of {total} steps in one go; with schedule='constant' and "
                f"warmup=0.0 it would not",
                ScheduleWarning,
            )

    def where(self) -> str:
        """Where a training goes on that was continued."""
        step, total = self.progress.step, self.total_steps
        if not self.progress.finished:
            return f"resuming at step {step + 1} of {total}"
        if step < total:
            return f"nothing to do: patience={self.args.patience} ended it at step {step} of {total}; for more raise it"
        return f"nothing to do: all {total} steps are done; for more raise max_steps or epochs"


def number_of_steps(args: TrainingArgs, steps_per_epoch: int) -> int:
    """The optimiser steps of a training that nothing ends early."""
    steps = args.epochs * steps_per_epoch
    return steps if args.max_steps is None else min(steps, args.max_steps)


def trained_tensors(scorer: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: the trainable parameters, and the buffers that belong to a saved model."""
    parameters = {name: p.detach() for name, p in scorer.named_parameters() if p.requires_grad}
    saved = scorer.state_dict().keys()
    return {**parameters, **{name: buffer for name, buffer in scorer.named_buffers() if name in saved}}


def restore_tensors(scorer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors of `trained_tensors` back."""
    with torch.no_grad():
        for name, tensor in trained_tensors(scorer).items():
            tensor.copy_(tensors[name])


REFUSED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""What `accelerate launch` may be told to divide a model's weights by."""


def start_accelerate(scorer: nn.Module, args: TrainingArgs, several: bool) -> Any:
    """Accelerate's Accelerator, for trackers or several processes, which all get the first one's weights.

    Raises:
        ValueError: if the processes were started to divide the weights among them.
        ImportError: without accelerate.
    """
    asked = [name for name in REFUSED if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true")]
    if several and asked:
        raise ValueError(
            f"accelerate launch was asked for {asked[0]}, which divides a model's weights among the processes, and fit "
            f"cannot do that: launch with --multi_gpu (DDP), where each process has all of them"
        )
    purpose = "training in several processes" if several else "trackers="
    accelerate = import_extra("accelerate", "train", f"{purpose} needs accelerate")
    device = next(scorer.parameters()).device
    accelerator = accelerate.Accelerator(
        cpu=device.type == "cpu", log_with=list(args.trackers) or None, project_dir=args.checkpoint or "."
    )
    if args.trackers:
        accelerator.init_trackers("pyterrier_longdoc", {k: str(v) for k, v in args.as_dict().items()})
    if several:
        scorer.to(accelerator.device)
        with torch.no_grad():
            accelerate.utils.broadcast([tensor.detach() for tensor in (*scorer.parameters(), *scorer.buffers())])
    return accelerator


# Optimiser and learning rates.


def make_optimizer(scorer: nn.Module, args: TrainingArgs) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: the longest matching prefix of a name gives the learning rate, `peak`."""
    parameters = dict(scorer.named_parameters())
    for prefix in args.learning_rates:
        if not any(name.startswith(prefix) for name in parameters):
            parts = ", ".join(dict.fromkeys(f"{name.split('.')[0]}." for name in parameters))
            raise ValueError(f"no parameter's name begins with learning_rates' {prefix!r}; they begin with {parts}")
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            prefix = max([p for p in args.learning_rates if name.startswith(p)], key=len)
            rate, decays = args.learning_rates[prefix], args.decay == "all" or parameter.ndim > 1
            new = {"params": [], "lr": rate, "peak": rate, "weight_decay": args.weight_decay if decays else 0.0}
            groups.setdefault((prefix, decays), new)["params"].append(parameter)
    # The fused kernel reads and writes the weights once per step instead of several times.
    fused = next(scorer.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(list(groups.values()), betas=BETAS, fused=fused)


BETAS = (0.9, 0.999)
"""Of AdamW, where no schedule changes the first one."""
ONE_CYCLE_START = 25.0
ONE_CYCLE_END = 1e4
"""`div_factor` and `final_div_factor` of torch's OneCycleLR, which FlexNeuART uses."""
ONE_CYCLE_BETAS = (0.95, 0.85)
"""`max_momentum` and `base_momentum` of the same: AdamW's first beta at both ends and at the peak."""


def rate_factor(args: TrainingArgs, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """By what the learning rates are multiplied at a step.

    A function of the step (from 0), not one of torch's schedulers: a training that continues needs no state of it.
    Warm-up begins with a rate of 0, and so does nothing at its first step, as in transformers and BERT's own code; of a
    single step there is none, or else it would learn nothing.
    """
    decay = args.epoch_decay ** (step // steps_per_epoch)
    step, total = _step_of_schedule(args, step, steps_per_epoch, total_steps)
    if args.schedule == "one_cycle":
        height, rises = _cycle(args, step, total)
        low = 1 / ONE_CYCLE_START if rises else 1 / (ONE_CYCLE_START * ONE_CYCLE_END)
        return decay * (low + (1.0 - low) * height)
    warmup = int(args.warmup * total) if total > 1 else 0
    if step < warmup:
        return decay * (step / warmup)
    return decay * (1.0 if args.schedule == "constant" else (total - step) / (total - warmup))


def first_beta(args: TrainingArgs, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """AdamW's first beta at a step: `"one_cycle"` lowers it while the learning rates rise, and the other way round."""
    if args.schedule != "one_cycle":
        return BETAS[0]
    high, low = ONE_CYCLE_BETAS
    height, _ = _cycle(args, *_step_of_schedule(args, step, steps_per_epoch, total_steps))
    return high - (high - low) * height


def _step_of_schedule(args: TrainingArgs, step: int, steps_per_epoch: int, total_steps: int) -> tuple[int, int]:
    """A step, and the number of steps, of the schedule that it is in: that of the training, or of its epoch."""
    if not args.restart_each_epoch:
        return step, total_steps
    epoch, within = divmod(step, steps_per_epoch)
    return within, min(steps_per_epoch, total_steps - epoch * steps_per_epoch)


def _cycle(args: TrainingArgs, step: int, total: int) -> tuple[float, bool]:
    """How high a cycle is at a step, 0 at its ends and 1 at its peak, and whether it is before the peak."""
    # Its steps are counted as OneCycleLR does: the peak is reached at this one.
    peak, last = args.warmup * total - 1, total - 1
    if total == 1:  # there it would be at its end, and the step learn next to nothing
        return 1.0, True
    if step <= peak:
        return (step / peak if peak > 0 else 1.0), True
    return 1.0 - (step - peak) / (last - peak), False


# What a model is for the time of its training.


@contextmanager
def dropping(scorer: nn.Module, rate: float) -> Iterator[None]:
    """Within, every layer drops this part of its inputs."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in scorer.modules():
        # Attention has its rate in a number of its own where it is not a dropout layer that applies it.
        names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "dropout" in name]
        before += [(module, name, vars(module)[name]) for name in names if isinstance(vars(module)[name], Real)]
    for module, name, _ in before:
        setattr(module, name, rate)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@contextmanager
def recomputing(scorer: nn.Module) -> Iterator[None]:
    """Gradient checkpointing of every Hugging Face model inside."""
    models: list[Any] = [m for m in scorer.modules() if getattr(m, "supports_gradient_checkpointing", False)]
    if not models:
        raise ValueError("gradient_checkpointing=True, but the backbone does not support it")
    # transformers 5 has renamed both.
    for model in models:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    try:
        yield
    finally:
        for model in models:
            disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
            disable()


@contextmanager
def adapted(scorer: nn.Module, lora: Lora) -> Iterator[None]:
    """Low-rank adapters on the backbones and on pre-trained aggregators, by peft; these are frozen meanwhile.

    Adapters begin as no change; their weights are parameters named `...lora_A...` and `...lora_B...`. Afterwards they
    are part of the weights that they adapt, and all modules and names are the same as before: a model trained so is
    saved and loaded like any other. Undone here rather than by peft's `merge_and_unload`, which cannot remove adapters
    from a module that takes only some of them.
    """
    peft = import_extra("peft", "train", "LoRA needs peft")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets)
    modules = [module for name, module in scorer.named_modules() if f".{name}".endswith(".encoder.backbone")]
    if not modules:
        raise ValueError("lora= needs a model with a Hugging Face backbone at encoder.backbone")
    heads = [module for module in scorer.modules() if isinstance(module, Head)]
    modules += [part for head in heads for part in head.pretrained().values()]
    trainable = {name: parameter.requires_grad for name, parameter in scorer.named_parameters()}
    try:
        try:
            for module in modules:
                peft.inject_adapter_in_model(config, module)
        except ValueError as error:
            raise ValueError(f"{lora!r} does not fit the backbone: {error}") from error
        yield
    finally:
        for module in modules:
            for name, layer in list(module.named_modules()):
                if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                    layer.merge()
                    parent, _, child = name.rpartition(".")
                    setattr(module.get_submodule(parent), child, layer.get_base_layer())
            for attribute in ("peft_config", "active_adapter", "active_adapters"):
                vars(module).pop(attribute, None)
        for name, parameter in scorer.named_parameters():
            parameter.requires_grad_(trainable[name])


# The figure of merit, and the history.


def evaluate(results: pd.DataFrame, qrels: pd.DataFrame, metric: str) -> float:
    """Mean of a measure over the judged queries among the results.

    Args:
        results: `qid, docno, score`.
        qrels: `qid, docno, label`.
        metric: a measure as in `pt.Experiment`, e.g. `"nDCG@10"`.

    Raises:
        ValueError: if a label is no whole number.
    """
    measure = measure_named(metric)
    names = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}
    run = results[["qid", "docno", "score"]].astype({"qid": str, "docno": str}).rename(columns=names)
    qrels = qrels[qrels["qid"].astype(str).isin(set(run["query_id"]))]
    judged = qrels[["qid", "docno"]].astype(str).assign(label=whole_labels(qrels, "qrels")).rename(columns=names)
    return float(ir_measures.calc_aggregate([measure], judged, run)[measure])


_COLUMNS = ("epoch", "step", "loss", "learning_rate", "documents_per_second", "validation")


def history_frame(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The entries that `train` makes as a table, without columns that none of them has."""
    columns = [name for name in _COLUMNS if any(name in entry for entry in entries)]
    return pd.DataFrame(entries, columns=columns or list(_COLUMNS[:3]))


def plot_history(history: pd.DataFrame, *, ax: Any = None) -> Any:
    """Draws loss and validation figure over optimiser steps.

    Args:
        history: a reranker's `history`.
        ax: matplotlib axes to draw on; None makes a figure.

    Returns:
        The axes; `ax.figure.savefig(...)` writes the picture.

    Raises:
        ValueError: if there is no history.
        ImportError: without matplotlib.
    """
    if history.empty:
        raise ValueError("there is no history: this model has not been trained")
    ax = ax or new_axes()
    lines = ax.plot(history["step"], history["loss"], marker=".", color=COLOURS[0], label="loss")
    ax.set_xlabel("optimiser steps")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("loss")
    if "validation" in history.columns:
        validated = history.dropna(subset="validation")
        right = ax.twinx()
        # Leaves a point of the loss behind it to be seen.
        look = {"marker": "o", "fillstyle": "none", "color": COLOURS[1]}
        lines += right.plot(validated["step"], validated["validation"], label="validation", **look)
        right.set_ylabel("validation")
        right.spines["top"].set_visible(False)
    ax.legend(handles=lines, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    ax.spines["top"].set_visible(False)
    return ax
