from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PT_TEST_TRANSFORMER_REPORTS", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes share the cores
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # before Ray is imported: Java may be here, too

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import settings

from pyterrier_longdoc.modelling.heads import base

from .support import terrier, tiny

# `--hypothesis-profile=thorough` is for once a week.
settings.register_profile("few", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("few")


def pytest_configure(config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.* rows have no (text|query)")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # no export is reported to OpenVINO's makers


def pytest_collection_modifyitems(items) -> None:
    # README, pages and notebooks take longest: first, so that no process waits for another one at the end.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(autouse=True)
def heads_of_the_package(monkeypatch) -> None:
    """Forgets the heads that a test has registered."""
    monkeypatch.setattr(base, "_REGISTRY", base.registered_heads())


@pytest.fixture(autouse=True)
def no_open_figures():
    """Closes what pyplot holds at the end of a test, as a notebook does at the end of a cell."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def cross_encoder() -> str:
    """Folder of a tiny random BERT cross-encoder with one label."""
    return tiny.encoder()


@pytest.fixture(scope="session")
def plain_encoder() -> str:
    """Folder of a tiny random BERT without a classification head."""
    return tiny.encoder(None)


@pytest.fixture(scope="session")
def terrier_home(tmp_path_factory) -> Path:
    """A folder for PYTERRIER_HOME with links to Terrier's jars; skips the test where there are none, or no Java."""
    return terrier.home(tmp_path_factory.mktemp("pyterrier"))


@pytest.fixture(scope="session")
def terrier_started(terrier_home) -> None:
    """Java with Terrier in this process: from here on `pt.terrier` works."""
    terrier.start(terrier_home)


@pytest.fixture(scope="session")
def terrier_index(terrier_started, tmp_path_factory):
    """The `TerrierIndex` of `support.terrier.DOCUMENTS`, for reading only."""
    return terrier.index(tmp_path_factory.mktemp("terrier") / "index")


@pytest.fixture
def results() -> pd.DataFrame:
    return tiny.results()
