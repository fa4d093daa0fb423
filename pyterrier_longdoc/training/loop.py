"""The training loop: draw, score, loss, step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any

import pyterrier as pt
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .adapters import adapted
from .args import TrainingArgs
from .groups import Group
from .losses import LOSSES
from .objective import Objective, ranking_objective
from .run import Run
from .sampling import draw_epoch, examples_per_epoch, make_example


def train(
    scorer: nn.Module,
    groups: Sequence[Group],
    args: TrainingArgs,
    *,
    validate: Callable[[], float] | None = None,
    on_step: Callable[[], None] | None = None,
    history: list[dict[str, Any]] | None = None,
    objective: Objective | None = None,
    settings: Callable[[], Mapping[str, Any]] = dict,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Trains `scorer` in place.

    Interrupted, the scorer keeps the weights of the best validation if there was one, else those of the last step.
    With a checkpoint folder, a training that was killed goes on from its last saved state.

    Args:
        scorer: `scorer(queries, texts) -> (B,)` scores with a graph.
        groups: training queries with their candidates and labels.
        args: the recipe.
        validate: called after each epoch, or every `validate_steps`, for a figure of merit; the weights with the best
            one are kept.
        on_step: called after each optimiser step.
        history: gets an entry at the end of each epoch and at each validation; None makes a new list.
        objective: the loss of some examples, for methods that need more than scores; None for the recipe's.
        settings: gives those of the model, JSON-able: with others a training is not continued.
        verbose: show a progress bar.

    Returns:
        `history`: `epoch` and `step` from 1, `loss` (mean per example since the last entry), `learning_rate` (the
        highest), `documents_per_second` and, where it was asked for, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
        ValueError: if the recipe does not fit the data or the model, or the checkpoint folder holds another training.
        OSError: if the state cannot be written.
        ImportError: without accelerate or peft, where the recipe needs them.
    """
    _check(groups, args, validate)
    history = [] if history is None else history
    steps = -(-examples_per_epoch(groups, args) // args.queries_per_step)
    with ExitStack() as within:
        within.enter_context(_own_randomness(args.seed))
        within.enter_context(_dropping(scorer, args.dropout))
        within.enter_context(adapted(scorer, args.lora))
        within.enter_context(_recomputed(scorer, args.gradient_checkpointing))
        run = Run(scorer, args, objective or ranking_objective(args), steps, history)
        progress = run.progress
        try:
            if run.restore(groups, settings) and on_step is not None:
                on_step()
            progress = run.progress
            scorer.train()
            while not progress.finished:
                picks = draw_epoch(groups, args, progress.epoch)
                with _bar(len(picks), run, verbose) as bar:
                    while progress.position < len(picks) and not progress.finished:
                        chosen = picks[progress.position : progress.position + args.queries_per_step]
                        own = run.processes.share(chosen)
                        run.step([make_example(pick, groups, args, progress.epoch) for pick in own], len(chosen))
                        if on_step is not None:
                            on_step()
                        bar.update(len(chosen))
                        speed = f"{run.documents_per_second:.1f}/s"
                        bar.set_postfix(loss=f"{run.loss:.3f}", lr=f"{run.rate:.1e}", documents=speed)
                        run.report(validate, epoch_ends=progress.position == len(picks))
                run.next_epoch()
        finally:
            run.close()
    return history


def _check(groups: Sequence[Group], args: TrainingArgs, validate: Callable[[], float] | None) -> None:
    if LOSSES[args.loss].teacher and any(group.targets is None for group in groups):
        raise ValueError(
            f"loss={args.loss!r} needs the teacher's scores: the training candidates have no column "
            f"{args.teacher_field!r}; put TeacherScores(teacher) before the student, or set teacher_field"
        )
    if args.patience is not None and validate is None:
        raise ValueError(f"patience={args.patience} needs validation data: give fit topics_or_res_va and qrels_va")


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Leaves torch's global random state as it was."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def _dropping(scorer: nn.Module, share: float | None) -> Iterator[None]:
    """Within, every layer drops this share; None changes nothing."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in scorer.modules() if share is not None else ():
        # Attention keeps its share in a number of its own where it is not a dropout layer that applies it.
        names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "dropout" in name]
        before += [(module, name, vars(module)[name]) for name in names if isinstance(vars(module)[name], Real)]
    for module, name, _ in before:
        setattr(module, name, share)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@contextmanager
def _recomputed(scorer: nn.Module, wanted: bool) -> Iterator[None]:
    """Gradient checkpointing of every Hugging Face model inside."""
    supporting = [m for m in scorer.modules() if getattr(m, "supports_gradient_checkpointing", False)]
    models: list[Any] = supporting if wanted else []
    if wanted and not models:
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


def _bar(total: int, run: Run, verbose: bool) -> Any:
    label = f"epoch {run.progress.epoch + 1}"
    shown = verbose and run.processes.main
    return pt.tqdm(total=total, initial=run.progress.position, desc=label, unit="query", disable=not shown)
