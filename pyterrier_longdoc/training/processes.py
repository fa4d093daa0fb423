"""One process or several that train the same model, by accelerate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .args import TrainingArgs
from .extras import required

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a training: each takes its share of a step's queries, and their gradients are summed.

    So any number of processes computes what one does, up to rounding and dropout. A program that calls `fit` becomes
    several by `accelerate launch` on GPUs, by `torchrun --nproc_per_node 4` also on CPUs.

    Attributes:
        accelerator: accelerate's; None for one process without trackers.
    """

    accelerator: Any = None

    @classmethod
    def start(cls, scorer: nn.Module, args: TrainingArgs) -> Processes:
        """Joins the other processes, if there are any, and gives all of them the first one's weights.

        Raises:
            ImportError: without accelerate, if it is needed.
        """
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not several and not args.trackers:
            return cls()
        accelerate = required("accelerate", "training in several processes" if several else "trackers=")
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
        return cls(accelerator)

    @property
    def count(self) -> int:
        """How many they are."""
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        return 0 if self.accelerator is None else int(self.accelerator.process_index)

    @property
    def main(self) -> bool:
        """Whether this one writes and reports."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part."""
        return items[self.rank :: self.count]

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(total, "sum").tolist()

    def of_main(self, value: float) -> float:
        """The first process's value."""
        return self.sum(value if self.main else 0.0)[0]

    def sum_gradients(self, scorer: nn.Module) -> None:
        """Makes each gradient the sum over all processes."""
        if self.count == 1:
            return
        parameters = [p for p in scorer.parameters() if p.requires_grad]
        has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=self.accelerator.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # One message, not hundreds.
        flat = torch.cat([has_gradient, *(g.float().flatten() for g in gradients)])
        flat = self.accelerator.reduce(flat, "sum")
        counts, *summed = flat.split([len(parameters), *(g.numel() for g in gradients)])
        for parameter, count, gradient in zip(parameters, counts.tolist(), summed, strict=True):
            # As in one process, a parameter that no query needed stays as it is, weight decay included.
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype) if count else None

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()

    def log(self, entry: dict[str, Any]) -> None:
        """Sends a line of the history to the trackers."""
        if self.accelerator is not None:
            numbers = {name: value for name, value in entry.items() if name != "step"}
            self.accelerator.log(numbers, step=entry["step"])

    def end(self) -> None:
        """Closes the trackers."""
        if self.accelerator is not None:
            self.accelerator.end_training()
