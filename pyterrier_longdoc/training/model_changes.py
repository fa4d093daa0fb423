"""Temporary changes of a model during training: dropout, gradient checkpointing, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..common.files import import_extra
from ..modelling.heads.base import Head
from .recipe import Lora, TrainingArgs


@contextmanager
def changed_for_training(model: nn.Module, recipe: TrainingArgs) -> Iterator[None]:
    """Apply the dropout, adapters and gradient checkpointing of the recipe to the model."""
    with ExitStack() as stack:
        if recipe.dropout is not None:
            stack.enter_context(dropping(model, recipe.dropout))
        if recipe.lora is not None:
            stack.enter_context(adapted(model, recipe.lora))
        if recipe.gradient_checkpointing:
            stack.enter_context(recomputing(model))
        yield


@contextmanager
def dropping(model: nn.Module, rate: float) -> Iterator[None]:
    """Set the dropout rate of every layer."""
    rates: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        # Attention without a dropout layer stores its rate in an attribute.
        names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "dropout" in name]
        values = [(name, vars(module)[name]) for name in names]
        # Not flags, such as the `token_dropout` of ESM.
        rates += [(module, name, v) for name, v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    for module, name, _ in rates:
        setattr(module, name, rate)
    try:
        yield
    finally:
        for module, name, old_rate in rates:
            setattr(module, name, old_rate)


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Enable gradient checkpointing in every Hugging Face model in the model."""
    parts: list[Any] = [m for m in model.modules() if getattr(m, "supports_gradient_checkpointing", False)]
    if not parts:
        raise ValueError("gradient_checkpointing=True has no effect: the backbone does not support it")
    # transformers 5 renamed both methods.
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
    """Add peft's low-rank adapters to backbones and pre-trained aggregators, which are frozen in the meantime.

    Afterwards, the adapters are merged into the weights, and all modules and names are as before. peft's
    `merge_and_unload` is not used, because it cannot remove adapters from a module with adapters on some layers only.
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
