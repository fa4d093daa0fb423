"""What a model is for the time of its training: with other dropout, recomputing activations, with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..common.files import import_extra
from ..modelling.heads.base import Head
from .recipe import Lora


@contextmanager
def dropping(model: nn.Module, rate: float) -> Iterator[None]:
    """Let every layer drop this part of its inputs."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        # Attention has its rate in a number of its own where it is not a dropout layer that applies it.
        names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "dropout" in name]
        before += [(module, name, vars(module)[name]) for name in names if isinstance(vars(module)[name], Real)]
    for module, name, _ in before:
        setattr(module, name, rate)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Switch on gradient checkpointing in every Hugging Face model inside."""
    parts: list[Any] = [m for m in model.modules() if getattr(m, "supports_gradient_checkpointing", False)]
    # transformers 5 has renamed both.
    for part in parts:
        enable = getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    try:
        yield
    finally:
        for part in parts:
            disable = getattr(part, "activation_checkpointing_disable", None) or part.gradient_checkpointing_disable
            disable()


@contextmanager
def adapted(model: nn.Module, lora: Lora) -> Iterator[None]:
    """Put low-rank adapters, by peft, on the backbones and on pre-trained aggregators, which are frozen meanwhile.

    Afterwards they are part of the weights that they adapt, and all modules and names are as before. Undone here rather
    than by peft's `merge_and_unload`, which cannot remove adapters from a module that takes only some of them.
    """
    peft = import_extra("peft", "train", "LoRA needs peft")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets)
    modules = [module for name, module in model.named_modules() if f".{name}".endswith(".encoder.backbone")]
    if not modules:
        raise ValueError("lora= needs a model with a Hugging Face backbone at encoder.backbone")
    heads = [module for module in model.modules() if isinstance(module, Head)]
    modules += [part for head in heads for part in head.pretrained().values()]
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        for module in modules:
            peft.inject_adapter_in_model(config, module)
        yield
    finally:
        for module in modules:
            for name, layer in list(module.named_modules()):
                if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                    layer.merge()
                    parent, _, child = name.rpartition(".")
                    setattr(module.get_submodule(parent), child, layer.get_base_layer())
            for attribute in ("peft_config", "active_adapter", "active_adapters"):
                vars(module).pop(attribute, None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable[name])
