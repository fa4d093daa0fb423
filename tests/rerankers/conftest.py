from __future__ import annotations

import sys

import pytest

from ..support.systems import CONTRACT, REPRESENTATIVE, SYSTEMS, make, slow_but


@pytest.fixture(params=slow_but(REPRESENTATIVE, CONTRACT))
def name(request) -> str:
    return request.param


@pytest.fixture
def fresh(name):
    """A new transformer that has loaded nothing yet."""
    return make(name)


@pytest.fixture(scope="session")
def all_loaded():
    return {name: make(name) for name in SYSTEMS}


@pytest.fixture
def loaded(name, all_loaded):
    """A transformer shared between tests, which must not change it."""
    return all_loaded[name]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a backbone is an error."""

    def refuse(*_, **__):
        raise AssertionError("a backbone was loaded")

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("pyterrier_longdoc.") and hasattr(module, "load_backbone"):
            monkeypatch.setattr(module, "load_backbone", refuse)
