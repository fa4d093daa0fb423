from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PT_TEST_TRANSFORMER_REPORTS", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes share the cores

from pathlib import Path

import pandas as pd
import pytest

from pyterrier_longdoc.modelling.heads import base

from .support import other_cpu, tiny

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser) -> None:
    parser.addoption("--other-cpu", action="store_true", help="every second model has weights that are an ulp larger")


def pytest_configure(config) -> None:
    for expected in ("MORESPlus is experimental", ".* rows have no (text|query)"):
        config.addinivalue_line("filterwarnings", f"ignore:{expected}")


def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--other-cpu"):
        reason = pytest.mark.skip(reason="its subject are bytes")
        for item in items:
            if item.get_closest_marker("bytes"):
                item.add_marker(reason)


@pytest.fixture(scope="session", autouse=True)
def every_second_model(pytestconfig):
    """What `--other-cpu` asks for."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if pytestconfig.getoption("--other-cpu"):
            other_cpu.change_models(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def first_model() -> None:
    other_cpu.start_anew()


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


@pytest.fixture
def results() -> pd.DataFrame:
    return tiny.results()


@pytest.fixture(scope="session")
def time_collection() -> Path:
    """The TIME collection beside the checkout; tests that need it are skipped without it."""
    folder = SHARED_DATA / "time"
    if not folder.is_dir():
        pytest.skip("the TIME collection is not here")
    return folder
