"""The training loop: sample, score, loss, step."""

from __future__ import annotations

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
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Trains `scorer` in place.

    Args:
        scorer: `scorer(queries, texts) -> (B,)` scores with a graph.
        groups: training queries with positives and negatives.
        args: the recipe.
        validate: called after each epoch for a figure of merit; the weights with the best one are kept.
        verbose: show a progress bar.

    Returns:
        One entry per epoch: `epoch`, `loss` (mean per query) and, with `validate`, `validation`.

    Raises:
        FloatingPointError: if the loss is not finite; the weights are then those before the step.
    """
    optimizer = torch.optim.AdamW(parameter_groups(scorer, args), weight_decay=args.weight_decay)
    steps_per_epoch = -(-len(groups) // args.queries_per_step)
    warmup_steps = max(1, round(args.warmup * args.epochs * steps_per_epoch))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
    rng = random.Random(args.seed)
    history: list[dict[str, Any]] = []
    best: tuple[float, dict[str, torch.Tensor]] | None = None
    scorer.train()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(scorer)):
            torch.manual_seed(args.seed)
            for epoch in range(args.epochs):
                loss = _train_epoch(scorer, groups, args, optimizer, schedule, rng, f"epoch {epoch + 1}", verbose)
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
    optimizer: torch.optim.Optimizer,
    schedule: Any,
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
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.set_postfix(loss=f"{total / (start + len(chosen)):.3f}")
    return total / len(order)


def _cuda_devices(module: nn.Module) -> list[int]:
    devices = {p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"}
    return sorted(devices)
