"""The collections behind ``pt.get_dataset("longdoc:...")``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyterrier as pt

from pyterrier_longdoc.data.bodies import DecodedDataset
from pyterrier_longdoc.data.docstrings import DocstringsDataset
from pyterrier_longdoc.data.folder import FolderDataset
from pyterrier_longdoc.data.jsonl import read_far_relevant
from pyterrier_longdoc.data.named import docstrings_needle, docstrings_with, plain_passkey
from pyterrier_longdoc.data.needle import read_longembed

_NAMED: dict[str, Callable[[], pt.datasets.Dataset]] = {
    "docstrings": DocstringsDataset,
    "docstrings-far": partial(docstrings_with, "far"),
    "docstrings-uniform": partial(docstrings_with, "uniform"),
    "docstrings-early": partial(docstrings_with, "early"),
    "needle": docstrings_needle,
    "passkey": plain_passkey,
}
_BY_ARGUMENT: dict[str, Callable[[str], pt.datasets.Dataset]] = {
    "folder": FolderDataset,
    "far-relevant": read_far_relevant,
    "longembed": read_longembed,
    "irds": DecodedDataset,
}


class LongDocDatasetProvider(pt.datasets.DatasetProvider):
    """Finds the collections of this package by name; registered as the entry point ``longdoc``."""

    def get_dataset(self, name: str) -> pt.datasets.Dataset:
        """Returns a collection.

        Args:
            name: one of `list_dataset_names`, of which nothing is read yet; ``folder:PATH`` for a collection of your
                own; ``far-relevant:PATH`` and ``longembed:PATH`` for published files; or ``irds:NAME`` for a dataset
                of ir_datasets, its documents decoded.

        Raises:
            KeyError: If there is no collection of that name.
            FileNotFoundError: If the folder is not there.
        """
        if name in _NAMED:
            return _NAMED[name]()
        kind, _, argument = name.partition(":")
        if kind in _BY_ARGUMENT and argument:
            return _BY_ARGUMENT[kind](argument)
        known = [*_NAMED, *(f"{kind}:{'NAME' if kind == 'irds' else 'PATH'}" for kind in _BY_ARGUMENT)]
        raise KeyError(f"no collection {name!r}; there are {known}")

    def list_dataset_names(self) -> list[str]:
        """Names of the collections that need no argument."""
        return list(_NAMED)
