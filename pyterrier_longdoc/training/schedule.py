"""Learning rates as a function of the step, so that a training that continues needs no state of a scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .args import TrainingArgs

ONE_CYCLE_START = 25.0
ONE_CYCLE_END = 1e4
"""`div_factor` and `final_div_factor` of torch's OneCycleLR, which FlexNeuART uses."""


def rate_factor(args: TrainingArgs, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """By what the learning rates are multiplied at a step.

    Args:
        args: the recipe: `schedule`, `warmup`, `epoch_decay`, `restart_each_epoch`.
        step: from 0.
        steps_per_epoch: optimiser steps of a full epoch.
        total_steps: of the training.
    """
    epoch, within = divmod(step, steps_per_epoch)
    decay = args.epoch_decay**epoch
    if args.restart_each_epoch:
        return decay * _shape(args, within, min(steps_per_epoch, total_steps - epoch * steps_per_epoch))
    return decay * _shape(args, step, total_steps)


def _shape(args: TrainingArgs, step: int, total: int) -> float:
    if args.schedule == "one_cycle":
        # Its steps are counted as OneCycleLR does: the peak is reached at this one.
        peak, last = args.warmup * total - 1, total - 1
        if step <= peak:
            return _between(1 / ONE_CYCLE_START, 1.0, step / peak if peak > 0 else 1.0)
        return _between(1.0, 1 / (ONE_CYCLE_START * ONE_CYCLE_END), (step - peak) / (last - peak))
    warmup = max(1, round(args.warmup * total))
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if args.schedule == "constant" else (total - step) / (total - warmup + 1)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def make_optimizer(scorer: nn.Module, args: TrainingArgs) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, each group with its learning rate as `peak`."""
    device = next(scorer.parameters()).device
    # The fused kernel reads and writes the weights once per step instead of several times.
    return torch.optim.AdamW(parameter_groups(scorer, args), fused=device.type in ("cpu", "cuda"))


def parameter_groups(scorer: nn.Module, args: TrainingArgs) -> list[dict[str, Any]]:
    """Trainable parameters by learning rate and decay: the longest matching prefix of the parameter's name counts.

    Raises:
        ValueError: if a prefix matches no parameter.
    """
    names = [name for name, _ in scorer.named_parameters()]
    unused = [prefix for prefix in args.learning_rates if not any(name.startswith(prefix) for name in names)]
    if unused:
        parts = ", ".join(dict.fromkeys(f"{name.split('.')[0]}." for name in names))
        raise ValueError(f"no parameter's name begins with learning_rates' {unused[0]!r}; they begin with {parts}")
    by_kind: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            prefix = max((p for p in args.learning_rates if name.startswith(p)), key=len)
            decays = args.decay == "all" or parameter.ndim > 1
            by_kind.setdefault((prefix, decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": args.learning_rates[prefix],
            "peak": args.learning_rates[prefix],
            "weight_decay": args.weight_decay if decays else 0.0,
        }
        for (prefix, decays), parameters in by_kind.items()
    ]


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Multiplies the groups' peak learning rates by the factor; returns the highest that results."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return max(group["lr"] for group in optimizer.param_groups)
