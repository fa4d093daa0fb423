"""AdamW and the schedules of its learning rates."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import nn

from .recipe import TrainingArgs

BETAS = (0.9, 0.999)
"""Betas of AdamW, unless the schedule changes the first one."""
ONE_CYCLE_START = 25.0
ONE_CYCLE_END = 1e4
"""`div_factor` and `final_div_factor` of torch's OneCycleLR, which FlexNeuART uses."""
ONE_CYCLE_BETAS = (0.95, 0.85)
"""`max_momentum` and `base_momentum` of OneCycleLR: AdamW's first beta at both ends and at the peak."""


def make_optimizer(model: nn.Module, recipe: TrainingArgs) -> torch.optim.AdamW:
    """Return AdamW for the trainable parameters, with the rate of the longest matching prefix as `peak`."""
    parameters = dict(model.named_parameters())
    for prefix in recipe.learning_rates:
        if not any(map(methodcaller("startswith", prefix), parameters)):
            parts = ", ".join(dict.fromkeys(f"{name.split('.')[0]}." for name in parameters))
            raise ValueError(f"learning_rates: no parameter begins with {prefix!r}; use one of the prefixes {parts}")
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            prefix = max(filter(name.startswith, recipe.learning_rates), key=len)
            rate, decays = recipe.learning_rates[prefix], recipe.decay == "all" or parameter.ndim > 1
            decay = recipe.weight_decay if decays else 0.0
            group = {"params": [], "prefix": prefix, "lr": rate, "peak": rate, "weight_decay": decay}
            groups.setdefault((prefix, decays), group)["params"].append(parameter)
    # The fused kernel reads and writes the weights only once per step.
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(list(groups.values()), betas=BETAS, fused=fused)
    optimizer.register_step_post_hook(_count_writes)
    return optimizer


def _count_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the writes of a step in the version of the weights, because torch does not count those of fused steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            torch.autograd.graph.increment_version(parameter)


def rate_and_beta(recipe: TrainingArgs, step: int, steps_per_epoch: int, total_steps: int) -> tuple[float, float]:
    """Return the factor of the learning rates and AdamW's first beta at a step (from 0).

    Unlike torch's schedulers, it has no state that a continued training would need. Warm-up starts with a rate of 0, so
    that the first step changes nothing, as in transformers and BERT's code. A single step has no warm-up, because it
    would learn nothing.
    """
    decay, total = recipe.epoch_decay ** (step // steps_per_epoch), total_steps
    if recipe.restart_each_epoch:
        epoch, step = divmod(step, steps_per_epoch)
        total = min(steps_per_epoch, total_steps - epoch * steps_per_epoch)
    if recipe.schedule == "one_cycle":
        (height, rises), (high, low_beta) = _cycle(recipe.warmup, step, total), ONE_CYCLE_BETAS
        low = 1 / ONE_CYCLE_START if rises else 1 / (ONE_CYCLE_START * ONE_CYCLE_END)
        return decay * (low + (1.0 - low) * height), high - (high - low_beta) * height
    warmup = int(recipe.warmup * total) if total > 1 else 0
    if step < warmup:
        factor = step / warmup
    else:
        factor = 1.0 if recipe.schedule == "constant" else (total - step) / (total - warmup)
    return decay * factor, BETAS[0]


def _cycle(warmup: float, step: int, total: int) -> tuple[float, bool]:
    """Return the height of a cycle at a step (0 at its ends, 1 at its peak), and whether it is before the peak."""
    # Steps are counted as in OneCycleLR, where the peak is at this step.
    peak, last = warmup * total - 1, total - 1
    if total == 1:  # at the end of a cycle, the step would learn almost nothing
        return 1.0, True
    if step <= peak:
        return (step / peak if peak > 0 else 1.0), True
    return 1.0 - (step - peak) / (last - peak), False
