"""FSDP: weights, gradients and moments of a backbone divided among the processes of a training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def is_asked_for() -> bool:
    """Whether `accelerate launch --use_fsdp`, or who set its variable for torchrun, has started this process."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process has a part of the tensor alone."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; if it is sharded, all processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value that every process has, on the device of a tensor and divided as that is."""
    value = value.to(reference.device)
    if not isinstance(reference, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)


class Passes:
    """Keeps the processes of a training together: each pass through a sharded backbone gathers its layers' weights.

    How many passes a process makes depends on the windows of its own queries. So each one says, before a pass, that it
    makes one; and a process that has no more joins those of the others, with a token that no loss depends on.

    Args:
        backbone: the sharded one.
        device: of the processes' messages.
    """

    def __init__(self, backbone: nn.Module, device: torch.device) -> None:
        self.backbone, self.device = backbone, device
        self._joins = False
        backbone.register_forward_pre_hook(lambda *_: self._announce(), prepend=True)  # before FSDP gathers

    def _announce(self) -> None:
        # Validation makes the same passes in all processes.
        if torch.is_grad_enabled() and not self._joins:
            self._anyone(True)

    def _anyone(self, more: bool) -> bool:
        """Whether any process makes one more pass; called by all."""
        count = torch.tensor(float(more), device=self.device)
        distributed.all_reduce(count)
        return bool(count)

    def join(self) -> torch.Tensor:
        """Makes as many passes as the others still make; returns zero, with their graph."""
        nothing = torch.zeros((), device=self.device)
        self._joins = True
        try:
            while self._anyone(False):
                states = self.backbone(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))[0]
                nothing = nothing + 0.0 * states.float().sum()
        finally:
            self._joins = False
        return nothing


@contextmanager
def sharded(scorer: nn.Module) -> Iterator[Passes]:
    """Within, each process has a part of the backbone's weights: of each layer, and of what is outside them.

    A copy is sharded, by torch's `fully_shard`; the backbone itself waits in the memory of the CPU. Afterwards it has
    the weights of the training; after an error those from before, since not all processes may have had it.

    Raises:
        ValueError: if the model has not one Hugging Face backbone, with layers.
        ImportError: with a torch before 2.6.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ImportError("FSDP needs torch 2.6 or later: pip install -U torch") from error
    found = [name for name, _ in scorer.named_modules() if f".{name}".endswith(".encoder.backbone")]
    if len(found) != 1:
        raise ValueError(f"FSDP is for models with one Hugging Face backbone, and this one has {len(found)}")
    parent, device = scorer.get_submodule(found[0].rpartition(".")[0]), next(scorer.parameters()).device
    original: Any = parent.backbone.cpu()
    backbone = copy.deepcopy(original)
    mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
    for module in (*layers_of(backbone), backbone):
        unit = fully_shard(module, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)  # the sum over processes, not the mean
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
    parent.backbone = backbone
    try:
        yield Passes(backbone, device)
        with torch.no_grad():
            for own, tensor in zip(original.state_dict().values(), backbone.state_dict().values(), strict=True):
                own.copy_(whole(tensor))
    finally:
        parent.backbone = original.to(device)


def layers_of(backbone: Any) -> Sequence[nn.Module]:
    """The layers of a Hugging Face model."""
    count = getattr(getattr(backbone, "config", None), "num_hidden_layers", None)
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"FSDP is for backbones that are a stack of layers, and {type(backbone).__name__} is not")


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> None:
    """`clip_grad_norm_` for parameters some of which are sharded."""
    kinds = [[p for p in parameters if p.grad is not None and is_sharded(p) == kind] for kind in (False, True)]
    norms = [whole(nn.utils.get_total_norm([p.grad for p in own])) for own in kinds if own]
    norm = torch.stack(norms).norm()
    for own in kinds:
        nn.utils.clip_grads_with_norm_(own, largest, norm)
