"""Layers between a backbone's pooled state and the head, in the form in which this package saves them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Step = dict[str, Any]
"""A layer of a representation step as JSON-able values: its `kind`, `"dense"` or `"norm"`, and its arguments."""


class Dense(nn.Module):
    """A module of sentence-transformers: `activation(linear(x))`, plus `x` if it is residual."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, activation: str, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = nn.Identity() if activation == "Identity" else getattr(nn.modules.activation, activation)()
        self.adds_input = residual
        if residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(..., outputs)` for `(..., inputs)`."""
        output: torch.Tensor = self.activation(self.linear(x))
        if not self.adds_input:
            return output
        return output + (self.residual(x) if hasattr(self, "residual") else x)


def build_step(step: Step) -> nn.Module:
    """Return the layer of a description, with random weights."""
    if step["kind"] == "norm":
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(step["size"])))  # the name in checkpoints
    return Dense(**{name: value for name, value in step.items() if name != "kind"})


class RepresentationSteps(nn.Sequential):
    """A representation step of several layers, between the pooled state and the last layer."""

    def __init__(self, steps: Sequence[Step], width: int) -> None:
        super().__init__(*map(build_step, steps))
        self.description = [dict(step) for step in steps]
        self.width = next((step["outputs"] for step in reversed(steps) if "outputs" in step), width)
