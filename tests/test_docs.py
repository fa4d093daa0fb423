"""The pages of `pt_docs` build without a warning, and say something of every name they list."""

from __future__ import annotations

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
