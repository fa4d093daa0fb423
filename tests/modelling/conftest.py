from __future__ import annotations

import pytest

from pyterrier_longdoc.modelling.backbones.load import Backbone, load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder


@pytest.fixture(scope="module")
def backbone(cross_encoder) -> Backbone:
    return load_backbone(cross_encoder)


@pytest.fixture
def encoded(monkeypatch):
    """Numbers of token sequences that encoders were given, one entry a call."""
    sizes = []
    original = WindowEncoder.token_states

    def counting(self, inputs, *args):
        sizes.append(len(inputs))
        return original(self, inputs, *args)

    monkeypatch.setattr(WindowEncoder, "token_states", counting)
    return sizes
