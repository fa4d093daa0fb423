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

from .support import other_cpu, reading, terrier, tiny

QUICK = (
    "test_architecture.py",
    "analysis/test_estimators.py",
    "common/test_language.py",
    "data/test_folder.py",
    "experiment/test_systems.py",
    "listwise/test_schedules.py",
    "modelling/test_heads.py",
    "modelling/test_windows.py",
    "papers/test_presets.py",
    "rerankers/test_models.py",
    "training/test_losses.py",
)
"""What `pytest -m quick` runs before every commit, in half a minute: the layers and, of each sub-package, the file of
tests that fails first when something is broken. Nothing else is collected."""

OUTSIDE_QUICK = ("slow", "gpu", "hub", "terrier")

# `--hypothesis-profile=thorough` is for once a week.
settings.register_profile("few", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("few")

TESTS = Path(__file__).resolve().parent


def pytest_addoption(parser) -> None:
    parser.addoption("--other-cpu", action="store_true", help="every second model has weights that are an ulp larger")


def place(path: Path) -> str:
    """Where a file is below `tests`; "" for another one."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


def only_quick(config) -> bool:
    """Whether the command was `pytest -m quick`."""
    return config.getoption("markexpr") == "quick"


def pytest_configure(config) -> None:
    if only_quick(config):
        config.option.doctestmodules = False
    config.addinivalue_line("filterwarnings", "ignore:.* rows have no (text|query)")


def pytest_ignore_collect(collection_path, config) -> bool | None:
    if only_quick(config) and collection_path.name.startswith("test_"):
        return place(collection_path) not in QUICK
    return None


def pytest_collection_modifyitems(config, items) -> None:
    # README, pages and notebooks take longest: first, so that no process waits for another one at the end.
    items.sort(key=lambda item: item.path.parent != TESTS)
    for item in items:
        if "terrier_home" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.terrier)
        if place(item.path) in QUICK and not any(item.get_closest_marker(name) for name in OUTSIDE_QUICK):
            item.add_marker(pytest.mark.quick)
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


@pytest.fixture(scope="session", autouse=True)
def checkpoints_are_read_once():
    """Copies of tiny checkpoints in place of further readings; see `support/reading.py`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        reading.read_once(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def tests_of_reading_read(request, monkeypatch) -> None:
    monkeypatch.setattr(reading, "enabled", place(request.path) not in reading.FROM_FILES)


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


@pytest.fixture(scope="session")
def terrier_home(tmp_path_factory) -> Path:
    """A folder for PYTERRIER_HOME with links to Terrier's jars; a test that uses it gets the marker `terrier`."""
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
