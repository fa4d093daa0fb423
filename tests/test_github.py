"""What GitHub runs: with the least rights, on the Pythons and lowest versions that `pyproject.toml` promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_no_more_rights_than_they_need(path):
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert "secrets" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_major_version(path):
    used = [step["uses"] for job in parsed(path)["jobs"].values() for step in job.get("steps", ()) if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", action)] == []


def test_lowest_versions_are_tested():
    jobs = parsed(GITHUB / "workflows" / "tests.yml")["jobs"]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert jobs["tests"]["strategy"]["matrix"]["python"][0] == lowest
    (python,) = [step["with"]["python-version"] for step in jobs["lowest"]["steps"] if "with" in step]
    assert python == lowest
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"{torch.replace('>=', '==')}.0" in str(jobs["lowest"])


@pytest.mark.parametrize(("page", "code"), [("index.rst", 0), ("ext/pyterrier_longdoc/cedr.rst", 1)])
def test_only_warnings_of_these_pages_fail(tmp_path, page, code):
    steps = parsed(GITHUB / "workflows" / "docs.yml")["jobs"]["html"]["steps"]
    (command,) = [step["run"] for step in steps if step.get("name", "").startswith("No warning")]
    workspace = tmp_path / "pyterrier_longdoc"
    docs = workspace / "pyterrier" / "docs"
    docs.mkdir(parents=True)
    (docs / "warnings.txt").write_text(f"{docs}/{page}:1: WARNING: x\n", encoding="utf-8")
    environment = {**os.environ, "GITHUB_WORKSPACE": str(workspace)}
    done = subprocess.run(["bash", "-e", "-c", command], cwd=workspace, env=environment, capture_output=True)
    assert done.returncode == code


def test_issue_forms_ask_something():
    forms = [parsed(path) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    assert all(form["name"] and form["description"] and form["body"] for form in forms)


def test_contributing_links_lead_somewhere():
    text = (GITHUB / "CONTRIBUTING.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(links) >= 5
    assert [link for link in links if not (GITHUB / link).exists()] == []
    page = (ROOT / "pyterrier_longdoc" / "pt_docs" / "extending.rst").read_text(encoding="utf-8")
    headings = re.findall(r'"([A-Z][\w ]+)"', text)
    assert len(headings) >= 4
    assert [heading for heading in headings if f"\n{heading}\n" not in page] == []


def test_the_test_command_is_that_of_the_readme():
    (command,) = re.findall(
        r"^python3 -m venv.*pytest$", (GITHUB / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M
    )
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
