"""What the documentation promises is in `features.toml`, with the tests that hold it.

A feature without a test is a promise without a keeper: whoever adds one to the README or to `pt_docs` adds it there,
and whoever renames or removes a test sees there what it stood for. The names are looked up in the source of the tests.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

TESTS = Path(__file__).parent
FEATURES = tomllib.loads((TESTS / "features.toml").read_text(encoding="utf-8"))


@cache
def names(path: Path) -> set[str]:
    """The test functions of a file."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def exists(node: str) -> bool:
    file, _, name = node.partition("::")
    return (TESTS / file).is_file() and (not name or name in names(TESTS / file))


@pytest.mark.parametrize("area", FEATURES)
def test_every_feature_has_its_tests(area):
    assert not [feature for feature, tests in FEATURES[area].items() if not tests]
    assert not [(node, feature) for feature, tests in FEATURES[area].items() for node in tests if not exists(node)]
