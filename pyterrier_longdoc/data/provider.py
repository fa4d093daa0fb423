"""The collections behind ``pt.get_dataset("longdoc:...")``."""

from __future__ import annotations

from collections.abc import Callable

import pyterrier as pt

from pyterrier_longdoc.data.docstrings import DocstringsDataset
from pyterrier_longdoc.data.folder import FolderDataset

_NAMED: dict[str, Callable[[], pt.datasets.Dataset]] = {
    "docstrings": DocstringsDataset,
}
_BY_ARGUMENT: dict[str, Callable[[str], pt.datasets.Dataset]] = {
    "folder": FolderDataset,
}


class LongDocDatasetProvider(pt.datasets.DatasetProvider):
    """Finds the collections of this package by name; registered as the entry point ``longdoc``."""

    def get_dataset(self, name: str) -> pt.datasets.Dataset:
        """Returns a collection.

        Args:
            name: ``docstrings``, or ``folder:PATH`` for a collection of your own. Nothing is read yet.

        Raises:
            KeyError: If there is no collection of that name.
            FileNotFoundError: If the folder is not there.
        """
        if name in _NAMED:
            return _NAMED[name]()
        kind, _, argument = name.partition(":")
        if kind in _BY_ARGUMENT and argument:
            return _BY_ARGUMENT[kind](argument)
        known = [*_NAMED, *(f"{kind}:PATH" for kind in _BY_ARGUMENT)]
        raise KeyError(f"no collection {name!r}; there are {known}")

    def list_dataset_names(self) -> list[str]:
        """Names of the collections that need no argument."""
        return list(_NAMED)
