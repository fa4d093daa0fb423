"""Passages of documents: cut from them, chosen for a query, and handed on to a reader or a language model."""

from .evidence import Evidence
from .passages import Passages

__all__ = ["Evidence", "Passages"]
