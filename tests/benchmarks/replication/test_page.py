"""The page about the papers in miniature has what its command prints."""

from __future__ import annotations

from pathlib import Path

import pyterrier_longdoc as ld

from .page import results_section

PAGE = Path(ld.__file__).parent / "pt_docs" / "replication.rst"


def test_the_page_has_the_section_that_is_printed(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    assert results_section("tests/benchmarks/replication") in PAGE.read_text(encoding="utf-8")
