from __future__ import annotations

import pytest

from pyterrier_longdoc.modelling.backbones.backbone import Backbone
from pyterrier_longdoc.modelling.backbones.load import load_backbone


@pytest.fixture(scope="module")
def backbone(cross_encoder) -> Backbone:
    return load_backbone(cross_encoder)
