"""Training in several processes and with trackers, by accelerate."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..common.files import import_extra
from .recipe import TrainingArgs


def is_first_process() -> bool:
    """Return whether this is the only process or the first of several training processes."""
    return os.environ.get("RANK", "0") == "0"


class Processes:
    """One or several training processes, all of which hold all weights and start with those of the first process.

    Each process computes the gradients for a part of the queries of a step, and the gradients are summed. Up to
    rounding and dropout, the result does not depend on the number of processes. To train in several processes, run the
    program with `accelerate launch` on GPUs, or with `torchrun --nproc_per_node 4` also on CPUs.
    """

    def __init__(self, model: nn.Module, recipe: TrainingArgs) -> None:
        self.rank, self.number = 0, 1
        self.accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not recipe.trackers:
            return
        accelerate = import_extra("accelerate", "train", "several processes, or trackers=, need accelerate")
        device, folder = next(model.parameters()).device, recipe.checkpoint or "."
        trackers = list(recipe.trackers) or None
        self.accelerator = accelerate.Accelerator(cpu=device.type == "cpu", log_with=trackers, project_dir=folder)
        self.rank, self.number = self.accelerator.process_index, self.accelerator.num_processes
        if trackers:
            self.accelerator.init_trackers("pyterrier_longdoc", {k: str(v) for k, v in recipe.as_dict().items()})
        if self.number > 1:
            model.to(self.accelerator.device)
            with torch.no_grad():
                accelerate.utils.broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])

    def sum(self, *values: float) -> Sequence[float]:
        """Return the sums of numbers over all processes."""
        if self.number == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(total, "sum").tolist()

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum each gradient over all processes."""
        if self.number == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        # As in one process, parameters that no query uses are not changed, not even by weight decay.
        counts = self.sum(*[float(p.grad is not None) for p in parameters])
        active = [p for p, count in zip(parameters, counts, strict=True) if count]
        for parameter in active:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients: list[Any] = [parameter.grad for parameter in active]
        # Sent in a single message.
        summed = self.accelerator.reduce(nn.utils.parameters_to_vector(gradients), "sum")
        nn.utils.vector_to_parameters(summed, gradients)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Send an entry of the history to the trackers."""
        if self.accelerator is not None:
            self.accelerator.log({k: v for k, v in entry.items() if k != "step"}, step=entry["step"])

    def end(self) -> None:
        """End the trackers. `end_training` of accelerate would also end the connection needed by the next fit."""
        for tracker in [] if self.accelerator is None else self.accelerator.trackers:
            tracker.finish()
