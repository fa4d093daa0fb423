"""Citations: the entries of `references.bib` and the objects that cite them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from .runs import stages_of

_FILE = Path(__file__).with_name("references.bib")


@cache
def entries(path: Path = _FILE) -> dict[str, str]:
    """Return the entries of a BibTeX file by key; each entry must begin with an @ at the start of a line."""
    texts = re.split(r"^(?=@)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    keys = [re.match(r"@\w+\s*\{\s*([^,\s]+)\s*,", entry) for entry in texts]
    return {key[1]: entry.strip() for key, entry in zip(keys, texts, strict=True) if key}


def bibtex(papers: Iterable[str]) -> str:
    """Return the distinct entries of papers, given by keys of `references.bib` or as entries that begin with an @."""
    return "\n\n".join(paper if paper.startswith("@") else entries()[paper] for paper in dict.fromkeys(papers))


def papers_of(*parts: Any) -> list[str]:
    """Return the papers of these parts."""
    return [paper for part in parts if isinstance(part, Cited) for paper in part.cited()]


def papers_of_pipeline(pipeline: Any) -> list[str]:
    """Return the papers of the stages of a pipeline and of the collections that their text loaders read."""
    papers: list[str] = []
    for stage in stages_of(pipeline):
        loader = getattr(stage, "text_loader", None)
        parts: list[Any] = [stage, loader, getattr(loader, "dataset", None), getattr(stage, "dataset", None)]
        for part in parts:
            if isinstance(part, Cited):
                papers += part.cited()
            elif hasattr(part, "irds_ref"):
                import ir_datasets

                bibliography = entries(Path(ir_datasets.__file__).parent / "docs" / "bibliography.bib")
                keys = (part.irds_ref().documentation() or {}).get("bibtex_ids", ())
                papers += [bibliography[key] for key in keys if key in bibliography]
            else:
                papers += getattr(part, "papers", None) or ()
        for model in getattr(stage, "models", ()):  # of folds
            papers += papers_of_pipeline(model)
    return list(dict.fromkeys(papers))


class Cited:
    """Base class of objects described by papers; `papers` are keys of `references.bib`, or BibTeX entries."""

    papers: ClassVar[tuple[str, ...]] = ()

    def cited(self) -> list[str]:
        """Return the papers of this object and its arguments."""
        return list(self.papers)

    def citation(self) -> str:
        """Return the BibTeX entries of the papers to cite; for the checkpoint, see its model card."""
        return bibtex(self.cited())
