"""The commands that GitHub runs are those of the README, on the lowest versions that `pyproject.toml` promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readme_s_test_command_is_that_of_ci_and_contributors():
    (command,) = re.findall(r"^python3 -m venv.*pytest$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    for path in (".ci/run", ".github/CONTRIBUTING.md"):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        assert any(line.startswith(command) for line in lines), path


def test_the_lowest_versions_are_tested():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert jobs["tests"]["strategy"]["matrix"]["python"][0] == lowest
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"{torch.replace('>=', '==')}.0" in str(jobs["lowest"])
