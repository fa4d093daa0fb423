"""The package does not grow unnoticed: its size and the length of its paths are held against `budget.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import way_of_data

HERE = Path(__file__).parent
BUDGET = json.loads((HERE / "budget.json").read_text(encoding="utf-8"))
MARGIN = 1.01


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def way(files: dict[str, list[str]]) -> tuple[int, int]:
    return len(files), sum(map(len, files.values()))


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    transform, fit = way(way_of_data.way_of_transform()), way(way_of_data.way_of_fit())
    return {
        "lines of the package": lines(Path(way_of_data.PACKAGE)),
        "lines of the tests": lines(HERE),
        "files that MaxP.transform enters": transform[0],
        "functions that MaxP.transform enters": transform[1],
        "files that MaxP.fit enters": fit[0],
        "functions that MaxP.fit enters": fit[1],
    }


@pytest.mark.parametrize("name", BUDGET)
def test_nothing_outgrows_its_budget(sizes, name):
    assert sizes[name] <= BUDGET[name] * MARGIN, (
        f"{name}: {sizes[name]}, the budget is {BUDGET[name]}: remove something, or raise the number in "
        f"tests/budget.json and say why in the commit"
    )


def test_each_size_has_a_budget(sizes):
    assert sizes.keys() == BUDGET.keys()
