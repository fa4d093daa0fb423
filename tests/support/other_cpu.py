"""Another processor on this one: every second model that is loaded has weights that are an ulp or two larger.

A processor may compute two loads of one model differently by so much. Tests that compare two loads must hold there
too: `pytest --other-cpu`. Fingerprints are those of the weights as they were read, as they would be there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pyterrier_longdoc.modelling import checkpoint, fingerprint
from pyterrier_longdoc.modelling.backbones import load, modular

ULP = 1 + 2**-23

_loads = 0
_as_read: dict[int, torch.Tensor] = {}
"""Weights as they were read, by the hash of what became of them."""


def start_anew() -> None:
    """The next load is the first of a test, which changes nothing."""
    global _loads
    _loads = 0


def change_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has checkpoints and saved models loaded so."""
    original = PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(_every_second(original)))
    for module in (checkpoint, load, modular):
        monkeypatch.setattr(module, "load_file", _every_second(module.load_file))
    contents = fingerprint._contents
    monkeypatch.setattr(fingerprint, "_contents", lambda tensor: contents(_as_read.get(_hash(tensor), tensor)))


def _hash(tensor: torch.Tensor) -> int:
    return hash(bytes(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data))


def _every_second(read: Callable) -> Callable:
    @functools.wraps(read)
    def changed(*args: Any, **kwargs: Any) -> Any:
        global _loads
        loaded = read(*args, **kwargs)
        _loads += 1
        if _loads % 2 == 0:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            for tensor in model.values() if isinstance(model, dict) else model.parameters():
                if tensor.is_floating_point() and tensor.any():
                    before, tensor.data = tensor.data, tensor.data * ULP
                    _as_read[_hash(tensor)] = before
        return loaded

    return changed
