"""FSDP: weights, gradients and moments of a backbone divided among the processes of a training."""

from __future__ import annotations

import copy
import os
from typing import Any, cast

import torch
from torch import distributed, nn

from ..modelling.backbones.architectures import layer_stack
from ..modelling.encoder import WindowEncoder


def is_asked_for() -> bool:
    """Whether `accelerate launch --use_fsdp` has started this process, or torchrun with that variable set."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


class Sharding:
    """A scorer's backbone with its weights divided among all processes, each layer's apart: torch's `fully_shard`.

    A copy is divided, which is in the scorer meanwhile; the backbone itself waits in the memory of the CPU.

    A layer's weights are gathered for each pass through it, by all processes at once; but how many passes a process
    makes depends on the windows of its own queries. So each tells, before a pass in training, that it makes one, and
    who has no more joins the others with a token that no loss depends on.

    Args:
        scorer: in all processes with the same weights.

    Raises:
        ValueError: if the model is no cross-encoder over a backbone that is a stack of layers.
        ImportError: if torch is too old.
    """

    def __init__(self, scorer: nn.Module) -> None:
        try:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            FSDPModule.set_force_sum_reduction_for_comms  # noqa: B018 - the newest of what is needed
        except (ImportError, AttributeError) as error:
            raise ImportError(f"FSDP needs torch 2.9 or later, and this is {torch.__version__}") from error
        encoder = getattr(scorer, "encoder", None)
        if type(encoder) is not WindowEncoder:  # others use their backbone's weights elsewhere than in its passes
            raise ValueError(
                f"FSDP is for one backbone that reads a query and a window together, which a "
                f"{type(encoder or scorer).__name__} has not: train it without, by --multi_gpu or torchrun"
            )
        self.device = next(scorer.parameters()).device
        self.encoder: WindowEncoder = encoder
        layers = layer_stack(encoder.backbone)
        self.original = encoder.backbone.cpu()
        self.backbone = copy.deepcopy(self.original)
        mesh = distributed.init_device_mesh(self.device.type, (distributed.get_world_size(),))
        for module in (*self.backbone.get_submodule(layers).children(), self.backbone):
            unit = fully_shard(module, mesh=mesh)
            unit.set_gradient_divide_factor(1.0)  # gradients are summed, not averaged
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot do it otherwise
        # Before torch's own hook, which gathers.
        self.backbone.register_forward_pre_hook(lambda *_: self._announce(), prepend=True)
        self._joins = False
        self.encoder.backbone = self.backbone
        rest = [tensor for tensor in (*scorer.parameters(), *scorer.buffers()) if not is_sharded(tensor)]
        self.before = [(tensor, tensor.detach().clone()) for tensor in rest]

    def _announce(self) -> None:
        # In validation all processes make the same passes.
        if torch.is_grad_enabled() and not self._joins:
            self._anyone(True)

    def _anyone(self, more: bool) -> bool:
        """Whether any process makes one more pass; all must ask."""
        count = torch.tensor(float(more), device=self.device)
        distributed.all_reduce(count)
        return bool(count)

    def join(self) -> torch.Tensor:
        """Takes part in the passes that other processes still make.

        Returns:
            A zero with their graph: the backward pass, too, is common.
        """
        nothing = torch.zeros((), device=self.device)
        self._joins = True
        try:
            while self._anyone(False):
                states = self.backbone(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))[0]
                nothing = nothing + 0.0 * states.float().sum()
        finally:
            self._joins = False
        return nothing

    def end(self, *, gather: bool) -> None:
        """Gives the scorer its backbone back.

        Args:
            gather: the model has the weights of the training, for which all processes must ask; else those from before.
        """
        pairs = self.before
        if gather:
            divided = self.backbone.state_dict()
            pairs = [(own, divided[name]) for name, own in self.original.state_dict().items()]
        with torch.no_grad():
            for own, tensor in pairs:
                own.copy_(whole(tensor))
        self.encoder.backbone = self.original.to(self.device)


# Tensors of which each process has a part.


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process has a part of it alone."""
    return hasattr(tensor, "full_tensor")  # its class stands elsewhere in older versions of torch


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor; if it is sharded, all processes must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_part(tensor: Any) -> torch.Tensor:
    """What of a tensor this process has."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def divided_as(reference: Any, value: torch.Tensor) -> torch.Tensor:
    """A value that every process has, on the device of a tensor and, if it is of its shape, divided as that is."""
    value = value.to(reference.device)
    if not is_sharded(reference) or is_sharded(value) or value.shape != reference.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> None:
    """As torch's `clip_grad_norm_`, which does not take sharded parameters and others together."""
    kinds = [[p for p in parameters if p.grad is not None and is_sharded(p) == kind] for kind in (False, True)]
    norms = [whole(nn.utils.get_total_norm([cast(torch.Tensor, p.grad) for p in own])) for own in kinds if own]
    total = torch.stack(norms).norm()
    for own in kinds:
        nn.utils.clip_grads_with_norm_(own, largest, total)
