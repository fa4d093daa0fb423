"""What a step minimises: the loss of the scores of some examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .args import TrainingArgs
from .losses import LOSSES
from .sampling import Example

Objective = Callable[[nn.Module, Sequence[Example]], torch.Tensor]
"""The loss of some examples, summed: a scalar with a graph."""


def ranking_objective(args: TrainingArgs) -> Objective:
    """The recipe's loss of the scores of each example's candidates."""
    loss = LOSSES[args.loss]

    def objective(scorer: nn.Module, examples: Sequence[Example]) -> torch.Tensor:
        queries = [example.query for example in examples for _ in example.texts]
        texts = [text for example in examples for text in example.texts]
        scores = scorer(queries, texts).float().split([len(example.texts) for example in examples])
        losses = []
        for example, own in zip(examples, scores, strict=True):
            labels = own.new_tensor(example.labels)
            targets = None if example.targets is None else own.new_tensor(example.targets)[None]
            losses.append(loss.compute(own[None], labels[None], targets, args))
        return torch.stack(losses).sum()

    return objective
