"""The weights of a reranker in memory, and what they were made for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .backbones import Backbone
from .heads import Head, build_head
from .scorer import LongDocScorer
from .windows import Windows

HeadSpec = tuple[str, dict[str, Any]]
"""Registered name and options of a head."""


@dataclass(eq=False)
class Weights:
    """A scorer and its history.

    Attributes:
        scorer: the model.
        backbone: what its encoder was built from.
        made_for: the arguments that decide about the weights; with others the weights are of no use.
        head: name and options of the scorer's head.
        ready: whether the scores make sense without training.
        trained: whether `fit` or `load` gave the weights, so that they must not be lost.
        history: one entry per epoch of training, and per validation.
        recipe: of the last training, JSON-able; None before one.
    """

    scorer: LongDocScorer
    backbone: Backbone
    made_for: tuple[Any, ...]
    head: HeadSpec
    ready: bool
    trained: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] | None = None

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        head: HeadSpec,
        windows: Windows,
        *,
        made_for: tuple[Any, ...],
        seed: int,
        scorer_class: type[LongDocScorer] = LongDocScorer,
        **reading: Any,
    ) -> Weights:
        """Puts a head on a loaded backbone, warm-started where the checkpoint allows.

        Args:
            backbone: what the encoder is built from.
            head: the head.
            windows: how texts are cut.
            made_for: see the class.
            seed: of random weights.
            scorer_class: how the parts work together.
            **reading: further arguments of the scorer.
        """
        module = seeded_head(head, backbone.hidden_size, seed, channels=backbone.channels)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            scorer = scorer_class(backbone, windows, module, **reading)
        ready = scorer.warm_start(backbone)
        return cls(scorer.eval(), backbone, made_for, head, ready)

    def mark_trained(self, recipe: dict[str, Any]) -> None:
        """From now on the weights, trained by this recipe, make sense and must not be lost."""
        self.trained = self.ready = True
        self.recipe = recipe

    def exchange_head(self, head: HeadSpec, seed: int) -> bool:
        """Puts another head on the same encoder.

        A head of the same kind takes over the weights; any other starts afresh, which trained weights forbid.

        Returns:
            Whether it was done; False if trained weights would be lost.
        """
        new = seeded_head(head, self.backbone.hidden_size, seed, channels=self.backbone.channels)
        old = self.scorer.head
        if self._same_weights_serve(head, new):
            new.load_state_dict(old.state_dict())
            self.scorer.head = new
        elif self.trained:
            return False
        else:
            self.scorer.head = new
            self.ready = self.scorer.warm_start(self.backbone)
        self.head = head
        self.scorer.eval()
        return True

    def _same_weights_serve(self, head: HeadSpec, new: Head) -> bool:
        """Whether `new` differs from the present head in nothing that the weights were trained for."""
        changed = {name for name in head[1] if head[1][name] != self.head[1].get(name)}
        return type(new) is type(self.scorer.head) and changed <= set(new.tunable)

    def adopt(self, other: Weights) -> bool:
        """Takes over another model's encoder, and its head if it is of the same kind, else what fits of its last layer.

        Returns:
            Whether it was done; False if the encoders differ in kind, and then nothing has changed.
        """
        encoder, its_encoder = self.scorer.encoder, other.scorer.encoder
        if _shapes(encoder) != _shapes(its_encoder):
            return False
        for name, module in self.scorer.named_children():
            its_module = getattr(other.scorer, name, None)
            if name != "head" and its_module is not None and _shapes(module) == _shapes(its_module):
                module.load_state_dict(its_module.state_dict())
        new, old = self.scorer.head, other.scorer.head
        if type(new) is type(old) and _shapes(new) == _shapes(old):
            new.load_state_dict(old.state_dict())
            self.ready = other.ready
        elif old.needs == "cls":
            start = replace(self.scorer.take_over(self.backbone), final=old.final)
            self.ready = new.warm_start(start) and other.ready
        self.trained = self.trained or other.trained
        return True


def seeded_head(head: HeadSpec, hidden_size: int, seed: int, *, channels: int = 1) -> Head:
    """Makes a head with weights that depend on `seed` alone; the global random state stays as it is."""
    name, options = head
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return build_head(name, hidden_size, channels=channels, **options)


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}
