"""Another processor on this one: every second model has weights that are an ulp or two larger.

A processor may compute two loads of one model differently by so much. Tests that compare two loads must hold there
too: `pytest --other-cpu`. Fingerprints are those of the weights as they were read, as they would be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pyterrier_longdoc.modelling import fingerprint
from pyterrier_longdoc.modelling.checkpoint import Weights
from pyterrier_longdoc.modelling.embed import SharedEncoder

ULP = 1 + 2**-23

_models = 0
_as_read: dict[int, torch.Tensor] = {}
"""Weights as they were read, by the hash of what became of them."""


def start_anew() -> None:
    """The next model is the first of a test, in which nothing is changed."""
    global _models
    _models = 0


def change_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the weights of models, new and saved ones, and of the encoders of bi-encoders as they are made."""
    of_encoder = lambda encoder: encoder.backbone.model  # noqa: E731
    for cls, module in ((Weights, _with_encoder), (SharedEncoder, of_encoder)):
        monkeypatch.setattr(cls, "__init__", _every_second(cls.__init__, module))
    contents = fingerprint._contents
    monkeypatch.setattr(fingerprint, "_contents", lambda tensor: contents(_as_read.get(_hash(tensor), tensor)))


def _with_encoder(weights: Weights) -> nn.Module:
    """The model; nothing of one whose windows somebody else scores."""
    return weights.scorer if list(weights.scorer.encoder.parameters()) else nn.Module()


def _hash(tensor: torch.Tensor) -> int:
    return hash(bytes(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data))


def _every_second(make: Callable[..., None], module: Callable[[Any], nn.Module]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        global _models
        make(self, *args, **kwargs)
        _models += 1
        for tensor in module(self).parameters() if _models % 2 == 0 else ():
            before = tensor.detach().clone()
            tensor.data *= ULP
            if not torch.equal(before, tensor):
                _as_read[_hash(tensor)] = before

    return made
