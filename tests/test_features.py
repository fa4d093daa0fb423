"""What the documentation promises is in `features.toml`, with the files of tests that hold it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

TESTS = Path(__file__).parent
FEATURES = tomllib.loads((TESTS / "features.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("area", FEATURES)
def test_every_promise_has_its_tests(area):
    held = {promise: [files] if isinstance(files, str) else files for promise, files in FEATURES[area].items()}
    assert all(held.values())
    assert not [(promise, file) for promise, files in held.items() for file in files if not (TESTS / file).is_file()]
