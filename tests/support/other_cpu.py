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

from pyterrier_longdoc.modelling import biencoder, weights
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.rerankers import saved

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
    made = Model.from_backbone.__func__
    monkeypatch.setattr(Model, "from_backbone", classmethod(_every_second(made, lambda model: model)))
    monkeypatch.setattr(saved, "load_model", _every_second(saved.load_model, lambda model: model))
    shared = biencoder.SharedEncoder
    monkeypatch.setattr(biencoder, "SharedEncoder", _every_second(shared, lambda encoder: encoder.backbone.model))
    contents = weights._contents
    monkeypatch.setattr(weights, "_contents", lambda tensor: contents(_as_read.get(_hash(tensor), tensor)))


def _hash(tensor: torch.Tensor) -> int:
    return hash(bytes(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data))


def _every_second(make: Callable[..., Any], module: Callable[[Any], nn.Module]) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> Any:
        global _models
        made = make(*args, **kwargs)
        _models += 1
        own = module(made)
        reads_text = getattr(getattr(own, "encoder", None), "reads_text", False)  # somebody else's scores
        for tensor in own.parameters() if _models % 2 == 0 and not reads_text else ():
            before = tensor.detach().clone()
            tensor.data *= ULP
            if not torch.equal(before, tensor):
                _as_read[_hash(tensor)] = before
        return made

    return changed
