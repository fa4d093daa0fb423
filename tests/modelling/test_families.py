"""The architectures of which a page says that their classification heads are read, and that they are exported."""

from __future__ import annotations

import re
from pathlib import Path

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.families import FAMILIES

PAGE = Path(ld.__file__).parent / "pt_docs" / "checkpoints.rst"
TWO_CHECKPOINTS = {"alibi-bert"}
"""Named on the page by its checkpoints, JINA-v2 and MosaicBERT."""


def test_the_page_names_the_architectures_with_a_head_and_those_that_are_exported():
    _, exported, others = re.split(
        r"Classification heads are read from|Classifiers of these architectures can be exported|need\s+``fit``",
        PAGE.read_text("utf-8"),
    )[:3]
    exported, others = (set(re.findall(r"``([\w-]+)``", part)) for part in (exported, others))
    with_head = [family for family in FAMILIES.values() if family.head is not None]
    assert exported == {family.name for family in with_head if family.supports_export}
    assert others == {family.name for family in with_head if not family.supports_export} - TWO_CHECKPOINTS
