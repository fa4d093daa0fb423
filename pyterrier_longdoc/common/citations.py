"""Citations: the entries of `references.bib` and the objects that cite them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar


@cache
def entries() -> dict[str, str]:
    """Return the entries of `references.bib` by key; each entry must begin with an @ at the start of a line."""
    file = Path(__file__).with_name("references.bib")
    texts = re.split(r"^(?=@)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    keys = [re.match(r"@\w+\s*\{\s*([^,\s]+)\s*,", entry) for entry in texts]
    return {key[1]: entry.strip() for key, entry in zip(keys, texts, strict=True) if key}


def bibtex(papers: Iterable[str]) -> str:
    """Return the distinct entries of papers, given by keys of `references.bib` or as entries that begin with an @."""
    return "\n\n".join(paper if paper.startswith("@") else entries()[paper] for paper in dict.fromkeys(papers))


def papers_of(*parts: Any) -> list[str]:
    """Return the papers of these parts."""
    return [paper for part in parts if isinstance(part, Cited) for paper in part.cited()]


class Cited:
    """Base class of objects described by papers; `papers` are keys of `references.bib`, or BibTeX entries."""

    papers: ClassVar[tuple[str, ...]] = ()

    def cited(self) -> list[str]:
        """Return the papers of this object and its arguments."""
        return list(self.papers)

    def citation(self) -> str:
        """Return the BibTeX entries of the papers to cite; for the checkpoint, see its model card."""
        return bibtex(self.cited())
