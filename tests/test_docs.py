"""The pages of `pt_docs` build without a warning, say something of every name they list, and read well on GitHub."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

import pyterrier_longdoc

PAGES = Path(pyterrier_longdoc.__file__).parent / "pt_docs"
SITE = Path(__file__).parent / "docs"
BUILD = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--conf-dir"]


@pytest.mark.slow
def test_pages_build_without_a_warning_and_describe_every_name(tmp_path):
    pytest.importorskip("sphinx_autodoc_typehints")
    done = subprocess.run([*BUILD, SITE, PAGES, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for source in PAGES.glob("*.rst"):
        page = BeautifulSoup((tmp_path / f"{source.stem}.html").read_text(encoding="utf-8"), "lxml")
        listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
        described = [name for name in listed if page.find(id=name).find_next_sibling("dd").get_text(strip=True)]
        assert described == listed
        assert not page.find_all("cite"), f"{source.name} has autodoc entries, but does not begin with a default role"
        if source.stem == "reading":
            methods = ("rank", "transform", "fit", "save", "load", "export", "push_to_hub", "citation")
            assert [each for each in methods if not page.find(id=f"pyterrier_longdoc.CrossEncoder.{each}")] == []


ONLY_ON_THE_SITE = r"auto\w+|currentmodule|default-role|how-to|image|related|schematic|seealso|toctree"
"""Directives without which the pages say the same; all others must be docutils' own."""


@pytest.mark.parametrize("source", sorted(PAGES.glob("*.rst")), ids=lambda source: source.stem)
def test_pages_read_well_on_github(source):
    """GitHub renders a page by docutils without Sphinx: what only Sphinx knows vanishes with its content."""
    core = pytest.importorskip("docutils.core")
    text, told = source.read_text(encoding="utf-8"), io.StringIO()
    settings = {"warning_stream": told, "report_level": 2, "halt_level": 5, "syntax_highlight": "none"}
    html = core.publish_parts(text, writer_name="html5", settings_overrides=settings)["html_body"]
    unknown = set(re.findall(r'Unknown directive type "(\S+)"', told.getvalue()))
    assert {name for name in unknown if not re.fullmatch(ONLY_ON_THE_SITE, name)} == set()
    others = re.sub(r'.*Unknown directive type "\S+"\.\n\n(?:\.\. .*\n(?: +.*\n|\n)*)', "", told.getvalue())
    assert others.strip() == ""
    assert "mailto:" not in html, "nDCG@10 becomes an address: make it a literal"
