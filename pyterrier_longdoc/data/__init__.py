"""Test collections: readers, and generators with known positions of relevant passages."""

# Not imported lazily, because two of the functions have the name of their module.
from .collection import CollectionParts, PositionedCollection
from .docstrings import DocstringsDataset
from .far_relevant import far_relevant
from .far_relevant_files import read_far_relevant
from .folder import FolderDataset
from .gold import from_passage_qrels, read_squad
from .published import read_longembed
from .rotation import RotateDocuments, rotate

__all__ = [
    "CollectionParts", "DocstringsDataset", "FolderDataset", "PositionedCollection", "RotateDocuments",
    "far_relevant", "from_passage_qrels", "read_far_relevant", "read_longembed", "read_squad", "rotate",
]  # fmt: skip
