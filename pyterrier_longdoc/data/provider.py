"""The collections of ``pt.get_dataset("longdoc:...")``, including those built from Python documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd
import pyterrier as pt

from .collection import CollectionParts, PositionedCollection
from .docstrings import SPLITS, DocstringsDataset, split_of
from .far_relevant import far_relevant
from .far_relevant_files import read_far_relevant
from .folder import FolderDataset
from .gold import read_squad
from .published import read_longembed

LONGEST_PASSAGE = 256
"""Maximum number of tokens (`count_tokens`) of a docstring used as a passage in the docstrings collections."""


def docstrings_with(position: str, dataset: DocstringsDataset | None = None) -> PositionedCollection:
    """Return known-item search in documents of random docstrings: ``pt.get_dataset("longdoc:docstrings-far")``.

    The passages are docstrings of up to 256 tokens (`count_tokens`). Each passage with a topic is the relevant passage
    of one document; the others are filler. Documents have 768 to 1431 tokens. The three collections only differ in the
    position of the relevant passage: "far" (at least 512 tokens after the start), "uniform" (anywhere), or "early" (it
    ends within the first 256 tokens). Variants are train, dev and test (the default).

    Args:
        position: "early", "uniform" or "far".
        dataset: the docstrings; None uses the installed packages.
    """

    def parts() -> CollectionParts:
        short = [entry for entry in (dataset or DocstringsDataset()).entries if entry.tokens <= LONGEST_PASSAGE]
        rows = [(f"q-{e.docno}", e.query, e.docno, 1, split_of(e.docno)) for e in short if e.query]
        frame = pd.DataFrame(rows, columns=["qid", "query", "docno", "label", "split"])
        return far_relevant(
            [{"docno": entry.docno, "text": entry.text} for entry in short],
            frame[["qid", "query", "split"]],
            frame[["qid", "docno", "label"]],
            position=position,
            within=LONGEST_PASSAGE,
            extra_passage=False,
        ).parts

    return PositionedCollection(
        f"docstrings-{position}", parts, default="test", variants=SPLITS, papers=("boytsov-2025-positional",)
    )


_BY_NAME: dict[str, Callable[[], pt.datasets.Dataset]] = {
    "docstrings": DocstringsDataset,
    "docstrings-far": partial(docstrings_with, "far"),
    "docstrings-uniform": partial(docstrings_with, "uniform"),
    "docstrings-early": partial(docstrings_with, "early"),
}
_BY_PATH: dict[str, Callable[[str], pt.datasets.Dataset]] = {
    "folder": FolderDataset,
    "squad": read_squad,
    "far-relevant": read_far_relevant,
    "longembed": read_longembed,
}


class LongDocDatasetProvider(pt.datasets.DatasetProvider):
    """Finds the collections of this package by name; registered as the entry point ``longdoc``."""

    def get_dataset(self, name: str) -> pt.datasets.Dataset:
        """Return a collection.

        Args:
            name: one of `list_dataset_names`, read on first use; ``folder:PATH`` for your own collection; or
                ``squad:PATH``, ``far-relevant:PATH`` or ``longembed:PATH`` for published files.
        """
        if name in _BY_NAME:
            return _BY_NAME[name]()
        kind, _, path = name.partition(":")
        if kind in _BY_PATH and path:
            return _BY_PATH[kind](path)
        choices = ", ".join(f"longdoc:{choice}" for choice in [*_BY_NAME, *(f"{kind}:PATH" for kind in _BY_PATH)])
        # Not a KeyError, which PyTerrier would replace with its own.
        raise ValueError(f"collection 'longdoc:{name}' must be one of {choices}")

    def list_dataset_names(self) -> list[str]:
        """Return the names of the collections that need no path."""
        return list(_BY_NAME)
