"""What to cite: the entries of `references.bib`, and who names them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

_FILE = Path(__file__).with_name("references.bib")
_START = re.compile(r"^@\w+\s*\{\s*([^,\s]+)\s*,", re.MULTILINE)
_BRACE = re.compile(r"(?<!\\)[{}]")


@cache
def entries(path: Path = _FILE) -> dict[str, str]:
    """The entries of a BibTeX file as they are written there, by key.

    Raises:
        ValueError: if two have the same key, or the braces of one are not closed.
    """
    text = path.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for start in _START.finditer(text):
        key = start[1]
        if key in found:
            raise ValueError(f"{path.name} has two entries {key!r}")
        found[key] = text[start.start() : _closed(text, start.start(), f"{path.name}: entry {key!r}")]
    return found


def _closed(text: str, start: int, what: str) -> int:
    """Where the braces that open after `start` are closed again."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    raise ValueError(f"{what} is not closed")


def bibtex(papers: Iterable[str]) -> str:
    """The entries of papers, each once, in the order in which they are asked for.

    Args:
        papers: keys of `references.bib`, or entries that begin with an `@`.
    """
    return "\n\n".join(paper if paper.startswith("@") else entries()[paper] for paper in dict.fromkeys(papers))


def of_ir_datasets(dataset: Any) -> tuple[str, ...]:
    """The entries that ir_datasets' own documentation names for one of its datasets."""
    import ir_datasets

    known = entries(Path(ir_datasets.__file__).parent / "docs" / "bibliography.bib")
    named = (dataset.documentation() or {}).get("bibtex_ids", ())
    return tuple(known[key] for key in named if key in known)


def papers_of(*parts: Any) -> list[str]:
    """The papers behind the parts of something; None and what names none have none."""
    return [paper for part in parts if isinstance(part, Cited) for paper in part.cited()]


class Cited:
    """Something that published papers describe: `papers` are keys of `references.bib`, or BibTeX of one's own."""

    papers: ClassVar[tuple[str, ...]] = ()

    def cited(self) -> list[str]:
        """The papers behind this object, as it is set up."""
        return list(self.papers)

    def citation(self) -> str:
        """BibTeX of the papers that describe this; empty where there is none. A checkpoint's is on its model card."""
        return bibtex(self.cited())
