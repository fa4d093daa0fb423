"""The training loop: sample, score, loss, step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pyterrier as pt
import torch
from torch import nn

from .args import TrainingArgs
from .groups import Group
from .losses import pairwise_margin


def train(
    scorer: nn.Module,
    groups: Sequence[Group],
    args: TrainingArgs,
    *,
    validate: Callable[[], float] | None = None,
    on_step: Callable[[], None] | None = None,
    history: list[dict[str, Any]] | None = None,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Trains `scorer` in place.

    Interrupted, the scorer keeps the best epoch's weights if one was validated, else those of the last step.

    Args:
        scorer: `scorer(queries, texts) -> (B,)` scores with a graph.
        groups: training queries with positives and negatives.
        args: the recipe.
        validate: called after each epoch for a figure of merit; the weights with the best one are kept.
        on_step: called after each optimiser step.
        history: gets one entry per epoch as it ends; None makes a new list.
        verbose: show a progress bar.

    Returns:
        `history`: of each epoch `epoch`, `loss` (mean per query) and, with `validate`, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
    """
    optimizer = torch.optim.AdamW(parameter_groups(scorer, args), weight_decay=args.weight_decay)
    steps_per_epoch = -(-len(groups) // args.queries_per_step)
    warmup_steps = max(1, round(args.warmup * args.epochs * steps_per_epoch))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
    rng = random.Random(args.seed)
    history = [] if history is None else history
    best: tuple[float, dict[str, torch.Tensor]] | None = None
    scorer.train()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(args.seed)
            for epoch in range(args.epochs):
                step = functools.partial(_step, optimizer, schedule, on_step)
                loss = _train_epoch(scorer, groups, args, step, rng, f"epoch {epoch + 1}", verbose)
                entry = {"epoch": epoch + 1, "loss": loss}
                if validate is not None:
                    scorer.eval()
                    entry["validation"] = value = validate()
                    scorer.train()
                    if best is None or value > best[0]:
                        best = (value, {k: v.detach().clone() for k, v in scorer.state_dict().items()})
                history.append(entry)
    finally:
        # An aborted query must not leave its gradients to the next training.
        scorer.zero_grad(set_to_none=True)
        scorer.eval()
        if best is not None:
            scorer.load_state_dict(best[1])
    return history


def parameter_groups(scorer: nn.Module, args: TrainingArgs) -> list[dict[str, Any]]:
    """Trainable parameters by learning rate: the longest matching prefix of the parameter's name counts."""
    by_prefix: dict[str, list[nn.Parameter]] = {}
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            prefix = max((p for p in args.learning_rates if name.startswith(p)), key=len)
            by_prefix.setdefault(prefix, []).append(parameter)
    return [{"params": params, "lr": args.learning_rates[prefix]} for prefix, params in by_prefix.items()]


def _train_epoch(
    scorer: nn.Module,
    groups: Sequence[Group],
    args: TrainingArgs,
    step: Callable[[], None],
    rng: random.Random,
    label: str,
    verbose: bool,
) -> float:
    order = rng.sample(range(len(groups)), len(groups))
    total = 0.0
    with pt.tqdm(total=len(order), desc=label, unit="query", disable=not verbose) as bar:
        for start in range(0, len(order), args.queries_per_step):
            chosen = order[start : start + args.queries_per_step]
            for i in chosen:
                group = groups[i]
                texts = [rng.choice(group.positives), rng.choice(group.negatives)]
                scores = scorer([group.query] * 2, texts).view(1, 2)
                loss = pairwise_margin(scores, margin=args.margin)
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss.item()} at query {group.qid!r}; lower learning_rates")
                loss.backward()
                total += loss.item()
                bar.update(1)
            step()
            bar.set_postfix(loss=f"{total / (start + len(chosen)):.3f}")
    return total / len(order)


def _step(optimizer: torch.optim.Optimizer, schedule: Any, on_step: Callable[[], None] | None) -> None:
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if on_step is not None:
        on_step()
