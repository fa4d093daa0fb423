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

from .support import tiny

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:MORESPlus is experimental")


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
