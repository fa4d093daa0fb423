"""Low-rank adapters on the pre-trained parts while a model is trained, by peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..modelling.heads.base import Head
from .args import Lora
from .extras import required


@contextmanager
def adapted(scorer: nn.Module, lora: Lora | None) -> Iterator[None]:
    """Within, the backbone has trainable adapters and is itself frozen; afterwards they are part of its weights.

    The modules are then the same as before, and so are the names of all weights: a model trained so is saved and
    loaded like any other.

    Args:
        scorer: a model with a Hugging Face backbone at `encoder.backbone`, or several such models.
        lora: None changes nothing.

    Raises:
        ImportError: without peft.
        ValueError: if no layer is named so.
    """
    if lora is None:
        yield
        return
    attach(scorer, lora)
    try:
        yield
    finally:
        merge(scorer)


def attach(scorer: nn.Module, lora: Lora) -> None:
    """Puts fresh adapters on the backbone and on a pre-trained aggregator, and freezes these.

    Adapters begin as no change. Their weights are the parameters of `scorer` named `...lora_A...` and `...lora_B...`.
    """
    peft = required("peft", "LoRA")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets)
    trainable = {name: p.requires_grad for name, p in scorer.named_parameters()}
    modules = _adapted_modules(scorer)
    try:
        for module in modules:
            peft.inject_adapter_in_model(config, module)
    except ValueError as error:
        merge(scorer)
        for name, parameter in scorer.named_parameters():
            parameter.requires_grad_(trainable[name])
        raise ValueError(f"{lora!r} does not fit the backbone: {error}") from error


def merge(scorer: nn.Module) -> None:
    """Adds the adapters to the weights that they adapt, and removes them; all of it is trainable again."""
    layers = required("peft.tuners.tuners_utils", "LoRA")
    for adapted_module in _adapted_modules(scorer):
        for name, module in list(adapted_module.named_modules()):
            if isinstance(module, layers.BaseTunerLayer):
                module.merge()
                parent, _, child = name.rpartition(".")
                setattr(adapted_module.get_submodule(parent), child, module.get_base_layer())
        for attribute in ("peft_config", "active_adapter", "active_adapters"):
            vars(adapted_module).pop(attribute, None)
        adapted_module.requires_grad_(True)


def _adapted_modules(scorer: nn.Module) -> list[nn.Module]:
    """Backbones and pre-trained aggregators; ValueError without any backbone."""
    heads = [module for module in scorer.modules() if isinstance(module, Head)]
    backbones = [module for name, module in scorer.named_modules() if f".{name}".endswith(".encoder.backbone")]
    if not backbones:
        raise ValueError("lora= needs a model with a Hugging Face backbone at encoder.backbone")
    return [*backbones, *(part for head in heads for part in head.pretrained().values())]
